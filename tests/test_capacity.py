"""The cost model: the published figures, and what must hold of any prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, MixtralConfig
from typer.testing import CliRunner

from tests.test_judges import random_model
from trtllm_specprefill.capacity import GPUS, Served, Workload, plan_capacity
from trtllm_specprefill.cli import app
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.operations import parameters

CONFIGS = Path(__file__).parent / "engine_build" / "configs"
NAMES = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen2.5-72b")
MODELS: dict[str, Any] = {name: AutoConfig.from_pretrained(CONFIGS / name) for name in NAMES}
DRAFT = Served(MODELS["llama-3.1-8b"], "bf16", 8)
TARGET = Served(MODELS["llama-3.1-405b"], "fp8", 8)


@pytest.mark.parametrize(
    ("keep", "published"), [(0.1, 6.69), (0.3, 2.75), (0.5, 1.82), (0.7, 1.33)]
)
@pytest.mark.parametrize("prompt", [6_000, 10_000, 16_000])
def test_the_published_speedups_come_out(keep: float, published: float, prompt: int) -> None:
    # arXiv 2502.02789, figure 3: 8B and 405B FP8 on 8 H200, LongBench prompts.
    got = plan_capacity(DRAFT, TARGET, GPUS["h200"], Workload(prompt, keep, 64))
    assert got.speedup == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.55), ("llama-3.1-405b", 405.85)],
)
def test_models_have_the_weights_that_their_cards_state(name: str, billions: float) -> None:
    assert parameters(MODELS[name]) == pytest.approx(billions * 1e9, rel=2e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_are_those_of_the_module(family: str) -> None:
    model = random_model(family)
    counted = sum(w.numel() for w in model.module.parameters() if w.ndim == 2)
    assert parameters(model.config) == counted


def test_experts_that_a_token_does_not_use_still_take_memory() -> None:
    config = MixtralConfig()  # 8x7B
    assert parameters(config) == pytest.approx(46.7e9, rel=1e-2)


def test_kv_of_a_token_is_what_the_cache_holds() -> None:
    # 70B in BF16: 2 * 80 layers * 8 KV heads * 128 * 2 bytes.
    assert Served(MODELS["llama-3.1-70b"], "bf16", 8).kv_per_token == 327_680


@given(
    prompt=st.integers(64, 120_000),
    keep=st.floats(0.02, 1.0),
    output=st.integers(1, 2048),
    gpu=st.sampled_from(["h100", "h200"]),
    shared=st.booleans(),
)
def test_predictions_hold_together(
    prompt: int, keep: float, output: int, gpu: str, shared: bool
) -> None:
    target = replace(TARGET, config=MODELS["llama-3.1-70b"])
    work = Workload(prompt, keep, output)
    got = plan_capacity(DRAFT, target, GPUS[gpu], work, shared=shared)
    assert got.ttft_s == pytest.approx(got.draft_s + got.prefill_s)
    assert (
        got.speedup < 1 / (max(1, round(keep * prompt)) / prompt) ** 2
    )  # all is quadratic at most
    assert got.kv_saved >= 0
    assert 1 <= got.dense_batch <= work.batch
    more = plan_capacity(
        DRAFT, target, GPUS[gpu], replace(work, keep_rate=min(1.0, keep * 1.5)), shared=shared
    )
    assert more.ttft_s >= got.ttft_s
    assert more.kv_bytes >= got.kv_bytes
    assert more.requests_per_s <= got.requests_per_s * (1 + 1e-9)
    alone = plan_capacity(DRAFT, target, GPUS[gpu], work, shared=False)
    assert alone.requests_per_s >= got.requests_per_s * (1 - 1e-9)


def test_a_draft_as_large_as_its_target_gains_nothing() -> None:
    same = Served(MODELS["llama-3.1-70b"], "bf16", 8)
    got = plan_capacity(same, same, GPUS["h200"], Workload(20_000, 0.1, 64))
    assert got.speedup < 1


def test_two_models_that_do_not_fit_are_refused_before_they_start() -> None:
    # vLLM V1 port of the method: no memory was left for the draft at 0.9.
    target = Served(MODELS["llama-3.1-70b"], "bf16", 2)
    h100 = GPUS["h100"]
    work = Workload(4_000, 0.3, 256)
    assert plan_capacity(DRAFT, target, h100, work, shared=False).batch >= 1
    with pytest.raises(InputError, match=r"gpus.*157 GB of weights.*144 GB"):
        plan_capacity(DRAFT, target, h100, work)
    assert plan_capacity(DRAFT, replace(target, gpus=4), h100, work).batch >= 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"keep_rate": 0.0}, "keep_rate"),
        ({"keep_rate": 1.5}, "keep_rate"),
        ({"prompt": 0}, "prompt"),
    ],
)
def test_a_workload_out_of_range_is_named(changes: dict[str, Any], words: str) -> None:
    work = replace(Workload(1000, 0.5, 10), **changes)
    with pytest.raises(InputError, match=words):
        plan_capacity(DRAFT, TARGET, GPUS["h200"], work)


def test_fp8_needs_a_gpu_that_has_it() -> None:
    with pytest.raises(InputError, match="without FP8"):
        plan_capacity(DRAFT, TARGET, GPUS["a100-80gb"], Workload(1000, 0.5, 10))


def run(*more: str) -> str:
    models = ["--draft", str(CONFIGS / NAMES[0]), "--target", str(CONFIGS / NAMES[2])]
    words = ["plan-capacity", *models, "--gpus", "8", *more]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert not done.exit_code
    return done.stdout


def test_the_command_prints_the_prediction() -> None:
    options = ("--prompt", "10000", "--keep", "0.1", "--output", "64")
    got = json.loads(run(*options, "--json"))
    expected = plan_capacity(DRAFT, TARGET, GPUS["h200"], Workload(10_000, 0.1, 64))
    assert got == expected.report()
    assert f"{expected.speedup:.2f}x" in run(*options)
    own = json.loads(run(*options, "--draft-gpus", "1", "--json"))
    assert own["draft_s"] > got["draft_s"]
    with pytest.raises(InputError, match="gpu"):
        run("--gpu", "h300")
    with pytest.raises(InputError, match="precision"):
        run("--precision", "int4")
