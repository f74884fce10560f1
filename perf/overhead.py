"""What serving costs: TTFT over gRPC minus the library's own, on the same prompts.

One process holds the library, the server another copy of the same models; each round answers a
prompt in both, whichever comes first changing, so that a busy machine troubles both alike. The
difference is taken pair by pair.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from perf.options import Config_, Keeps_, Positions_, Seed_, Tokens_, Url_
from perf.served import OFF, knobs, prompts, running
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.endings import run_app
from trtllm_specprefill.errors import InputError, SpecPrefillError
from trtllm_specprefill.evaluation.report import check_folder, command, machine
from trtllm_specprefill.models import load_model
from trtllm_specprefill.pipeline import SpecPrefill
from trtllm_specprefill.serving.client import server_facts, stream
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.target.torch import TorchTarget

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_screen = Console(stderr=True, highlight=False)


@app.command(epilog="Example: python -m perf.overhead --tokens 1500 --rounds 9")
def overhead(
    tokens: Tokens_ = [  # noqa: B006
        600,
        3000,
    ],
    keep: Keeps_ = [OFF, "0.3"],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of each cell.")] = 9,
    positions: Positions_ = "contiguous",
    seed: Seed_ = 0,
    url: Url_ = None,
    config: Config_ = None,
    out: Annotated[Path, typer.Option(help="Folder of the JSON result.")] = Path("perf/results"),
) -> None:
    """Measure, print a line for each cell, and write `serving_overhead.json`."""
    arms = {rate: knobs(rate, positions) for rate in keep}
    check_folder(out)
    with running(url, config, _say) as address:
        served, triton = server_facts(address)
        own = _library(served)
        asked = prompts(own.target.tokenizer, tokens, 1, seed)
        cells = [
            _cell(address, own, asked[length][0][1], rate, arm, rounds)
            for length in tokens
            for rate, arm in arms.items()
        ]
    report = {
        "command": command(),
        "machine": machine(),
        "tritonserver": triton,
        "served": served.model_dump(mode="json", exclude={"ports"}),
        "positions": positions,
        "cells": cells,
    }
    path = out / "serving_overhead.json"
    path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    for cell in cells:
        print(
            f"{cell['prompt_tokens']} tokens, keep {cell['keep']}: TTFT {cell['library_p50_s']:.3f}"
            f" s, over gRPC {1000 * cell['overhead_p50_s']:+.0f} ms"
            f" ({100 * cell['overhead_p50_s'] / cell['library_p50_s']:+.1f} %)"
        )
    print(f"written to {path}")


def _library(served: ServeSettings) -> SpecPrefill:
    """The served models in this process."""
    draft, target = served.draft, served.target
    if (draft.backend, target.backend) != ("torch", "torch"):
        raise InputError("backend", (draft.backend, target.backend), "torch for both")
    model = load_model(target.model, target.dtype, target.device, _say)
    same = all(getattr(draft, n) == getattr(target, n) for n in ("model", "dtype", "device"))
    scorer = model if same else load_model(draft.model, draft.dtype, draft.device, _say)
    return SpecPrefill(TorchDraft(scorer), TorchTarget(model))


def _cell(
    address: str,
    own: SpecPrefill,
    source: dict[str, str],
    keep: str,
    arm: dict[str, Any],
    rounds: int,
) -> dict[str, Any]:
    """Pairs of one prompt under one keep rate, after one that is not counted."""
    given: Any = source.get("text_input") or json.loads(source["messages"])

    def library() -> tuple[float, dict[str, Any]]:
        generation = own.generate(given, max_tokens=4, **arm)
        return generation.ttft_s, generation.report()

    def server() -> tuple[float, dict[str, Any]]:
        begin, ttft, texts = time.perf_counter(), 0.0, []
        report: dict[str, Any] | None = None
        for text, report in stream(address, {**source, "max_tokens": 4, "specprefill": arm}):  # noqa: B007
            ttft = ttft or time.perf_counter() - begin
            texts.append(text)
        assert report is not None
        return ttft, {**report, "text": "".join(texts)}

    pairs = []
    for number in range(rounds + 1):
        order = (library, server) if number % 2 else (server, library)
        taken = {one.__name__: one() for one in order}
        (alone, told), (over_grpc, report) = taken["library"], taken["server"]
        if report["text"] != told["text"] or report["reason"] != told["reason"]:
            raise SpecPrefillError(f"the server answered {report['text']!r}, not {told['text']!r}")
        if number:
            pairs.append((alone, over_grpc, told, report))
            _say(f"{told['prompt_tokens']} tokens, keep {keep}: {alone:.3f} s, {over_grpc:.3f} s")
    names = {name: None for *_, report in pairs for name in report["stages"] if name != "decode"}
    return {
        "prompt_tokens": pairs[0][2]["prompt_tokens"],
        "keep": keep,
        "library_s": [alone for alone, *_ in pairs],
        "grpc_s": [over for _, over, *_ in pairs],
        "library_p50_s": statistics.median(alone for alone, *_ in pairs),
        "grpc_p50_s": statistics.median(over for _, over, *_ in pairs),
        "overhead_p50_s": statistics.median(over - alone for alone, over, *_ in pairs),
        # Where it goes: stages of the same name on both sides, and those only a server has.
        "stages_p50_s": {
            name: {
                "library": statistics.median(
                    told["stages"].get(name, 0.0) for *_, told, _ in pairs
                ),
                "grpc": statistics.median(report["stages"][name] for *_, report in pairs),
            }
            for name in names
        },
        "outside_p50_s": statistics.median(over - r["ttft_s"] for _, over, _, r in pairs),
    }


def _say(line: str) -> None:
    _screen.print(line, style="dim", markup=False)


if __name__ == "__main__":
    run_app(app)
