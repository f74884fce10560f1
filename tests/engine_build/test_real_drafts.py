"""The demo models, exported whole, under onnxruntime against the library's torch draft."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_build.scoring_model import Scoring
from tests.engine_build.drafts import build, opened
from trtllm_specprefill.draft.engine import look_ahead
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.forward import last_logits, new_cache
from trtllm_specprefill.models import Model, load_model
from trtllm_specprefill.settings import Settings

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]

LENGTHS = (19, 333, 1024, 3001, 7990)  # traced with 72
# Batches; Gemma 3 has a sliding window of 512.
TOGETHER = [pytest.param((19, 333, 505, 512), id="short"), pytest.param((1024, 7990), id="long")]
STEPS = 8
# Layers that are run in window mode, and with look-ahead the whole model.
DEPTHS = {"smollm2-135m": (8, 30), "gemma3-270m": (6, 18)}


@functools.cache
def model_of(name: str) -> Model:
    return load_model(name, "float32", "cpu")


@functools.cache
def built(name: str, mode: str) -> Path:
    depth, layers = DEPTHS[name]
    if mode == "window":
        return build(model_of(name), Scoring("window", depth), 8192)
    if mode == "default":
        draft = TorchDraft(model_of(name))
        heads = draft.scoring_heads(Settings())
        return build(model_of(name), Scoring("window", draft.depth(Settings()), heads), 8192)
    scoring = Scoring("lookahead", layers, queries=1 + STEPS, votes="mean")
    return build(model_of(name), scoring, 8192)


def prompt(model: Model, tokens: int, prose: str) -> Any:
    start = int(np.random.default_rng().integers(0, 20_000))
    ids = model.tokenizer(prose[start : start + 8 * tokens + 200])["input_ids"]
    assert len(ids) >= tokens
    return np.array(ids[:tokens], dtype=np.int32)


def asked(mode: str, name: str) -> Settings:
    if mode == "lookahead":
        return Settings(scoring="lookahead", look_ahead=STEPS)
    return Settings(draft_window=0, draft_layers=DEPTHS[name][0])


def greedy(model: Model, ids: Any) -> list[int]:
    """What torch decodes through its own cache."""
    cache, tokens = new_cache(model), []
    given, place = torch.from_numpy(ids.astype(np.int64)), 0
    with torch.inference_mode():
        for _ in range(STEPS):
            places = torch.arange(place, place + given.numel())
            tokens.append(int(last_logits(model, given, places, cache).argmax()))
            place += given.numel()
            given = torch.tensor(tokens[-1:])
            if tokens[-1] in model.eos_token_ids:
                break
    return tokens


@pytest.mark.parametrize("name", list(DEPTHS))
@pytest.mark.parametrize("mode", ["window", "lookahead"])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_lengths_that_were_not_traced_score_as_under_torch(
    name: str, mode: str, tokens: int, prose: str
) -> None:
    model = model_of(name)
    draft, ids = opened(model, built(name, mode)), prompt(model, tokens, prose)
    found = draft.score(ids, asked(mode, name))
    expected = TorchDraft(model).score(ids, asked(mode, name))
    assert (found.layers, found.queries) == (expected.layers, expected.queries)
    off = float(np.abs(found.scores - expected.scores).max())
    print(f"{name} {mode} {tokens}: off by {off:.2g} of {expected.scores.max():.2g}")
    assert off <= 1e-4


@pytest.mark.parametrize("name", list(DEPTHS))
@pytest.mark.parametrize("lengths", TOGETHER)
def test_a_ragged_batch_scores_as_each_prompt_under_torch(
    name: str, lengths: tuple[int, ...], prose: str
) -> None:
    model = model_of(name)
    draft = opened(model, built(name, "window"), batch=4)
    prompts = [prompt(model, tokens, prose) for tokens in lengths]
    settings, judge = asked("window", name), TorchDraft(model)
    for ids, found in zip(prompts, draft.score_batch(prompts, settings), strict=True):
        expected = judge.score(ids, settings)
        assert (found.layers, found.queries) == (expected.layers, expected.queries)
        np.testing.assert_allclose(found.scores, expected.scores, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", list(DEPTHS))
@pytest.mark.parametrize("lengths", TOGETHER)
def test_a_ragged_batch_that_looks_ahead_scores_and_decodes_as_each_prompt_under_torch(
    name: str, lengths: tuple[int, ...], prose: str
) -> None:
    model = model_of(name)
    draft = opened(model, built(name, "lookahead"), batch=4, piece=max(256, max(lengths) // 8))
    prompts = [prompt(model, tokens, prose) for tokens in lengths]
    wide = [ids.astype(np.int64) for ids in prompts]
    found = look_ahead(
        draft._engine, wide, STEPS, "mean", ends=model.eos_token_ids, sees=draft._sees
    )
    judge = TorchDraft(model)
    for ids, one in zip(prompts, found, strict=True):
        expected = judge.score(ids, asked("lookahead", name))
        assert one.queries == expected.queries
        np.testing.assert_allclose(one.scores, expected.scores, rtol=0, atol=1e-4)
        assert list(one.tokens) == greedy(model, ids)


@pytest.mark.parametrize("name", list(DEPTHS))
def test_windows_of_a_long_prompt_score_as_under_torch(name: str, prose: str) -> None:
    """As the settings are when nothing is said: the heads that were found to score best."""
    model = model_of(name)
    draft, ids = opened(model, built(name, "default")), prompt(model, 8000, prose)
    found, expected = draft.score(ids, Settings()), TorchDraft(model).score(ids, Settings())
    for field in ("layers", "queries", "heads"):
        assert getattr(found, field) == getattr(expected, field)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=0, atol=1e-4)
