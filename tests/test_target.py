"""The torch target by itself, on small random models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.test_judges import Spelling, random_model
from trtllm_specprefill.errors import ContextTooLong, TargetFailed
from trtllm_specprefill.plan import PrunePlan, Reason, check_fits
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.torch import TorchTarget


def dense(ids: np.ndarray) -> PrunePlan:
    n = ids.size
    return PrunePlan(ids, np.arange(n, dtype=np.int32), n, "original", n, Reason.DISABLED)


def random_ids(n: int) -> np.ndarray:
    return np.random.default_rng().integers(2, 211, n).astype(np.int32)


def test_an_id_outside_the_vocabulary_is_a_target_failure() -> None:
    target = TorchTarget(random_model("llama", Spelling()))
    with pytest.raises(TargetFailed, match="llama"):
        next(target.stream(dense(np.asarray([3, 9000], dtype=np.int32)), Sampling()))


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    target = TorchTarget(replace(random_model("qwen3", Spelling()), eos_token_ids=frozenset()))
    plan = dense(random_ids(40))
    drawn = [s.token_ids for s in target.stream(plan, Sampling(temperature=temperature))]
    greedy = [s.token_ids for s in target.stream(plan, Sampling())]
    assert drawn == greedy


def test_top_k_and_top_p_only_draw_likely_tokens() -> None:
    model = replace(random_model("llama", Spelling()), eos_token_ids=frozenset())
    target, plan = TorchTarget(model), dense(random_ids(30))
    with torch.inference_mode():
        ids = torch.from_numpy(plan.input_ids).long()[None]
        likely = model.module(ids).logits[0, -1].topk(3).indices.tolist()
    for seed in range(20):
        sampling = Sampling(temperature=5.0, top_k=3, seed=seed, max_tokens=1)
        (step,) = target.stream(plan, sampling)
        assert step.token_ids[0] in likely
        sampling = Sampling(temperature=5.0, top_p=1e-6, seed=seed, max_tokens=1)
        (step,) = target.stream(plan, sampling)
        assert step.token_ids[0] == likely[0]


def test_max_tokens_and_eos_give_their_finish_reasons() -> None:
    model = replace(random_model("llama", Spelling()), eos_token_ids=frozenset())
    plan = dense(random_ids(25))
    steps = list(TorchTarget(model).stream(plan, Sampling(max_tokens=5)))
    assert [s.finish_reason for s in steps] == [None] * 4 + ["length"]
    third = steps[2].token_ids[0]
    first = next(i for i, s in enumerate(steps) if s.token_ids[0] == third)
    ending = TorchTarget(replace(model, eos_token_ids=frozenset({third})))
    steps = list(ending.stream(plan, Sampling(max_tokens=5)))
    assert len(steps) == first + 1
    assert steps[-1].finish_reason == "stop"


def test_a_prompt_that_does_not_fit_says_why_it_was_not_pruned() -> None:
    plan = replace(dense(random_ids(50)), detail="no draft is loaded")
    check_fits(plan, 60, 10)
    with pytest.raises(ContextTooLong, match=r"50 tokens.* 60 positions.*no draft is loaded"):
        check_fits(plan, 60, 11)
