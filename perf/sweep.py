"""`make sweep`: prompt length x keep rate x concurrency against a real server.

perf_analyzer sends streamed requests and stamps every response; what is said about time comes
from its stamps, where the time went from the reports in the responses. The work is cut into
pieces, one cell (length, keep rate, concurrency) in one round; dense and pruned cells of a length
take turns, and every round visits them all. Each finished piece is written down at once, so a
sweep that was interrupted goes on where it stopped; results of another configuration are refused.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from perf import sweep_report
from perf.analyzer import Analyzer, Seen, find, load
from perf.options import Config_, Keeps_, Positions_, Seed_, Tokens_, Url_
from perf.served import OFF, knobs, prompts, running
from trtllm_specprefill.endings import run_app
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.evaluation.haystack import haystack
from trtllm_specprefill.evaluation.needle import Case, digest
from trtllm_specprefill.evaluation.report import check_folder, command, machine
from trtllm_specprefill.models import load_tokenizer
from trtllm_specprefill.serving.client import server_facts
from trtllm_specprefill.target.load import source_model

RESULTS = "sweep.json"
_PROMPTS = 4  # different prompts of a length, sent in turn
_OWN = ("when", "torch_threads")  # of this run, or of this process

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_screen = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Piece:
    """One cell in one round. tokens: of the context asked for. keep: a rate, or `off`."""

    tokens: int
    keep: str
    concurrency: int
    round: int

    def of(self, piece: dict[str, Any]) -> bool:
        """Whether these are the results of this piece."""
        return all(piece[name] == value for name, value in vars(self).items())


@app.command(epilog="Example: python -m perf.sweep --tokens 1500 --keep off --keep 0.1")
def sweep(
    tokens: Tokens_ = [  # noqa: B006
        600,
        1500,
        3000,
    ],
    keep: Keeps_ = [  # noqa: B006
        OFF,
        "0.3",
        "0.1",
    ],
    concurrency: Annotated[list[int], typer.Option(min=1, help="Repeatable.")] = [1, 4],  # noqa: B006
    requests: Annotated[int, typer.Option(min=1, help="Requests of a cell in a round.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Visits to every cell.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 16,
    positions: Positions_ = "contiguous",
    seed: Seed_ = 0,
    url: Url_ = None,
    config: Config_ = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("build/sweep"),
) -> None:
    """Measure what is not measured yet; write JSON, CSV, plots and a report."""
    for rate in keep:
        knobs(rate, positions)
    check_folder(out)
    analyzer = find(_say)
    plan = [
        Piece(length, rate, load_, visit)
        for visit in range(rounds)
        for length in tokens
        for load_ in concurrency
        for rate in keep
    ]
    with running(url, config, _say) as address:
        served, triton = server_facts(address)
        configuration = {
            "served": served.model_dump(mode="json", exclude={"ports"}),
            "requests": requests,
            "max_tokens": max_tokens,
            "positions": positions,
            "seed": seed,
            "haystack_sha256": digest(haystack(progress=_say)),
            "machine": {k: v for k, v in machine().items() if k not in _OWN},
            "versions": {
                "trtllm-specprefill": version("trtllm-specprefill"),
                "tritonserver": triton,
                "perf_analyzer": analyzer.version,
            },
        }
        results = read_results(out, configuration)
        left = [p for p in plan if not any(p.of(done) for done in results["pieces"])]
        _say(f"{len(plan) - len(left)} of {len(plan)} pieces are done")
        if left:
            target = source_model(served.target.backend, served.target.model)
            tokenizer = load_tokenizer(target, _say)
            asked = prompts(tokenizer, tokens, min(requests, _PROMPTS), seed)
            _measure(analyzer, address, left, asked, results, out)
    for path in sweep_report.write(results, out):
        print(path)


def read_results(out: Path, configuration: dict[str, Any]) -> dict[str, Any]:
    """What was measured so far under this configuration, or an empty result.

    Raises `InputError` when `out` holds results of another configuration.
    """
    path = out / RESULTS
    if not path.is_file():
        return {"command": command(), "configuration": configuration, "pieces": []}
    results: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if differing := _differences(results["configuration"], configuration):
        words = "; ".join(f"{n} was {old!r}, is {new!r}" for n, old, new in differing)
        raise InputError("out", str(out), f"a folder without results of another set-up ({words})")
    return results


def _differences(old: Any, new: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(old.keys() | new.keys())
        inner = [_differences(old.get(n), new.get(n), f"{name}.{n}".strip(".")) for n in names]
        return [found for one in inner for found in one]
    return [] if old == new else [(name, old, new)]


def _measure(
    analyzer: Analyzer,
    address: str,
    left: list[Piece],
    asked: dict[int, list[tuple[Case, dict[str, str]]]],
    results: dict[str, Any],
    out: Path,
) -> None:
    """Run the pieces in turn, each written down before the next begins."""
    configuration = results["configuration"]
    count, positions = configuration["requests"], configuration["positions"]

    def requests(piece: Piece) -> list[dict[str, Any]]:
        own = {
            "max_tokens": configuration["max_tokens"],
            "stream": True,
            "specprefill": json.dumps(knobs(piece.keep, positions)),
        }
        return [{**source, **own} for _, source in asked[piece.tokens]]

    for warm_up in {piece.keep: piece for piece in left}.values():
        load(analyzer, address, requests(warm_up), 1, 1)  # what is loaded late is loaded now
    begin = time.monotonic()
    for number, piece in enumerate(left, 1):
        seen = load(analyzer, address, requests(piece), piece.concurrency, count)
        answers = {text: c.answer for c, own in asked[piece.tokens] for text in own.values()}
        rows = [_row(one, answers) for one in seen]
        seconds = max(one.sent + one.arrivals[-1] for one in seen) - min(one.sent for one in seen)
        results["pieces"].append({**vars(piece), "seconds": seconds, "requests": rows})
        _write(out / RESULTS, results)
        median = statistics.median(row["ttft_s"] for row in rows)
        rest = (time.monotonic() - begin) / number * (len(left) - number)
        _say(
            f"{number} of {len(left)}: {piece.tokens} tokens, keep {piece.keep}, concurrency"
            f" {piece.concurrency}: TTFT {median:.2f} s; {rest / 60:.0f} min left"
        )


def _row(seen: Seen, answers: dict[str, str]) -> dict[str, Any]:
    """What is kept of one request."""
    sent = seen.inputs.get("messages") or seen.inputs["text_input"]
    return {
        "ttft_s": seen.ttft_s,
        "token_gap_s": seen.token_gap_s,
        "server_ttft_s": seen.report["ttft_s"],
        "right": answers[sent] in seen.text,
        **{
            name: seen.report[name]
            for name in ("reason", "prompt_tokens", "kept_tokens", "output_tokens", "stages")
        },
    }


def _write(path: Path, results: dict[str, Any]) -> None:
    """In one step, so that an interruption leaves the old results or the new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    os.replace(fresh, path)


def _say(line: str) -> None:
    _screen.print(line, style="dim", markup=False)


if __name__ == "__main__":
    run_app(app)
