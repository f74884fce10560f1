from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_specprefill.errors import ContextTooLong, InputError, UnsupportedPositions
from trtllm_specprefill.plan import (
    PositionSupport,
    PrunePlan,
    Reason,
    check_fits,
    dense_plan,
    make_plan,
    resolve_positions,
)
from trtllm_specprefill.prompt import Encoding, Prompt
from trtllm_specprefill.selection import Kept
from trtllm_specprefill.settings import Settings

masks = st.lists(st.booleans(), min_size=0, max_size=300).map(lambda m: [*m, True])
separators = st.lists(st.integers(10_001, 10_099), max_size=4)


def prompt_of(n: int) -> Prompt:
    at = np.arange(n, dtype=np.int64)
    ids = np.random.default_rng().permutation(n).astype(np.int32)
    encoding = Encoding(ids, at, at + 1)
    return Prompt("x" * n, encoding, encoding, (), Settings().in_force(), np.arange(n))


def kept_of(mask: list[bool]) -> Kept:
    return Kept((), np.asarray(mask, dtype=np.bool_), len(mask), 1.0, False)


@given(mask=masks)
def test_original_positions_are_the_kept_tokens_own_and_generation_starts_at_n(
    mask: list[bool],
) -> None:
    # kv-exps decoded from the last kept index + 1 of what it kept; the paper goes on from N.
    n = len(mask)
    prompt = prompt_of(n)
    plan = make_plan(prompt, kept_of(mask), "original")
    assert plan.position_ids.tolist() == [i for i, kept in enumerate(mask) if kept]
    assert plan.input_ids.tolist() == prompt.target.ids[plan.position_ids].tolist()
    assert plan.position_ids[-1] == n - 1
    assert plan.next_position == n
    assert (plan.positions, plan.reason, plan.prompt_tokens) == ("original", Reason.PRUNED, n)
    assert plan.input_ids.dtype == plan.position_ids.dtype == np.int32
    assert plan.keep_rate == sum(mask) / n


def test_the_papers_own_example() -> None:
    mask = [i in (0, 1, 3, 6, 7, 9) for i in range(10)]
    plan = make_plan(prompt_of(10), kept_of(mask), "original")
    assert plan.position_ids.tolist() == [0, 1, 3, 6, 7, 9]
    assert plan.next_position == 10


@given(mask=masks, separator=separators)
def test_contiguous_positions_count_from_0_and_generation_starts_at_m(
    mask: list[bool], separator: list[int]
) -> None:
    plan = make_plan(
        prompt_of(len(mask)), kept_of(mask), "contiguous", np.asarray(separator, np.int32)
    )
    m = plan.input_ids.size
    assert plan.position_ids.tolist() == list(range(m))
    assert plan.next_position == m
    assert plan.keep_rate == m / len(mask)
    assert plan.input_ids.dtype == plan.position_ids.dtype == np.int32


@given(mask=masks, separator=separators)
def test_separators_stand_in_every_gap_between_kept_tokens_and_nowhere_else(
    mask: list[bool], separator: list[int]
) -> None:
    prompt = prompt_of(len(mask))
    expected: list[int] = []
    last = None
    for i, kept in enumerate(mask):
        if kept:
            if last is not None and i - last > 1:
                expected += separator
            expected.append(int(prompt.target.ids[i]))
            last = i
    ids = np.asarray(separator, np.int32)
    plan = make_plan(prompt, kept_of(mask), "contiguous", ids)
    assert plan.input_ids.tolist() == expected


@given(n=st.integers(1, 400), reason=st.sampled_from([r for r in Reason if r != Reason.PRUNED]))
def test_the_dense_plan_is_the_whole_prompt_at_its_own_positions(n: int, reason: Reason) -> None:
    prompt = prompt_of(n)
    plan = dense_plan(prompt, reason, "why")
    assert np.array_equal(plan.input_ids, prompt.target.ids)
    assert plan.position_ids.tolist() == list(range(n))
    assert (plan.next_position, plan.prompt_tokens, plan.keep_rate) == (n, n, 1.0)
    assert (plan.reason, plan.detail, plan.kept) == (reason, "why", None)


def test_keeping_everything_is_the_dense_prompt_under_either_policy() -> None:
    prompt = prompt_of(57)
    dense = dense_plan(prompt, Reason.DISABLED)
    for positions in ("original", "contiguous"):
        plan = make_plan(prompt, kept_of([True] * 57), positions, np.asarray([7], np.int32))  # type: ignore[arg-type]
        assert np.array_equal(plan.input_ids, dense.input_ids)
        assert np.array_equal(plan.position_ids, dense.position_ids)
        assert plan.next_position == dense.next_position


def test_reasons_are_the_closed_list_of_the_design() -> None:
    assert {r.value for r in Reason} == {
        "pruned",
        "below_threshold",
        "disabled",
        "protected_exceeds_budget",
        "degenerate_scores",
        "draft_failed",
        "draft_timeout",
        "tokenizer_mismatch",
        "unsupported_target",
        "predicted_no_gain",
        "context_too_long",
    }


FULL = PositionSupport(honoured=True, window=None, context=10_000)


def resolved(policy: Any, support: PositionSupport = FULL, **other: Any) -> str:
    knobs = {"prompt_tokens": 5000, "max_tokens": 100, "shared_tokenizer": True, **other}
    return resolve_positions(policy, support, **knobs)


def test_auto_restores_positions_only_where_all_four_conditions_hold() -> None:
    assert resolved("auto") == "original"
    assert resolved("auto", shared_tokenizer=False) == "contiguous"
    assert resolved("auto", PositionSupport(False, None, 10_000)) == "contiguous"
    # Gemma-3-270m, window 512: 0 of 8 needles with original positions, 8 of 8 with contiguous.
    assert resolved("auto", PositionSupport(True, 512, 10_000)) == "contiguous"
    assert resolved("auto", PositionSupport(True, 4999, 10_000)) == "contiguous"
    assert resolved("auto", PositionSupport(True, 5000, 10_000)) == "original"
    assert resolved("auto", PositionSupport(True, None, 5100)) == "original"
    assert resolved("auto", PositionSupport(True, None, 5099)) == "contiguous"


def test_auto_follows_what_the_target_was_measured_to_answer_better_with() -> None:
    better = {name: replace(FULL, better=name) for name in ("original", "contiguous")}
    assert resolved("auto", better["contiguous"]) == "contiguous"
    assert resolved("auto", better["original"]) == "original"
    assert resolved("auto", better["original"], shared_tokenizer=False) == "contiguous"
    assert resolved("original", better["contiguous"]) == "original"  # what is asked for is done


@pytest.mark.parametrize(
    ("support", "why"),
    [
        (PositionSupport(False, None, 10_000), "does not honour"),
        (PositionSupport(True, 4999, 10_000), "window of 4999"),
        (PositionSupport(True, None, 5099), "5099 positions"),
    ],
)
def test_original_positions_are_refused_where_the_target_cannot_use_them(
    support: PositionSupport, why: str
) -> None:
    with pytest.raises(UnsupportedPositions, match=why) as caught:
        resolved("original", support)
    assert isinstance(caught.value, InputError)
    assert caught.value.field == "positions"


def test_a_stated_policy_is_followed() -> None:
    assert resolved("original", shared_tokenizer=False) == "original"
    assert resolved("contiguous") == "contiguous"
    assert resolved("contiguous", PositionSupport(False, 16, 10)) == "contiguous"


@pytest.mark.parametrize("positions", ["original", "contiguous"])
def test_a_plan_fits_where_its_last_generated_token_still_has_a_position(positions: Any) -> None:
    mask = [i % 3 == 0 for i in range(300)] + [True]
    plan = make_plan(prompt_of(301), kept_of(mask), positions)
    need = plan.next_position + 20
    check_fits(plan, need, 20)
    with pytest.raises(ContextTooLong) as caught:
        check_fits(plan, need - 1, 20)
    for part in ("prompt", "301 tokens", f"({plan.input_ids.size} kept)", str(need - 1), "(20)"):
        assert part in str(caught.value)


def test_a_dense_prompt_that_does_not_fit_says_so_without_speaking_of_kept_tokens() -> None:
    plan: PrunePlan = dense_plan(prompt_of(50), Reason.DISABLED)
    with pytest.raises(ContextTooLong, match="50 tokens") as caught:
        check_fits(plan, 50, 1)
    assert "kept" not in str(caught.value)
