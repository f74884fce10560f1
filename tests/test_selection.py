from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import WORDS, texts
from trtllm_specprefill.boundaries import Boundaries
from trtllm_specprefill.errors import DegenerateScores, InputError
from trtllm_specprefill.importance import Importance
from trtllm_specprefill.plan import make_plan
from trtllm_specprefill.prompt import Encoding, Prompt, Span, prepare
from trtllm_specprefill.selection import Kept, select
from trtllm_specprefill.settings import Settings

CHUNK = 32


def importance(scores: Any) -> Importance:
    return Importance(np.asarray(scores, np.float32), queries=1, heads=1, layers=(0,))


def fresh_scores(rng: np.random.Generator, n: int) -> Importance:
    """Peaked, as attention is: a few tokens hold most of the mass."""
    return importance(rng.exponential(size=n) ** 3 + 1e-6)


def cut_at(places: np.ndarray) -> Encoding:
    """An encoding whose tokens lie between `places`."""
    at = np.asarray(places, np.int64)
    return Encoding(np.arange(at.size - 1, dtype=np.int32), at[:-1], at[1:])


def prompt_of(
    text: str,
    draft: Encoding,
    target: Encoding | None = None,
    protected: tuple[Span, ...] = (),
    **knobs: Any,
) -> Prompt:
    settings = Settings.of(**{"min_keep_tokens": 0, **knobs}).in_force()
    asking = np.arange(len(draft))
    return Prompt(text, draft, draft if target is None else target, protected, settings, asking)


class Stock:
    """A long text in words, and where two unlike tokenizers cut it; prompts are its beginnings."""

    def __init__(self) -> None:
        rng = np.random.default_rng()
        words = ["".join(rng.choice(list("abcdefgh"), size=k)) for k in rng.integers(1, 9, 30_000)]
        self.text = " ".join(words)
        ends = np.flatnonzero([c == " " for c in self.text])  # the space goes with the next word
        inner = rng.integers(1, len(self.text), size=len(self.text) // 9)
        more = rng.integers(1, len(self.text), size=len(self.text) // 14)
        self.draft = np.unique(np.concatenate(([0], ends, inner)))
        self.target = np.unique(np.concatenate(([0], ends, more)))

    def beginning(self, of: np.ndarray, n: int) -> tuple[str, np.ndarray]:
        """The text of the first `n` tokens of one of the two, and where they are cut."""
        end = int(of[n])
        return self.text[:end], of[: n + 1]

    def shared(self, n: int, **knobs: Any) -> Prompt:
        text, cuts = self.beginning(self.draft, n)
        encoding = cut_at(cuts)
        tail = int(cuts[max(n - 64, 0)])
        protected = (Span(tail, len(text), "tail"),) if tail < len(text) else ()
        return prompt_of(text, encoding, None, protected, **knobs)

    def crossed(self, n: int, **knobs: Any) -> Prompt:
        text, cuts = self.beginning(self.target, n)
        draft = np.append(self.draft[self.draft < len(text)], len(text))
        tail = int(cuts[max(n - 64, 0)])
        protected = (Span(tail, len(text), "tail"),) if tail < len(text) else ()
        return prompt_of(text, cut_at(draft), cut_at(cuts), protected, **knobs)


@pytest.fixture(scope="module")
def stock() -> Stock:
    return Stock()


def chunk_in_target_tokens(prompt: Prompt) -> int:
    """The most target tokens that begin within a stretch of one chunk of draft tokens."""
    size = prompt.settings.chunk_tokens or CHUNK
    edges = np.append(prompt.draft.starts, len(prompt.text))
    places = np.searchsorted(prompt.target.starts, edges)
    width = min(size, places.size - 1)
    return int((places[width:] - places[: places.size - width]).max())


def check_budget(prompt: Prompt, kept: Kept) -> None:
    """Never over the budget, and under it by less than a chunk, unless protections decide."""
    n = len(prompt.target)
    protected = np.zeros(n, np.bool_)
    protected[-1] = True
    for span in prompt.protected:
        protected[prompt.target.overlapping(span.start, span.end)] = True
    assert kept.target_tokens[protected].all()
    assert kept.keep_rate == kept.tokens / n
    assert kept.budget is not None
    assert kept.protected_exceeds_budget == (int(protected.sum()) > kept.budget)
    if kept.protected_exceeds_budget:
        assert kept.tokens == int(protected.sum())
        return
    assert kept.tokens <= kept.budget
    assert kept.budget - kept.tokens < max(chunk_in_target_tokens(prompt), 1), n


@pytest.mark.parametrize(
    ("kind", "step"),
    [("shared", 1), ("crossed", 3), pytest.param("crossed", 1, marks=pytest.mark.slow)],
)
def test_the_keep_rate_realised_is_within_one_chunk_of_asked_at_every_length_to_5000(
    stock: Stock, kind: str, step: int
) -> None:
    # LLMLingua 195: nothing happened below 150 tokens, above 5,000 it over- or undershot.
    rng = np.random.default_rng()
    rates = rng.uniform(0.02, 1.0, size=5001)
    for n in (*range(1, 1000), *range(1000 + int(rng.integers(step)), 5001, step)):
        rate = float(rates[n])
        prompt = getattr(stock, kind)(n, keep_rate=rate)
        kept = select(prompt, fresh_scores(rng, len(prompt.draft)))
        assert kept.budget == min(round(rate * n), n)
        check_budget(prompt, kept)
        if not kept.protected_exceeds_budget:
            assert abs(kept.keep_rate - rate) * n <= chunk_in_target_tokens(prompt) + 0.5


@given(
    n=st.integers(1, 5000),
    tokens=st.integers(1, 6000),
    crossed=st.booleans(),
    chunk=st.integers(1, 130),
    snap=st.sampled_from(["char", "word", "sentence", "line"]),
    seed=st.integers(0, 2**32),
)
def test_any_budget_in_tokens_is_met_within_one_chunk_and_never_exceeded(
    stock: Stock, n: int, tokens: int, crossed: bool, chunk: int, snap: str, seed: int
) -> None:
    # LLMLingua 135: errors when target_token changes.
    make = stock.crossed if crossed else stock.shared
    prompt = make(n, keep_tokens=tokens, chunk_tokens=chunk, snap=snap)
    kept = select(prompt, fresh_scores(np.random.default_rng(seed), len(prompt.draft)))
    assert kept.budget == min(tokens, n)
    check_budget(prompt, kept)


@given(
    n=st.integers(1, 5000),
    coverage=st.floats(0.01, 1.0),
    floor=st.integers(0, 900),
    ceiling=st.one_of(st.none(), st.integers(900, 2500)),
    crossed=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_coverage_keeps_the_fewest_best_chunks_that_hold_the_share_within_floor_and_ceiling(
    stock: Stock,
    n: int,
    coverage: float,
    floor: int,
    ceiling: int | None,
    crossed: bool,
    seed: int,
) -> None:
    make = stock.crossed if crossed else stock.shared
    prompt = make(n, coverage=coverage, min_keep_tokens=floor, max_keep_tokens=ceiling)
    kept = select(prompt, fresh_scores(np.random.default_rng(seed), len(prompt.draft)))
    chunk = chunk_in_target_tokens(prompt)
    assert kept.budget is None
    assert kept.tokens <= min(n, ceiling or n)
    assert kept.tokens >= min(floor, n) - chunk
    if ceiling is None:
        assert kept.mass >= coverage - 1e-6
    if kept.tokens > max(floor, 64) + chunk and n > 64 + chunk:
        # Without its least chunk the share would not have been reached.
        less = [s for s in kept.spans if s.rule == "importance"]
        assert less
        smaller = make(n, keep_tokens=kept.tokens - chunk)
        other = select(smaller, fresh_scores(np.random.default_rng(seed), len(prompt.draft)))
        assert other.mass < max(coverage, kept.mass)


@given(n=st.integers(300, 3000), rate=st.floats(0.01, 1), seed=st.integers(0, 2**32))
def test_floor_and_ceiling_bound_the_budget(stock: Stock, n: int, rate: float, seed: int) -> None:
    knobs = {"keep_rate": rate, "min_keep_tokens": 200, "max_keep_tokens": 250}
    prompt = stock.shared(n, **knobs)
    kept = select(prompt, fresh_scores(np.random.default_rng(seed), n))
    assert 200 - CHUNK < kept.tokens <= 250


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("length", [1, 2, 40, 150, 700, 1999, 4999])
def test_real_tokenizers_meet_the_budget_in_target_tokens(
    byte_level: Any, metaspace: Any, crossed: bool, length: int
) -> None:
    rng = np.random.default_rng()
    for target, draft in ((byte_level, metaspace), (metaspace, byte_level)):
        text = " ".join(rng.choice(WORDS, size=length)) + "."
        for keep in (0.1, 0.3, 0.7):
            prompt = prepare(
                text,
                target_tokenizer=target,
                draft_tokenizer=draft if crossed else None,
                settings=Settings(keep_rate=keep, min_keep_tokens=0),
            )
            kept = select(prompt, fresh_scores(rng, len(prompt.draft)))
            if target is metaspace:
                assert kept.target_tokens[0]  # BOS
            assert kept.budget == round(keep * len(prompt.target))
            if kept.protected_exceeds_budget:
                continue
            assert kept.tokens <= kept.budget
            assert kept.budget - kept.tokens < max(chunk_in_target_tokens(prompt), 1)


# --- what is kept


@given(seed=st.integers(0, 2**32), rate=st.floats(0.2, 0.9))
def test_the_chunks_of_highest_mean_importance_are_kept(seed: int, rate: float) -> None:
    rng = np.random.default_rng(seed)
    n = 32 * 20
    scores = rng.exponential(size=n)
    text = "x" * n
    prompt = prompt_of(text, cut_at(np.arange(n + 1)), keep_rate=rate, snap="char")
    kept = select(prompt, importance(scores))
    means = scores.astype(np.float32).astype(np.float64).reshape(20, 32).mean(axis=1)
    # The last token is kept in any case and counts in the budget.
    means[-1] = scores.astype(np.float32)[-32:].astype(np.float64).mean()
    chosen = {int(i) for i in np.flatnonzero(kept.target_tokens.reshape(20, 32).all(axis=1))}
    others = set(range(20)) - chosen - {19}
    assert chosen
    assert all(means[c] >= means[o] for c in chosen - {19} for o in others)
    assert kept.mass == pytest.approx(
        scores[kept.target_tokens].sum() / scores.sum(), abs=1.5 * scores.max() / scores.sum()
    )


def test_protections_come_before_importance_and_count_in_the_budget() -> None:
    n = 640
    scores = np.full(n, 0.01)
    scores[320:352] = 5.0  # the best chunk
    encoding = cut_at(np.arange(n + 1))
    protected = (Span(10, 60, "system"), Span(600, 640, "tail"))
    for budget, best_too in ((90, False), (121, False), (122, True)):
        prompt = prompt_of("x" * n, encoding, None, protected, keep_tokens=budget, snap="char")
        kept = select(prompt, importance(scores))
        assert kept.target_tokens[10:60].all()
        assert kept.target_tokens[600:].all()
        assert bool(kept.target_tokens[320:352].all()) is best_too
        assert not kept.protected_exceeds_budget
    prompt = prompt_of("x" * n, encoding, None, protected, keep_tokens=89, snap="char")
    kept = select(prompt, importance(scores))
    assert kept.protected_exceeds_budget
    assert kept.tokens == 90


def test_the_last_token_is_kept_even_when_nothing_protects_it() -> None:
    n = 320
    scores = np.linspace(1, 0.01, n)  # the end is worth least
    prompt = prompt_of("x" * n, cut_at(np.arange(n + 1)), keep_tokens=40, snap="char")
    kept = select(prompt, importance(scores))
    assert kept.target_tokens[-1]
    assert kept.tokens <= 40


def test_a_short_last_chunk_is_chosen_when_it_is_the_best() -> None:
    # kv-exps pads it with minus infinity, so it is never chosen.
    n = 32 * 6 + 5
    scores = np.full(n, 0.1)
    scores[-5:] = 3.0
    prompt = prompt_of("x" * n, cut_at(np.arange(n + 1)), keep_tokens=10, snap="char")
    kept = select(prompt, importance(scores))
    assert np.flatnonzero(kept.target_tokens).tolist() == list(range(n - 5, n))


def test_room_too_small_for_the_next_best_chunk_goes_to_a_smaller_one() -> None:
    n = 32 * 6 + 5
    scores = np.linspace(1, 0.1, n)  # the short last chunk is worth least
    prompt = prompt_of("x" * n, cut_at(np.arange(n + 1)), keep_tokens=69, snap="char")
    kept = select(prompt, importance(scores))
    assert np.flatnonzero(kept.target_tokens).tolist() == [*range(64), *range(n - 5, n)]


def test_ties_go_to_the_earlier_chunk() -> None:
    n = 32 * 8
    prompt = prompt_of("x" * n, cut_at(np.arange(n + 1)), keep_tokens=65, snap="char")
    kept = select(prompt, importance(np.full(n, 0.5)))
    assert np.flatnonzero(kept.target_tokens).tolist() == [*range(64), n - 1]


@given(n=st.integers(1, 2000), rate=st.floats(0.1, 0.9), power=st.integers(-12, 12))
def test_scaling_every_score_by_the_same_number_changes_nothing(
    stock: Stock, n: int, rate: float, power: int
) -> None:
    prompt = stock.crossed(n, keep_rate=rate)
    scores = fresh_scores(np.random.default_rng(n), len(prompt.draft)).scores
    first, second = (
        select(prompt, importance(s)) for s in (scores, scores * np.float32(2.0**power))
    )
    assert np.array_equal(first.target_tokens, second.target_tokens)
    assert first.spans == second.spans


def test_the_same_prompt_gives_the_same_plan_alone_or_among_others_in_any_order(
    stock: Stock,
) -> None:
    # Jingyu6 B1: from the second sequence of a batch on, another token's query was used.
    lengths = [1500, 40, 733, 2048, 1500]
    prompts = [stock.crossed(n, keep_rate=0.3) for n in lengths]
    scores = [
        fresh_scores(np.random.default_rng(n), len(p.draft))
        for n, p in zip(lengths, prompts, strict=True)
    ]
    alone = [select(p, s) for p, s in zip(prompts, scores, strict=True)]
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        for i in order:
            again = select(prompts[i], scores[i])
            assert np.array_equal(again.target_tokens, alone[i].target_tokens)
            assert (again.spans, again.mass) == (alone[i].spans, alone[i].mass)
    assert np.array_equal(alone[0].target_tokens, alone[4].target_tokens)


def test_selection_leaves_the_scores_and_the_prompt_as_they_were(stock: Stock) -> None:
    prompt = stock.shared(900, keep_rate=0.3)
    scores = fresh_scores(np.random.default_rng(), 900)
    before = scores.scores.copy()
    ids = prompt.draft.ids.copy()
    select(prompt, scores)
    assert np.array_equal(scores.scores, before)
    assert np.array_equal(prompt.draft.ids, ids)


# --- separators


@given(
    n=st.integers(100, 3000),
    tokens=st.integers(80, 1500),
    width=st.integers(1, 5),
    crossed=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_separators_count_in_the_budget(
    stock: Stock, n: int, tokens: int, width: int, crossed: bool, seed: int
) -> None:
    make = stock.crossed if crossed else stock.shared
    prompt = make(n, keep_tokens=tokens, chunk_tokens=8)
    scores = fresh_scores(np.random.default_rng(seed), len(prompt.draft))
    kept = select(prompt, scores, separator_tokens=width)
    plan = make_plan(prompt, kept, "contiguous", np.full(width, 10_000, np.int32))
    assert kept.budget == min(tokens, n)
    assert not kept.protected_exceeds_budget
    assert plan.input_ids.size <= kept.budget
    assert kept.budget - plan.input_ids.size < chunk_in_target_tokens(prompt) + 2 * width


# --- spans


@given(n=st.integers(1, 3000), rate=st.floats(0.05, 1), crossed=st.booleans())
def test_spans_are_sorted_disjoint_and_say_which_rule_kept_them(
    stock: Stock, n: int, rate: float, crossed: bool
) -> None:
    make = stock.crossed if crossed else stock.shared
    prompt = make(n, keep_rate=rate)
    kept = select(prompt, fresh_scores(np.random.default_rng(), len(prompt.draft)))
    assert 0 <= kept.mass <= 1 + 1e-9
    end = token_end = 0
    for before, span in zip((None, *kept.spans), kept.spans, strict=False):
        assert end <= span.start < span.end <= len(prompt.text)
        assert token_end <= span.token_start < span.token_end <= len(prompt.draft)
        if before is not None and before.end == span.start:
            assert before.rule != span.rule
        assert span.rule in ("tail", "importance")
        end, token_end = span.end, span.token_end
    assert any(s.rule == "tail" and s.end == len(prompt.text) for s in kept.spans)


def test_where_rules_overlap_the_stronger_is_named() -> None:
    n = 200
    encoding = cut_at(np.arange(n + 1))
    protected = (
        Span(0, 20, "control"),
        Span(10, 60, "system"),
        Span(50, 90, "marked"),
        Span(80, 200, "tail"),
    )
    prompt = prompt_of("x" * n, encoding, None, protected, keep_rate=1.0)
    kept = select(prompt, importance(np.full(n, 0.1)))
    assert [(s.start, s.end, s.rule) for s in kept.spans] == [
        (0, 20, "control"),
        (20, 60, "system"),
        (60, 90, "marked"),
        (90, 200, "tail"),
    ]


@pytest.mark.parametrize("snap", ["char", "word"])
@given(text=texts(min_pieces=8, max_pieces=60), seed=st.integers(0, 2**32), crossed=st.booleans())
def test_no_kept_stretch_begins_or_ends_within_a_character_or_a_word_of_either_tokenizer(
    byte_level: Any, metaspace: Any, snap: str, text: str, seed: int, crossed: bool
) -> None:
    for target, draft in ((byte_level, metaspace), (metaspace, byte_level)):
        prompt = prepare(
            text + " end.",
            target_tokenizer=target,
            draft_tokenizer=draft if crossed else None,
            settings=Settings(
                keep_rate=0.5, min_keep_tokens=0, tail_tokens=0, chunk_tokens=12, snap=snap
            ),
        )
        kept = select(prompt, fresh_scores(np.random.default_rng(seed), len(prompt.draft)))
        found = Boundaries(prompt.text, prompt.target.starts, prompt.target.ends)
        edges = np.flatnonzero(np.diff(kept.target_tokens)) + 1
        assert found.char[edges].all()


@given(
    words=st.lists(st.text("abcdefgh", min_size=1, max_size=9), min_size=60, max_size=150),
    seed=st.integers(0, 2**32),
    crossed=st.booleans(),
)
def test_no_word_is_cut_in_two_by_selection_in_either_tokenizer(
    byte_level: Any, metaspace: Any, words: list[str], seed: int, crossed: bool
) -> None:
    # LLMLingua 149: "Fuel Dilution" came out as "uedil".
    rng = np.random.default_rng(seed)
    text = "".join(word + " " * int(rng.integers(1, 4)) for word in words) + "end."
    for target, draft in ((byte_level, metaspace), (metaspace, byte_level)):
        prompt = prepare(
            text,
            target_tokenizer=target,
            draft_tokenizer=draft if crossed else None,
            settings=Settings(keep_rate=0.5, min_keep_tokens=0, tail_tokens=0),
        )
        kept = select(prompt, fresh_scores(rng, len(prompt.draft)))
        at = prompt.target.starts[np.flatnonzero(np.diff(kept.target_tokens)) + 1]
        for place in at.tolist():
            assert place == 0 or " " in text[place - 1 : place + 1], text[place - 9 : place + 9]


@given(seed=st.integers(0, 2**32), rate=st.floats(0.1, 0.9))
def test_the_spans_told_are_the_text_that_the_target_reads(
    byte_level: Any, metaspace: Any, seed: int, rate: float
) -> None:
    rng = np.random.default_rng(seed)
    # A tail that begins between two Han characters may part a token of the draft.
    spaced = [word for word in WORDS if word not in ("狐狸。", "寿司")]
    text = " ".join(rng.choice(spaced, size=400)) + " end."
    for target, draft in ((byte_level, metaspace), (metaspace, byte_level)):
        prompt = prepare(
            text,
            target_tokenizer=target,
            draft_tokenizer=draft,
            settings=Settings(keep_rate=rate, min_keep_tokens=0, tail_tokens=8),
        )
        kept = select(prompt, fresh_scores(rng, len(prompt.draft)))
        told = np.zeros(len(text), np.bool_)
        for span in kept.spans:
            told[span.start : span.end] = True
        read = np.zeros(len(text), np.bool_)
        for i in np.flatnonzero(kept.target_tokens):
            read[prompt.target.starts[i] : prompt.target.ends[i]] = True
        assert "".join(np.asarray(list(text))[told & ~read]).strip() == ""
        assert "".join(np.asarray(list(text))[read & ~told]).strip() == ""


# --- nothing to select from


def test_an_empty_prompt_selects_nothing_and_divides_by_nothing() -> None:
    # LLMLingua 183, 144: ZeroDivisionError. (A real empty prompt is refused by `prepare`.)
    empty = cut_at(np.zeros(1))
    for knobs in ({"keep_rate": 0.3}, {"keep_tokens": 5}, {"coverage": 0.5}):
        for target in (None, cut_at(np.zeros(1))):
            prompt = prompt_of("", empty, target, **knobs)
            kept = select(prompt, SimpleNamespace(scores=np.zeros(0, np.float32)))  # type: ignore[arg-type]
            assert (kept.tokens, kept.keep_rate, kept.spans) == (0, 0.0, ())
            assert kept.protected_exceeds_budget is False
    with pytest.raises(DegenerateScores):
        importance([])


def test_scores_of_another_length_are_refused(stock: Stock) -> None:
    prompt = stock.shared(100, keep_rate=0.5)
    with pytest.raises(InputError, match="importance: got 99"):
        select(prompt, fresh_scores(np.random.default_rng(), 99))


def test_settings_not_yet_in_force_select_alike(stock: Stock) -> None:
    prompt = stock.shared(1200)
    scores = fresh_scores(np.random.default_rng(), 1200)
    bare = replace(prompt, settings=Settings(min_keep_tokens=0))
    assert np.array_equal(select(prompt, scores).target_tokens, select(bare, scores).target_tokens)
