from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trtllm_specprefill.errors import InputError
from trtllm_specprefill.importance_op import MAX_QUERIES
from trtllm_specprefill.settings import Sampling, Settings

# field, smallest and largest value allowed (None: no end), values just outside
RANGES: list[tuple[type[Settings] | type[Sampling], str, list[Any], list[Any]]] = [
    (Settings, "keep_rate", [1e-9, 0.3, 1, 1.0], [0, 0.0, -0.1, 1.0000001, 1.5, math.nan, "x"]),
    (Settings, "keep_tokens", [1, 10**9], [0, -1, 1.5, math.inf, "many"]),
    (Settings, "coverage", [1e-9, 1.0], [0, 1.01, math.nan, -math.inf]),
    (Settings, "min_keep_tokens", [0, 5000], [-1, 0.5]),
    (Settings, "max_keep_tokens", [256, 10**6], [0, -3]),
    (Settings, "threshold", [0, 10**9], [-1]),
    (Settings, "content", ["text", "code"], ["prose", "", None]),
    (Settings, "chunk_tokens", [1, 128], [0, -1]),
    (Settings, "snap", ["char", "word", "sentence", "line"], ["token", ""]),
    (Settings, "tail_tokens", [0, 512], [-1]),
    (Settings, "protect_roles", [(), ("tool",), ["user", "assistant"]], [("robot",), "system", 3]),
    (Settings, "positions", ["auto", "original", "contiguous"], ["restored", None]),
    (Settings, "separator", ["", " [...] "], [None, 7]),
    (Settings, "scoring", ["lookahead", "window"], ["both"]),
    (Settings, "look_ahead", [0, 64], [-1, 65]),
    (Settings, "window", [1, MAX_QUERIES], [0, MAX_QUERIES + 1]),
    (Settings, "votes", ["mean", "max", None], ["median", 1]),
    (Settings, "draft_layers", [1, 8, None], [0, -1, 1.5]),
    (Settings, "draft_window", [0, 33, 10**6], [-1, 32, 13]),
    (Settings, "draft_overlap", [0, 511], [-1, 0.5]),
    (Settings, "draft_head", [0, 64], [-1]),
    (Settings, "draft_tail", [1, 512], [0, -1]),
    (Settings, "pool", [1, 13, 255], [0, 2, 12, 256, 257, -1]),
    (Settings, "min_gain", [0, 1.0, 7.5], [-0.1, math.nan, math.inf]),
    (Settings, "enabled", [True, False], ["perhaps", None]),
    (Settings, "strict", [True, False], ["perhaps", None]),
    (Sampling, "max_tokens", [1, 10**6], [0, -1, 0.5]),
    (Sampling, "temperature", [0, 0.7, 10], [-0.1, 10.1, math.nan]),
    (Sampling, "top_p", [1e-9, 1.0], [0, 1.1]),
    (Sampling, "top_k", [0, 50], [-1]),
    (Sampling, "seed", [0, 2**63 - 1, None], [-1, 2**63]),
    (Sampling, "stop", [(), ("END",), ["a", "b"]], [("",), ("a", ""), "END", 5]),
]


def test_the_table_of_ranges_names_every_knob() -> None:
    for kind in (Settings, Sampling):
        assert {name for of, name, _, _ in RANGES if of is kind} == set(kind.model_fields)


@pytest.mark.parametrize(("kind", "name", "good", "bad"), RANGES, ids=lambda v: str(v)[:20])
def test_values_in_range_are_taken_and_others_are_refused_by_field_value_and_what_is_allowed(
    kind: Any, name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        taken = getattr(kind.of(**{name: value}), name)
        assert taken == (tuple(value) if isinstance(value, list) else value)
    for value in bad:
        with pytest.raises(InputError) as caught:
            kind.of(**{name: value})
        error = caught.value
        assert error.field == name
        assert error.allowed.startswith((kind.allowed(name), "at least min_keep_tokens"))
        # Of a list only the offending element may be shown.
        shown = [value, *value] if isinstance(value, tuple) else [value]
        assert any(repr(v) in str(error) for v in shown)
        assert str(error).startswith(f"{name}: got ")
        assert str(error).endswith(f", allowed: {error.allowed}")
        assert "\n" not in str(error)


@pytest.mark.parametrize("kind", [Settings, Sampling])
def test_every_knob_says_in_words_what_it_means_and_allows(kind: Any) -> None:
    for name in kind.model_fields:
        assert kind.meaning(name)
        assert kind.allowed(name)


def test_an_unknown_knob_is_refused_by_name_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"keep_ratio.*keep_rate.*coverage"):
        Settings.of(keep_ratio=0.1)
    with pytest.raises(InputError, match=r"temperatur: .*temperature"):
        Sampling.of(temperatur=1)


def test_a_long_bad_value_is_shortened_to_one_readable_line() -> None:
    with pytest.raises(InputError) as caught:
        Settings.of(content="very long " * 500)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "amounts",
    [
        {"keep_rate": 0.2, "keep_tokens": 10},
        {"keep_rate": 0.2, "coverage": 0.9},
        {"keep_tokens": 10, "coverage": 0.9},
        {"keep_rate": 0.2, "keep_tokens": 10, "coverage": 0.9},
    ],
)
def test_only_one_of_rate_tokens_and_coverage_may_be_given(amounts: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        Settings.of(**amounts)
    for name, value in amounts.items():
        assert name in caught.value.field
        assert str(value) in str(caught.value)


def test_a_ceiling_below_the_floor_is_refused() -> None:
    with pytest.raises(InputError, match=r"max_keep_tokens: got 99, .*min_keep_tokens \(100\)"):
        Settings.of(min_keep_tokens=100, max_keep_tokens=99)
    assert Settings.of(min_keep_tokens=100, max_keep_tokens=100).budget(1000) == 100


def test_a_separator_has_no_place_among_original_positions() -> None:
    with pytest.raises(InputError, match="separator"):
        Settings.of(separator=" [...] ", positions="original")
    for positions in ("auto", "contiguous"):
        assert Settings.of(separator=" [...] ", positions=positions).separator == " [...] "


def test_settings_cannot_be_changed_after_they_were_checked() -> None:
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.pool = 2


def test_defaults_are_those_of_the_paper_and_the_specification() -> None:
    filled = Settings().in_force()
    assert (filled.keep_rate, filled.keep_tokens, filled.coverage) == (0.3, None, None)
    assert (filled.look_ahead, filled.pool, filled.chunk_tokens) == (8, 13, 32)
    assert (filled.snap, filled.positions) == ("sentence", "auto")
    assert (filled.enabled, filled.strict) == (True, False)
    code = Settings(content="code").in_force()
    assert (code.chunk_tokens, code.snap) == (128, "line")


def test_the_draft_is_the_fast_one_by_default_and_the_papers_on_request() -> None:
    fast = Settings().in_force()
    assert (fast.scoring, fast.votes, fast.draft_window) == ("window", "max", 512)
    paper = Settings(scoring="lookahead").in_force()
    assert (paper.scoring, paper.votes, paper.look_ahead) == ("lookahead", "mean", 8)
    assert Settings(scoring="lookahead", votes="max").in_force().votes == "max"


@pytest.mark.parametrize("amount", [{"keep_rate": 0.05}, {"keep_tokens": 9}, {"coverage": 0.5}])
def test_what_was_asked_for_stays_as_asked_when_defaults_are_filled_in(
    amount: dict[str, Any],
) -> None:
    asked = {**amount, "content": "code", "chunk_tokens": 7, "snap": "char"}
    filled = Settings.of(**asked).in_force().model_dump()
    assert {k: v for k, v in filled.items() if k in asked} == asked
    others = {"keep_rate", "keep_tokens", "coverage"} - set(amount)
    assert all(filled[name] is None for name in others)
    assert Settings(**filled).in_force().model_dump() == filled


@given(
    n=st.integers(0, 300_000),
    rate=st.floats(0.001, 1.0),
    floor=st.integers(0, 3000),
    ceiling=st.one_of(st.none(), st.integers(3000, 9000)),
)
def test_budget_is_the_rate_rounded_and_held_between_floor_ceiling_and_prompt(
    n: int, rate: float, floor: int, ceiling: int | None
) -> None:
    settings = Settings(keep_rate=rate, min_keep_tokens=floor, max_keep_tokens=ceiling)
    budget = settings.budget(n)
    assert budget is not None
    assert 0 <= budget <= n
    assert budget >= min(floor, n)
    assert budget <= (ceiling or n)
    if floor <= rate * n <= (ceiling or n):
        assert abs(budget - rate * n) <= 0.5


@given(n=st.integers(0, 5000), tokens=st.integers(1, 9000))
def test_budget_in_tokens_is_what_was_asked_up_to_the_whole_prompt(n: int, tokens: int) -> None:
    assert Settings(keep_tokens=tokens, min_keep_tokens=0).budget(n) == min(tokens, n)


def test_coverage_leaves_the_number_of_tokens_to_the_prompt() -> None:
    assert Settings(coverage=0.9).budget(5000) is None
