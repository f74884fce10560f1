"""A sweep goes on where it stopped, keeps set-ups apart, and counts right; no server is asked."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from perf import sweep, sweep_report
from perf.analyzer import Analyzer, Seen
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.serving.settings import ServeSettings

pytestmark = pytest.mark.model  # a tokenizer and prose, for the prompts

GRID = {"tokens": [200, 300], "keep": ["off", "0.3"], "concurrency": [1, 2]}


class Interrupted(Exception):
    """Whoever started the sweep has stopped it."""


class Loads:
    """Answers in the place of perf_analyzer and its server, so many pieces and no more."""

    def __init__(self, pieces: int) -> None:
        self.left, self.asked = pieces, []

    def __call__(
        self, analyzer: Any, url: str, requests: list[dict[str, Any]], concurrency: int, count: int
    ) -> list[Seen]:
        if count > 1 or concurrency > 1:  # else it is a warm-up
            self.left -= 1
            if self.left < 0:
                raise Interrupted
            own = json.loads(requests[0]["specprefill"])
            self.asked.append((len(requests[0]["messages"]), own.get("keep"), concurrency))
        return [self._seen(requests[i % len(requests)], i) for i in range(count)]

    def _seen(self, request: dict[str, Any], number: int) -> Seen:
        pruned = "keep" in json.loads(request["specprefill"])
        ttft = random.uniform(0.1, 2.0)
        report = {
            "reason": "pruned" if pruned else "disabled",
            "prompt_tokens": 200,
            "kept_tokens": 60 if pruned else 200,
            "output_tokens": 3,
            "ttft_s": ttft - 0.01,
            "stages": {"prepare": 0.01, "target_prefill": ttft - 0.02, "decode": 0.2},
        }
        return Seen(100.0 + number, (ttft, ttft + 0.1, ttft + 0.2), "no fact", report, request)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run a sweep with values in the place of the defaults; `loads` answers it."""

    @contextmanager
    def address(*given: Any) -> Iterator[str]:
        yield "127.0.0.1:1"

    monkeypatch.setattr(sweep, "find", lambda progress: Analyzer("", "2.51.0", {}))
    monkeypatch.setattr(sweep, "running", address)

    def go(loads: Loads, served: ServeSettings | None = None, **values: Any) -> None:
        facts = served or ServeSettings(), "2.51.0"
        monkeypatch.setattr(sweep, "server_facts", lambda url: facts)
        monkeypatch.setattr(sweep, "load", loads)
        rest = {"requests": 2, "rounds": 2, "max_tokens": 8, "positions": "contiguous", "seed": 1}
        sweep.sweep(**{**GRID, **rest, "url": None, "config": None, "out": tmp_path, **values})

    return go


def pieces(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / sweep.RESULTS).read_text())["pieces"]
    return found


def test_an_interrupted_sweep_goes_on_and_repeats_nothing(run: Any, tmp_path: Path) -> None:
    done = random.randrange(1, 15)
    with pytest.raises(Interrupted):
        run(Loads(done))
    before = pieces(tmp_path)
    assert len(before) == done
    rest = Loads(100)
    run(rest)
    assert len(rest.asked) == 16 - done
    after = pieces(tmp_path)
    assert after[:done] == before
    named = {(p["tokens"], p["keep"], p["concurrency"], p["round"]) for p in after}
    assert len(named) == len(after) == 16
    nothing = Loads(0)
    run(nothing)
    assert nothing.asked == []


def test_dense_and_pruned_take_turns(run: Any, tmp_path: Path) -> None:
    run(Loads(16))
    arms = [piece["keep"] for piece in pieces(tmp_path)]
    assert arms == ["off", "0.3"] * 8
    assert [piece["round"] for piece in pieces(tmp_path)] == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": 9}, "max_tokens was 8, is 9"),
        ({"requests": 3}, "requests was 2, is 3"),
        ({"served": ServeSettings.of({"draft": {"dtype": "float32"}})}, r"served\.draft\.dtype"),
    ],
)
def test_results_of_another_set_up_are_not_mixed_in(
    run: Any, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    run(Loads(100), keep=["off"], rounds=1)
    before = (tmp_path / sweep.RESULTS).read_bytes()
    with pytest.raises(InputError, match=named):
        run(Loads(100), **change)
    assert (tmp_path / sweep.RESULTS).read_bytes() == before


def test_a_larger_grid_of_the_same_set_up_adds_to_the_results(run: Any, tmp_path: Path) -> None:
    run(Loads(100), tokens=[200], rounds=1)
    more = Loads(100)
    run(more)
    assert len(more.asked) == 12


@pytest.mark.parametrize("keep", ["0", "1.5", "nan", "half", "-1"])
def test_a_keep_rate_that_is_none_is_refused_before_anything_runs(run: Any, keep: str) -> None:
    loads = Loads(100)
    with pytest.raises(InputError, match="keep"):
        run(loads, keep=["off", keep])
    assert loads.asked == []


def test_cells_tables_plots_and_page_say_what_was_measured(run: Any, tmp_path: Path) -> None:
    run(Loads(16))
    results = json.loads((tmp_path / sweep.RESULTS).read_text())
    table = sweep_report.cells(results)
    assert len(table) == 8
    for cell in table:
        mine = [p for p in results["pieces"] if all(p[n] == cell[n] for n in GRID)]
        rows = [row for piece in mine for row in piece["requests"]]
        times = [row["ttft_s"] for row in rows]
        assert cell["requests"] == len(rows) == 4
        for percent in (50, 90, 99):
            assert cell["ttft_s"][f"p{percent}"] == pytest.approx(np.percentile(times, percent))
        assert cell["token_gap_s"] == pytest.approx(0.1)
        # Two requests a second apart, the second's answer at its end.
        assert cell["requests_per_s"] == pytest.approx(4 / sum(p["seconds"] for p in mine))
        assert cell["stages"]["outside the server"] == pytest.approx(0.01)
        assert "decode" not in cell["stages"]
    dense = {(c["tokens"], c["concurrency"]): c for c in table if c["keep"] == "off"}
    for cell in table:
        base = dense[cell["tokens"], cell["concurrency"]]["ttft_s"]["p50"]
        assert cell["speedup"] == pytest.approx(base / cell["ttft_s"]["p50"])
    with (tmp_path / "cells.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [float(line["ttft_s.p50"]) for line in lines] == [c["ttft_s"]["p50"] for c in table]
    page = (tmp_path / "report.md").read_text()
    for name in ("ttft_by_length", "ttft_by_rate", "stages"):
        assert f"({name}.png)" in page
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert page.count("| 0.3 |") == 4
