from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.strategies import WORDS
from trtllm_specprefill import clock, pipeline
from trtllm_specprefill.draft.base import Draft
from trtllm_specprefill.errors import (
    ContextTooLong,
    DegenerateScores,
    DraftFailed,
    DraftTimeout,
    InputError,
    SpecPrefillError,
    TargetFailed,
    TokenizerMismatch,
    UnsupportedPositions,
)
from trtllm_specprefill.importance import Importance
from trtllm_specprefill.pipeline import Generation, SpecPrefill
from trtllm_specprefill.plan import PositionSupport, PrunePlan, Reason
from trtllm_specprefill.settings import Sampling, Settings
from trtllm_specprefill.target.base import Step, Target

KNOBS: dict[str, Any] = {"threshold": 100, "min_keep_tokens": 0, "keep": 0.3}


@pytest.fixture(scope="module")
def text() -> str:
    rng = np.random.default_rng()
    return " ".join(rng.choice(WORDS, size=700)) + ". Where is the key?"


class Hands:
    """A clock that only the doubles move."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class ScriptedDraft(Draft):
    """Scores by a fixed rule over the ids, or does what `script` says instead."""

    name, context_length = "scripted draft", 100_000

    def __init__(self, tokenizer: Any, script: Any = None, hands: Hands | None = None) -> None:
        self.tokenizer, self.script, self.hands = tokenizer, script, hands
        self.calls: list[tuple[NDArray[np.int32], Settings]] = []
        self.questions: list[NDArray[np.int64] | None] = []
        self.cost = 1.0

    def score(
        self,
        ids: NDArray[np.int32],
        settings: Settings,
        question: NDArray[np.int64] | None = None,
    ) -> Importance:
        self.calls.append((ids, settings))
        self.questions.append(question)
        seconds = {}
        if self.hands:
            self.hands.now += 5.0
            seconds = {"draft_prefill": 3.0, "look_ahead": 1.5}
        if isinstance(self.script, BaseException):
            raise self.script
        scores = 0.01 + np.random.default_rng(int(ids.sum())).random(ids.size, np.float32)
        if self.script is not None:
            scores = self.script(scores)
        return Importance(scores, queries=9, heads=2, layers=(0, 1), seconds=seconds)

    def operations(self, tokens: int, settings: Settings) -> float:
        return self.cost * tokens


class ScriptedTarget(Target):
    """Answers with words that follow from all of the plan; fails as told; notes what it got."""

    name = "scripted target"

    def __init__(
        self,
        tokenizer: Any,
        support: PositionSupport | None = None,
        fail: Any = None,
        hands: Hands | None = None,
    ) -> None:
        self.tokenizer, self.fail, self.hands = tokenizer, fail, hands
        self.position_support = support or PositionSupport(True, None, 100_000)
        self.plans: list[PrunePlan] = []
        self.closed = self.made = 0

    def stream(self, plan: PrunePlan, sampling: Sampling) -> Generator[Step, None, None]:
        # Held on to, as an engine holds on to its requests: only closing it stops it.
        self.running = self._steps(plan, sampling)
        return self.running

    def _steps(self, plan: PrunePlan, sampling: Sampling) -> Generator[Step, None, None]:
        self.plans.append(plan)
        key = [*plan.input_ids.tolist(), *plan.position_ids.tolist(), plan.next_position]
        rng = np.random.default_rng(key)
        if self.hands:
            self.hands.now += 7.0
        if self.fail and self.fail(plan):
            raise TargetFailed("out of memory")
        try:
            for count in range(1, sampling.max_tokens + 1):
                self.made += 1
                last = count == sampling.max_tokens
                token = int(rng.integers(3, 700))
                yield Step(f"{rng.choice(WORDS)} ", (token,), "length" if last else None)
                if self.hands:
                    self.hands.now += 0.5
        finally:
            self.closed += 1

    def operations(self, tokens: int) -> float:
        return 10.0 * tokens


def answered(draft: Draft | None, target: Target, source: Any, **knobs: Any) -> Generation:
    return SpecPrefill(draft, target).generate(source, **{**KNOBS, "max_tokens": 6, **knobs})


def dense_alone(tokenizer: Any, source: Any) -> Generation:
    return answered(None, ScriptedTarget(tokenizer), source)


def assert_dense(got: Generation, tokenizer: Any, source: Any, reason: Reason) -> None:
    """The whole prompt and the answer to it, as without any draft, and why."""
    dense = dense_alone(tokenizer, source)
    assert got.plan.reason is reason
    assert got.plan.detail
    assert np.array_equal(got.plan.input_ids, dense.plan.input_ids)
    assert np.array_equal(got.plan.position_ids, dense.plan.position_ids)
    assert got.plan.next_position == dense.plan.next_position == len(got.prompt.target)
    assert (got.text, got.token_ids) == (dense.text, dense.token_ids)
    assert got.plan.kept is None
    report = got.report()
    assert (report["reason"], report["keep_rate"], report["kept_spans"]) == (reason.value, 1.0, [])


def test_a_long_prompt_is_pruned_at_its_own_positions_and_answered(
    byte_level: Any, text: str
) -> None:
    draft, target = ScriptedDraft(byte_level), ScriptedTarget(byte_level)
    got = answered(draft, target, text)
    n = len(byte_level.encode(text))
    assert got.plan.reason is Reason.PRUNED
    assert (got.plan.positions, got.plan.next_position) == ("original", n)
    assert 0.3 * n - 32 < got.plan.input_ids.size <= 0.3 * n + 0.5
    assert target.plans == [got.plan]
    assert [ids.tolist() for ids, _ in draft.calls] == [byte_level.encode(text)]
    assert (got.finish_reason, len(got.token_ids)) == ("length", 6)
    assert got.text != dense_alone(byte_level, text).text


def test_a_draft_of_another_family_gives_contiguous_positions(
    byte_level: Any, metaspace: Any, text: str
) -> None:
    draft, target = ScriptedDraft(metaspace), ScriptedTarget(byte_level)
    got = answered(draft, target, text, separator=" ... ")
    assert got.plan.reason is Reason.PRUNED
    assert got.plan.positions == "contiguous"
    assert draft.calls[0][0].tolist() == metaspace.encode(text)
    assert got.plan.next_position == got.plan.input_ids.size
    assert " ... " in byte_level.decode(got.plan.input_ids)
    assert got.plan.input_ids.size <= round(0.3 * len(got.prompt.target))


def test_keeping_everything_gives_the_dense_answer(byte_level: Any, text: str) -> None:
    got = answered(ScriptedDraft(byte_level), ScriptedTarget(byte_level), text, keep=1.0)
    assert got.plan.reason is Reason.PRUNED
    assert got.text == dense_alone(byte_level, text).text


# --- reasons


def test_a_short_prompt_is_answered_in_full_and_says_so(byte_level: Any, text: str) -> None:
    # LLMLingua 196: prompts shorter than 200 were not compressed, without notice.
    draft = ScriptedDraft(byte_level)
    n = len(byte_level.encode(text))
    got = answered(draft, ScriptedTarget(byte_level), text, threshold=n + 1)
    assert_dense(got, byte_level, text, Reason.BELOW_THRESHOLD)
    assert str(n + 1) in got.plan.detail
    assert not draft.calls
    at = answered(draft, ScriptedTarget(byte_level), text, threshold=n)
    assert at.plan.reason is Reason.PRUNED


@pytest.mark.parametrize("name", ["min_keep_tokens", "keep_tokens"])
def test_a_prompt_that_would_be_kept_whole_anyway_is_answered_in_full_without_the_draft(
    byte_level: Any, text: str, name: str
) -> None:
    n = dense_alone(byte_level, text).plan.prompt_tokens
    amount = {"keep": None} if name == "keep_tokens" else {}
    for least in (n, n + 1, 50 * n):
        draft, target = ScriptedDraft(byte_level), ScriptedTarget(byte_level)
        got = answered(draft, target, text, **{**amount, name: least, "positions": "contiguous"})
        assert_dense(got, byte_level, text, Reason.BELOW_THRESHOLD)
        assert got.plan.detail == (
            f"{n} tokens are no more than the {name} of {least}: nothing to leave out"
        )
        assert draft.calls == []
    fewer = answered(
        ScriptedDraft(byte_level), ScriptedTarget(byte_level), text, **{**amount, name: n - 1}
    )
    assert fewer.plan.reason is Reason.PRUNED
    assert fewer.plan.input_ids.size < n


def test_a_ceiling_below_the_prompt_leaves_something_to_prune(byte_level: Any, text: str) -> None:
    n = dense_alone(byte_level, text).plan.prompt_tokens
    limits = {"keep": None, "keep_tokens": 2 * n, "max_keep_tokens": n // 2}
    got = answered(ScriptedDraft(byte_level), ScriptedTarget(byte_level), text, **limits)
    assert got.plan.reason is Reason.PRUNED
    assert got.plan.input_ids.size <= n // 2


def test_pruning_that_is_off_or_without_a_draft_is_disabled(byte_level: Any, text: str) -> None:
    draft = ScriptedDraft(byte_level)
    off = answered(draft, ScriptedTarget(byte_level), text, enabled=False)
    assert_dense(off, byte_level, text, Reason.DISABLED)
    assert not draft.calls
    none = answered(None, ScriptedTarget(byte_level), text)
    assert_dense(none, byte_level, text, Reason.DISABLED)
    assert none.plan.detail != off.plan.detail


def test_protections_over_the_budget_are_said(byte_level: Any, text: str) -> None:
    for how in (
        {"keep": None, "keep_tokens": 20},
        {"keep": 0.5, "max_keep_tokens": 20},
        {"keep": None, "coverage": 0.5, "max_keep_tokens": 20},
    ):
        draft = ScriptedDraft(byte_level)
        got = answered(draft, ScriptedTarget(byte_level), text, **how)
        assert_dense(got, byte_level, text, Reason.PROTECTED_EXCEEDS_BUDGET)
        assert "budget of 20" in got.plan.detail
        assert not draft.calls  # no score would change that


def test_no_predicted_gain_is_no_pruning(byte_level: Any, text: str) -> None:
    draft = ScriptedDraft(byte_level)
    draft.cost = 8.0  # of the target's 10: 10 / (3 + 8) < 1
    got = answered(draft, ScriptedTarget(byte_level), text, min_gain=1.0)
    assert_dense(got, byte_level, text, Reason.PREDICTED_NO_GAIN)
    assert not draft.calls
    draft.cost = 6.0
    assert answered(draft, ScriptedTarget(byte_level), text, min_gain=1.0).plan.reason is (
        Reason.PRUNED
    )
    draft.cost = 80.0
    assert answered(draft, ScriptedTarget(byte_level), text).plan.reason is Reason.PRUNED
    # What coverage will keep is known afterwards, unless it has a ceiling.
    draft.cost, some = 6.0, {"keep": None, "coverage": 0.5, "min_gain": 1.0}
    free = answered(draft, ScriptedTarget(byte_level), text, **some)
    assert free.plan.reason is Reason.PRUNED
    n = len(free.prompt.target)
    bounded = answered(draft, ScriptedTarget(byte_level), text, **some, max_keep_tokens=n - 1)
    assert bounded.plan.reason is Reason.PREDICTED_NO_GAIN


def _nan(scores: Any) -> Any:
    scores[7] = np.nan
    return scores


@pytest.mark.parametrize(
    ("script", "reason", "raised"),
    [
        (_nan, Reason.DEGENERATE_SCORES, DegenerateScores),
        (lambda s: s * 0, Reason.DEGENERATE_SCORES, DegenerateScores),
        (DegenerateScores("all zero"), Reason.DEGENERATE_SCORES, DegenerateScores),
        (DraftTimeout("no answer in 2 s"), Reason.DRAFT_TIMEOUT, DraftTimeout),
        (DraftFailed("the draft is down"), Reason.DRAFT_FAILED, DraftFailed),
        (RuntimeError("CUDA error"), Reason.DRAFT_FAILED, DraftFailed),
        (MemoryError(), Reason.DRAFT_FAILED, DraftFailed),
        (InputError("layers", 3, "2"), Reason.DRAFT_FAILED, SpecPrefillError),
        (lambda s: s[:-1], Reason.DRAFT_FAILED, DraftFailed),
        (ContextTooLong("prompt", 9, "8"), Reason.CONTEXT_TOO_LONG, ContextTooLong),
    ],
    ids=lambda v: getattr(v, "__name__", repr(v)),
)
def test_a_draft_that_fails_in_any_way_costs_one_call_and_nothing_else(
    byte_level: Any, text: str, script: Any, reason: Reason, raised: type[Exception]
) -> None:
    # omlx 2484: the fallback after a failure reused what was half-written.
    draft, target = ScriptedDraft(byte_level, script), ScriptedTarget(byte_level)
    got = answered(draft, target, text)
    assert_dense(got, byte_level, text, reason)
    assert len(draft.calls) == 1
    assert len(target.plans) == 1
    strict = ScriptedDraft(byte_level, script)
    with pytest.raises(raised):
        answered(strict, target, text, strict=True)
    assert len(strict.calls) == 1
    assert len(target.plans) == 1


@pytest.mark.parametrize("stage", ["resolve_positions", "select", "make_plan"])
def test_a_fault_in_any_stage_before_the_target_gives_the_dense_plan_and_text(
    byte_level: Any, text: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **knobs: Any) -> Any:
        raise IndexError("index 7 is out of bounds")

    monkeypatch.setattr(pipeline, stage, broken)
    target = ScriptedTarget(byte_level)
    got = answered(ScriptedDraft(byte_level), target, text)
    monkeypatch.undo()
    assert_dense(got, byte_level, text, Reason.DRAFT_FAILED)
    assert "index 7" in got.plan.detail
    monkeypatch.setattr(pipeline, stage, broken)
    with pytest.raises((IndexError, SpecPrefillError)):
        answered(ScriptedDraft(byte_level), target, text, strict=True)


@pytest.mark.parametrize(
    "support", [PositionSupport(False, None, 100_000), PositionSupport(True, 64, 100_000)]
)
def test_original_positions_that_the_target_cannot_use_are_an_unsupported_target(
    byte_level: Any, text: str, support: PositionSupport
) -> None:
    draft = ScriptedDraft(byte_level)
    target = ScriptedTarget(byte_level, support)
    got = answered(draft, target, text, positions="original")
    assert_dense(got, byte_level, text, Reason.UNSUPPORTED_TARGET)
    assert not draft.calls
    with pytest.raises(UnsupportedPositions):
        answered(draft, target, text, positions="original", strict=True)
    auto = answered(draft, target, text)
    assert (auto.plan.reason, auto.plan.positions) == (Reason.PRUNED, "contiguous")


def test_a_draft_tokenizer_that_cannot_be_aligned_is_a_tokenizer_mismatch(
    byte_level: Any, text: str
) -> None:
    class Deaf:
        """Hears nothing after the first 40 characters."""

        eos_token_id, bos_token_id = 0, None

        def get_vocab(self) -> dict[str, int]:
            return {"x": 0}

        def __call__(self, text: str, **knobs: Any) -> dict[str, Any]:
            return {"input_ids": [0] * 40, "offset_mapping": [(i, i + 1) for i in range(40)]}

    draft = ScriptedDraft(Deaf())
    got = answered(draft, ScriptedTarget(byte_level), text)
    assert_dense(got, byte_level, text, Reason.TOKENIZER_MISMATCH)
    assert not draft.calls
    with pytest.raises(TokenizerMismatch):
        answered(draft, ScriptedTarget(byte_level), text, strict=True)


def test_a_prompt_over_the_targets_context_is_pruned_into_it_or_refused(
    byte_level: Any, text: str
) -> None:
    n = len(byte_level.encode(text))
    room = ScriptedTarget(byte_level, PositionSupport(True, None, n // 2))
    got = answered(ScriptedDraft(byte_level), room, text)
    assert (got.plan.reason, got.plan.positions) == (Reason.PRUNED, "contiguous")
    draft = ScriptedDraft(byte_level)
    for settings in ({"keep": 0.9}, {"enabled": False}, {"keep": 0.9, "strict": True}):
        narrow = ScriptedTarget(byte_level, PositionSupport(True, None, n // 2))
        with pytest.raises(ContextTooLong, match="prompt"):
            answered(draft, narrow, text, **settings)
        assert not narrow.plans


# --- the target fails


def test_a_target_that_fails_on_the_pruned_prompt_gets_the_full_one(
    byte_level: Any, text: str
) -> None:
    draft = ScriptedDraft(byte_level)
    target = ScriptedTarget(byte_level, fail=lambda plan: plan.reason is Reason.PRUNED)
    got = answered(draft, target, text)
    assert_dense(got, byte_level, text, Reason.UNSUPPORTED_TARGET)
    assert [p.reason for p in target.plans] == [Reason.PRUNED, Reason.UNSUPPORTED_TARGET]
    assert len(draft.calls) == 1
    with pytest.raises(TargetFailed, match="out of memory"):
        answered(draft, target, text, strict=True)
    assert len(target.plans) == 3


@pytest.mark.parametrize("knobs", [{}, {"enabled": False}])
def test_a_target_that_fails_on_the_full_prompt_is_told_and_not_tried_again(
    byte_level: Any, text: str, knobs: dict[str, Any]
) -> None:
    target = ScriptedTarget(byte_level, fail=lambda plan: True)
    with pytest.raises(TargetFailed, match="out of memory"):
        answered(ScriptedDraft(byte_level), target, text, **knobs)
    assert len(target.plans) == (1 if knobs else 2)


@pytest.mark.parametrize("where", ["draft", "target"])
def test_an_interrupt_is_not_taken_for_a_failure(byte_level: Any, text: str, where: str) -> None:
    def interrupted(plan: PrunePlan) -> bool:
        raise KeyboardInterrupt

    draft = ScriptedDraft(byte_level, KeyboardInterrupt() if where == "draft" else None)
    target = ScriptedTarget(byte_level, fail=interrupted if where == "target" else None)
    with pytest.raises(KeyboardInterrupt):
        answered(draft, target, text)
    assert len(target.plans) == (1 if where == "target" else 0)


def test_the_draft_is_told_which_tokens_ask(byte_level: Any, text: str) -> None:
    draft, target = ScriptedDraft(byte_level), ScriptedTarget(byte_level)
    model = SpecPrefill(draft, target)
    whole = model.generate(text, **KNOBS, max_tokens=2)
    marked = model.generate(text, question="Where is the key?", **KNOBS, max_tokens=2)
    for told, got in zip(draft.questions, (whole, marked), strict=True):
        np.testing.assert_array_equal(told, got.prompt.question)
    read = byte_level.decode(marked.prompt.draft.ids[marked.prompt.question])
    assert read.strip() == "Where is the key?"
    assert len(whole.prompt.question) > len(marked.prompt.question)


# --- what is told


def test_stages_before_decoding_add_up_to_the_time_to_first_token_draft_and_all(
    byte_level: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # lucebox 752: wall 55.4 s, reported 8.8 s.
    hands = Hands()
    monkeypatch.setattr(clock, "time", hands)
    draft = ScriptedDraft(byte_level, hands=hands)
    target = ScriptedTarget(byte_level, fail=lambda p: p.reason is Reason.PRUNED, hands=hands)
    retried = answered(draft, target, text)
    pruned = answered(draft, ScriptedTarget(byte_level, hands=hands), text)
    for got, prefill in ((pruned, 7.0), (retried, 14.0)):
        assert got.ttft_s == 5.0 + prefill
        assert sum(s for name, s in got.stages.items() if name != "decode") == got.ttft_s
        assert got.stages["draft_prefill"] == 3.0
        assert got.stages["look_ahead"] == 1.5
        assert got.stages["draft"] == 0.5
        assert got.stages["target_prefill"] == prefill
        assert {"prepare", "select", "plan"} <= set(got.stages)
        assert got.stages["decode"] == 2.5
        assert got.decode_tokens_per_s == 2.0
        assert got.report()["stages"] == got.stages


def test_a_failed_draft_is_counted_in_the_time_to_first_token(
    byte_level: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands = Hands()
    monkeypatch.setattr(clock, "time", hands)
    draft = ScriptedDraft(byte_level, RuntimeError("down"), hands)
    got = answered(draft, ScriptedTarget(byte_level, hands=hands), text)
    assert got.ttft_s == 12.0
    assert got.stages["draft"] == 5.0


def test_an_answer_of_one_token_has_no_decode_rate(byte_level: Any, text: str) -> None:
    got = answered(ScriptedDraft(byte_level), ScriptedTarget(byte_level), text, max_tokens=1)
    assert got.decode_tokens_per_s is None


@pytest.mark.parametrize(
    "asked",
    [
        {"keep": 0.1},
        {"keep": 0.45, "threshold": 512, "chunk_tokens": 16, "snap": "char"},
        {"keep": None, "keep_tokens": 300, "look_ahead": 2, "pool": 5},
        {"keep": None, "coverage": 0.6, "scoring": "window", "positions": "contiguous"},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop": ("X",)},
    ],
    ids=str,
)
def test_the_settings_in_force_are_those_asked_for_in_every_stage_and_in_the_answer(
    byte_level: Any, text: str, asked: dict[str, Any]
) -> None:
    # omlx 2281, 1145, 3056: asked 10 %, used 20 %; threshold 512 became 8192.
    draft = ScriptedDraft(byte_level)
    got = answered(draft, ScriptedTarget(byte_level), text, **asked)
    told = got.report()["settings"]
    assert set(told) == set(Settings.model_fields) | set(Sampling.model_fields)
    for name, value in {**KNOBS, **asked}.items():
        assert told["keep_rate" if name == "keep" else name] == value
    assert draft.calls[0][1].model_dump().items() <= told.items()
    assert told["chunk_tokens"] is not None
    assert told["snap"] is not None
    if asked.get("keep"):
        assert abs(got.plan.keep_rate - asked["keep"]) * got.plan.prompt_tokens <= 32.5


def test_an_amount_of_none_changes_nothing_that_was_given(byte_level: Any, text: str) -> None:
    model = SpecPrefill(ScriptedDraft(byte_level), ScriptedTarget(byte_level))
    base = Settings(keep_rate=0.6, threshold=0, min_keep_tokens=0)
    for none in ("keep", "keep_rate", "keep_tokens", "coverage"):
        planned = model.plan(text, settings=base, **{none: None})
        assert planned.prompt.settings.keep_rate == 0.6


def test_settings_of_an_answer_serve_for_another_as_they_were_asked_for(
    byte_level: Any, text: str
) -> None:
    model = SpecPrefill(ScriptedDraft(byte_level), ScriptedTarget(byte_level))
    asked = Settings(keep_rate=0.6, threshold=0)
    taken = model.plan(text, settings=asked).prompt.settings
    assert taken.min_keep_tokens == 256  # in force, and nobody asked for it
    for more in ({"keep_tokens": 150}, {"max_keep_tokens": 100}, {"content": "code"}, {}):
        again = model.plan(text * 2, settings=taken, **more).prompt.settings
        assert again == model.plan(text * 2, settings=asked, **more).prompt.settings


def test_single_knobs_override_whole_settings_and_the_amount_replaces_the_amount(
    byte_level: Any, text: str
) -> None:
    both = SpecPrefill(ScriptedDraft(byte_level), ScriptedTarget(byte_level))
    settings = Settings(threshold=100, min_keep_tokens=0, pool=5, keep_rate=0.2)
    got = both.generate(text, settings=settings, sampling=Sampling(max_tokens=2), keep=0.5)
    assert (got.prompt.settings.keep_rate, got.prompt.settings.pool) == (0.5, 5)
    assert len(got.token_ids) == 2
    with pytest.raises(InputError, match="keep_rate"):
        both.generate(text, keep=1.5)
    with pytest.raises(InputError, match="keep_rate"):
        both.generate(text, keep=0)
    with pytest.raises(InputError, match="keeep"):
        both.generate(text, keeep=0.5)


def test_a_report_names_what_was_kept_by_rule(byte_level: Any, text: str) -> None:
    got = answered(ScriptedDraft(byte_level), ScriptedTarget(byte_level), text)
    report = got.report()
    assert {s["rule"] for s in report["kept_spans"]} == {"importance", "tail"}
    assert report["kept_tokens"] == got.plan.input_ids.size
    assert report["keep_rate"] == report["kept_tokens"] / report["prompt_tokens"]
    assert 0 < report["kept_mass"] < 1
    for key in ("text", "finish_reason", "ttft_s", "decode_tokens_per_s"):
        assert report[key] == getattr(got, key)


@pytest.mark.parametrize("source", ["", "x", [], [{"role": "robot", "content": "x"}]])
def test_bad_input_is_the_callers_and_never_a_fallback(byte_level: Any, source: Any) -> None:
    target = ScriptedTarget(byte_level)
    with pytest.raises(InputError):
        answered(ScriptedDraft(byte_level), target, source)
    assert not target.plans


# --- streaming, and one request after another


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("settings", {"keep_rate": 0.1}, "a Settings or None"),
        ("settings", Sampling(), "a Settings or None"),
        ("sampling", {"max_tokens": 4}, "a Sampling or None"),
        ("protect", 5, "a list of texts"),
        ("protect", None, "a list of texts"),
        ("protect", "a text", "a list of texts"),
        ("protect", [5], "texts that are not empty"),
        ("protect", [b"bytes"], "texts that are not empty"),
        ("question", 5, "texts that are not empty"),
        ("question", ["a text"], "texts that are not empty"),
        ("tools", 5, "a list of tool definitions, each an object"),
        ("tools", "a text", "a list of tool definitions, each an object"),
        ("tools", ["a text"], "a list of tool definitions, each an object"),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused_by_name(
    byte_level: Any, text: str, name: str, value: Any, allowed: str
) -> None:
    model = SpecPrefill(ScriptedDraft(byte_level), ScriptedTarget(byte_level))
    source = [{"role": "user", "content": text}]
    for ask in (model.generate, model.stream, model.plan):
        with pytest.raises(InputError) as caught:
            ask(source, **{**KNOBS, name: value})
        assert (caught.value.field, caught.value.allowed) == (name, allowed)


def test_a_keep_rate_under_both_of_its_names_is_refused(byte_level: Any, text: str) -> None:
    model = SpecPrefill(ScriptedDraft(byte_level), ScriptedTarget(byte_level))
    with pytest.raises(InputError, match=r"^keep and keep_rate: got \(0\.1, 0\.2\)"):
        model.generate(text, keep=0.1, keep_rate=0.2)


def test_names_and_parts_in_the_wrong_places_are_refused(byte_level: Any) -> None:
    draft, target = ScriptedDraft(byte_level), ScriptedTarget(byte_level)
    for wrong, field in (
        (("smollm2-135m", target), "draft"),
        ((target, target), "draft"),
        ((draft, "smollm2-135m"), "target"),
        ((draft, None), "target"),
    ):
        with pytest.raises(InputError) as caught:
            SpecPrefill(*wrong)  # type: ignore[arg-type]
        assert caught.value.field == field


@pytest.mark.parametrize(
    "name", ["draft", "target", "draft_engine", "dtype", "device", "cache_mib", "progress"]
)
def test_a_wrong_argument_is_refused_by_name_before_anything_is_loaded(name: str) -> None:
    wrong = [5, None, b"smollm2-135m", ["a"], Path("/nowhere"), "nowhere"]
    for value in wrong:
        if value is None and name in ("draft", "draft_engine", "progress"):
            continue
        wanted = -1 if (name, value) == ("cache_mib", 5) else value
        with pytest.raises(InputError) as caught:
            SpecPrefill.from_pretrained(**{"target": "no such model", name: wanted})
        assert caught.value.field == name
        assert str(caught.value.value) == str(wanted)


def test_a_stream_gives_the_selection_and_the_text_that_generate_gives(
    byte_level: Any, text: str
) -> None:
    # omlx 2274: without streaming the keep rate was dropped.
    both = SpecPrefill(ScriptedDraft(byte_level), ScriptedTarget(byte_level))
    knobs = {**KNOBS, "keep": 0.4, "max_tokens": 6}
    whole = both.generate(text, **knobs)
    *steps, last = both.stream(text, **knobs)
    assert all(s.generation is None and s.finish_reason is None for s in steps)
    assert last.generation is not None
    assert np.array_equal(last.generation.plan.input_ids, whole.plan.input_ids)
    assert np.array_equal(last.generation.plan.position_ids, whole.plan.position_ids)
    assert "".join(s.text for s in [*steps, last]) == whole.text == last.generation.text
    assert last.generation.report()["settings"] == whole.report()["settings"]
    plan = both.plan(text, **knobs).plan
    assert np.array_equal(plan.input_ids, whole.plan.input_ids)


def test_a_dense_request_after_a_pruned_one_is_answered_as_if_alone(
    byte_level: Any, text: str
) -> None:
    # omlx 766: what pruning had patched was left behind.
    both = SpecPrefill(ScriptedDraft(byte_level), ScriptedTarget(byte_level))
    first = both.generate(text, **KNOBS, max_tokens=6)
    assert first.plan.reason is Reason.PRUNED
    assert_dense(
        both.generate(text, **KNOBS, max_tokens=6, enabled=False),
        byte_level,
        text,
        Reason.DISABLED,
    )
    again = both.generate(text, **KNOBS, max_tokens=6)
    assert again.text == first.text


def test_the_target_may_read_the_head_before_the_draft_has_scored(
    byte_level: Any, text: str
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    order: list[Any] = []

    class Ahead(ScriptedTarget):
        def read_ahead(self, head: NDArray[np.int32]) -> None:
            order.append(head)

    class Noting(ScriptedDraft):
        def score(self, *args: Any) -> Importance:
            order.append("score")
            return super().score(*args)

    target = Ahead(byte_level)
    answered(Noting(byte_level), target, messages)
    head, then = order
    assert then == "score"
    assert head.size == target.plans[0].head > 0
    np.testing.assert_array_equal(head, target.plans[0].input_ids[: head.size])


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_the_stream_stops_the_target(byte_level: Any, text: str, taken: int) -> None:
    target = ScriptedTarget(byte_level)
    steps = SpecPrefill(ScriptedDraft(byte_level), target).stream(text, **KNOBS, max_tokens=500)
    for _ in range(taken):
        next(steps)
    assert target.closed == 0
    steps.close()  # type: ignore[attr-defined]
    assert target.closed == 1
    assert target.made == max(taken, 1)


def test_the_stream_is_lazy_after_its_first_token(byte_level: Any, text: str) -> None:
    target = ScriptedTarget(byte_level)
    steps = SpecPrefill(ScriptedDraft(byte_level), target).stream(text, **KNOBS, max_tokens=500)
    assert target.made == 1
    assert next(steps).text
    assert target.made == 1
    next(steps)
    assert target.made == 2
    steps.close()  # type: ignore[attr-defined]


def test_texts_marked_by_the_caller_reach_the_target_through_the_pipeline(
    byte_level: Any, metaspace: Any, text: str
) -> None:
    marked = "the stone of Zürich, 石"
    source = f"{text[:1200]} {marked} {text[1200:]}"
    for tokenizer in (byte_level, metaspace):
        got = answered(
            ScriptedDraft(tokenizer), ScriptedTarget(byte_level), source, protect=iter([marked])
        )
        assert got.plan.reason is Reason.PRUNED
        assert marked in byte_level.decode(got.plan.input_ids)


def test_bare_numbers_of_a_report_are_plain_json(byte_level: Any, text: str) -> None:
    got = answered(ScriptedDraft(byte_level), ScriptedTarget(byte_level), text)
    assert json.loads(json.dumps(got.report()))["kept_tokens"] == got.plan.input_ids.size


def test_a_plan_that_does_not_fit_with_its_answer_is_refused_before_the_target(
    byte_level: Any, text: str
) -> None:
    model = SpecPrefill(None, ScriptedTarget(byte_level, PositionSupport(True, None, 8192)))
    with pytest.raises(ContextTooLong, match="99999999"):
        model.plan("The capital of France is", max_tokens=99999999)
    assert model.plan("The capital of France is", max_tokens=8000).plan.reason is Reason.DISABLED
