"""Head tables, and the errors for what the kernels cannot do."""

from dataclasses import replace

import pytest

from plugins.importance.launch import Problem, default_splits
from trtllm_specprefill.importance_op import MAX_GROUP, head_table

PROBLEM = Problem(8, 2, 2, 4, 64, "bf16", "bf16", 0.125, 13, False, 8, 16)


def test_all_heads_score_group_by_group() -> None:
    assert head_table(6, 2) == [[0, 0, 1, 2], [1, 3, 4, 5]]


def test_key_heads_without_a_scoring_head_are_left_out() -> None:
    assert head_table(8, 4, [7, 2]) == [[1, 2], [3, 7]]
    assert head_table(8, 2, [0, 1, 5]) == [[0, 0, 1], [1, 5, -1]]


def test_a_wide_group_is_split_over_rows_that_cover_each_head_once() -> None:
    table = head_table(71, 1)
    assert max(len(row) for row in table) == 1 + MAX_GROUP
    assert sorted(h for row in table for h in row[1:] if h >= 0) == list(range(71))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((7, 2), "query_heads"),
        ((8, 2, []), "heads"),
        ((8, 2, [0, 0]), "heads"),
        ((8, 2, [8]), "heads"),
        ((8, 2, [-1]), "heads"),
    ],
)
def test_impossible_heads_are_refused(arguments: tuple, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        head_table(*arguments)


@pytest.mark.parametrize(
    "change",
    [
        {"dim": 72},
        {"query_type": "fp64"},
        {"key_type": "fp16"},
        {"max_queries": 65},
        {"max_queries": 0},
        {"pool": 12},
        {"pool": 35},
        {"pool": -1},
        {"group": 17},
        {"rows": 0},
        {"splits": 12},
        {"scale": float("nan")},
        {"scale": 0.0},
    ],
)
def test_what_the_kernels_cannot_do_is_refused_by_name(change: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(PROBLEM, **change)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 40])
def test_splits_are_a_power_of_two(rows: int) -> None:
    splits = default_splits(rows)
    assert 16 <= splits <= 128
    assert splits & (splits - 1) == 0


def test_byte_floor_is_two_readings_of_the_keys_and_the_running_maximum() -> None:
    # Llama-3.2-1B in bf16, two bytes an element, W = 8, N = 131072.
    problem = Problem(32, 8, 8, 4, 64, "bf16", "bf16", 0.125, 13, False, 8, 32)
    keys, queries, running = 2 * 8 * 131072 * 64, 2 * 32 * 8 * 64, 4 * 8 * 131072
    assert problem.bytes_floor(1, 8, 131072) == 2 * (keys + queries + running)
