"""Every target behind the same small random model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.contracts import engine
from tests.test_judges import Spelling, random_model
from trtllm_specprefill.models import EngineModel, Model
from trtllm_specprefill.target.base import Target
from trtllm_specprefill.target.manifest import Manifest
from trtllm_specprefill.target.torch import TorchTarget

CONTRACTS = Path(engine.__file__).parent
KINDS = {
    "trtllm_executor": "recorded_1_2",
    "trtllm_llm of 1.2": "recorded_1_2",
    "trtllm_llm of 1.4": "recorded_1_4",
}


def manifest_of(kind: str, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "model": "small",
        "backend": "tensorrt" if kind == "trtllm_executor" else "pytorch",
        "precision": "bf16",
        "tensorrt_llm": "1.2.1",
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "original_positions": True,
        "kv_tokens": 2048,
        "positions": 4096,
        "batch_size": 32,
    }
    return Manifest(**{**fields, **changes})


class Made:
    """A target, and the engine behind it where there is one."""

    def __init__(self, target: Target, setup: engine.Setup | None) -> None:
        self.target, self.setup = target, setup

    @property
    def engine(self) -> engine.Engine:
        assert self.setup is not None
        return self.setup.engines[-1]


class Maker:
    """Makes targets of one kind."""

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kind, self._patch = kind, monkeypatch
        self._setups: list[engine.Setup] = []

    def __call__(
        self,
        model: Model | None = None,
        *,
        manifest: dict[str, Any] | None = None,
        setup: dict[str, Any] | None = None,
        **knobs: Any,
    ) -> Made:
        model = model or never_ending(random_model("llama", Spelling()))
        if self.kind == "torch":
            return Made(TorchTarget(model), None)
        install(KINDS[self.kind], self._patch)
        made = engine.Setup(model, **(setup or {}))
        self._setups.append(made)
        self._patch.setattr(engine, "setup", made)
        described = EngineModel(model.name, model.tokenizer, model.config, model.eos_token_ids)
        stated = manifest_of(self.kind, **(manifest or {}))
        knobs = {"timeout_s": 60.0, **knobs}
        if self.kind == "trtllm_executor":
            from trtllm_specprefill.target.trtllm_executor import ExecutorTarget

            return Made(ExecutorTarget("engine", described, stated, **knobs), made)
        from trtllm_specprefill.target.trtllm_llm import LLMTarget

        return Made(LLMTarget("checkpoint", described, stated, **knobs), made)

    def stop(self) -> None:
        for setup in self._setups:
            for running in setup.engines:
                running.stop()


def install(version: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the recorded `tensorrt_llm` of `version` the one that is imported."""
    for name in [n for n in sys.modules if n.split(".")[0] == "tensorrt_llm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(CONTRACTS / version))
    importlib.invalidate_caches()
    return importlib.import_module("tensorrt_llm")


def never_ending(model: Model) -> Model:
    return replace(model, eos_token_ids=frozenset())


@pytest.fixture(params=["torch", *KINDS])
def maker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    """Each kind of target that can be given positions, in turn."""
    made = Maker(request.param, monkeypatch)
    yield made
    made.stop()


@pytest.fixture(params=list(KINDS))
def engine_maker(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Maker]:
    """Each kind of engine of TensorRT-LLM in turn."""
    made = Maker(request.param, monkeypatch)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def model(byte_level: PreTrainedTokenizerFast) -> Model:
    """A small random model that never ends by itself, with a tokenizer of real text."""
    return never_ending(random_model("llama", byte_level, vocab_size=len(byte_level)))


@pytest.fixture(scope="module")
def folder(byte_level: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in Hugging Face format that answers in ASCII: servers differ in what they
    do with bytes that are no characters."""
    where = tmp_path_factory.mktemp("model")
    model = random_model("llama", byte_level, vocab_size=len(byte_level))
    spoken = [byte_level.decode([i]) for i in range(len(byte_level))]
    mute = torch.tensor([not (t.isascii() and t.isprintable()) for t in spoken])
    mute[list(byte_level.added_tokens_decoder)] = True  # so it never ends by itself
    with torch.no_grad():
        model.module.lm_head.weight[mute] = 0  # a logit of 0 is never the largest
    model.module.save_pretrained(where)
    byte_level.save_pretrained(where)
    return where
