"""The torch target by itself, on small random models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.test_judges import Spelling, random_model
from trtllm_specprefill.errors import ContextTooLong, TargetFailed
from trtllm_specprefill.plan import PrunePlan, Reason, check_fits
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.torch import SHORTEST_HEAD, TorchTarget


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


# --- heads kept between prompts


def headed(head: np.ndarray, n: int, *, contiguous: bool = False) -> PrunePlan:
    """A pruned plan of `n` ids behind `head`."""
    ids = np.concatenate([head, random_ids(n)])
    gaps = np.random.default_rng().integers(1, 4, n).cumsum()
    at = np.concatenate([np.arange(head.size), head.size - 1 + gaps]).astype(np.int32)
    if contiguous:
        at = np.arange(ids.size, dtype=np.int32)
    end = int(at[-1]) + 1
    kind = "contiguous" if contiguous else "original"
    return PrunePlan(ids, at, end, kind, end, Reason.PRUNED, head=int(head.size))


def counted(target: TorchTarget, work: Callable[[], object]) -> tuple[int, object]:
    """Tokens that the model was fed by `work`, and what it gave."""
    fed: list[int] = []
    hook = target.model.module.register_forward_pre_hook(
        lambda _, args, given: fed.append(given["input_ids"].numel()), with_kwargs=True
    )
    with torch.inference_mode():
        got = work()
    hook.remove()
    return sum(fed), got


def tokens_of(target: TorchTarget, plan: PrunePlan) -> list[int]:
    return [t for step in target.stream(plan, Sampling(max_tokens=6)) for t in step.token_ids]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_known_head_is_not_read_again_and_the_answer_is_the_same(family: str) -> None:
    model = replace(random_model(family, Spelling()), eos_token_ids=frozenset())
    head = random_ids(SHORTEST_HEAD + int(np.random.default_rng().integers(90)))
    warm = TorchTarget(model, 1 << 26)
    tokens_of(warm, headed(head, 30))
    for contiguous in (False, True):
        plan = headed(head, 50, contiguous=contiguous)
        cold = TorchTarget(model, 1 << 26)
        cold_fed, expected = counted(cold, lambda plan=plan, cold=cold: tokens_of(cold, plan))
        warm_fed, got = counted(warm, lambda plan=plan: tokens_of(warm, plan))
        assert got == expected == tokens_of(warm, plan)
        assert (cold_fed, warm_fed) == (plan.input_ids.size + 5, 50 + 5)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_head_read_by_itself_gives_the_logits_of_one_pass(family: str) -> None:
    model = random_model(family, Spelling())
    head = random_ids(100)  # longer than gemma3's window
    plan = headed(head, 40)
    whole = torch.from_numpy(TorchTarget(model)._logits(plan))
    with torch.inference_mode():
        target = TorchTarget(model, 1 << 26)
        assert target._heads is not None
        cache = target._head(head, target._heads)
        ids, at = (torch.from_numpy(a[100:]).long() for a in (plan.input_ids, plan.position_ids))
        split = target._forward(ids, at, cache)
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-4)


def test_a_head_read_ahead_is_there_for_the_plan() -> None:
    model = replace(random_model("llama", Spelling()), eos_token_ids=frozenset())
    plan = headed(random_ids(80), 30)
    target = TorchTarget(model, 1 << 26)
    assert counted(target, lambda: target.read_ahead(plan.input_ids[:80]))[0] == 80
    fed, got = counted(target, lambda: tokens_of(target, plan))
    assert (fed, got) == (30 + 5, tokens_of(TorchTarget(model, 1 << 26), plan))
    forgetting = TorchTarget(model)
    assert counted(forgetting, lambda: forgetting.read_ahead(plan.input_ids[:80]))[0] == 0


def test_a_head_there_is_no_room_for_is_read_ahead_once_and_never_again() -> None:
    model = replace(random_model("llama", Spelling()), eos_token_ids=frozenset())
    target, plan = TorchTarget(model, 1), headed(random_ids(80), 30)
    head = plan.input_ids[:80]
    assert [counted(target, lambda: target.read_ahead(head))[0] for _ in range(3)] == [80, 0, 0]
    longer = random_ids(90)
    assert counted(target, lambda: target.read_ahead(longer))[0] == 0
    assert tokens_of(target, plan) == tokens_of(TorchTarget(model, 1 << 26), plan)


def test_a_head_that_cannot_be_read_fails_with_its_plan_only() -> None:
    model = random_model("llama", Spelling())
    target, plan = TorchTarget(model, 1 << 26), headed(random_ids(80), 30)
    plan.input_ids[7] = 9000
    target.read_ahead(plan.input_ids[:80])
    with pytest.raises(TargetFailed, match="llama"):
        next(target.stream(plan, Sampling()))


@given(st.lists(st.integers(0, 3), min_size=2, max_size=8), st.sampled_from([1, 40_000, 1 << 26]))
def test_heads_that_displace_one_another_change_no_answer(order: list[int], room: int) -> None:
    model = replace(random_model("llama", Spelling()), eos_token_ids=frozenset())
    plans = [headed(random_ids(70 + 9 * i), 12) for i in range(4)]
    alone = [tokens_of(TorchTarget(model, room), plan) for plan in plans]
    target = TorchTarget(model, room)
    assert [tokens_of(target, plans[i]) for i in order] == [alone[i] for i in order]
