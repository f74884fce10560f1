"""What FP8 costs a draft: the same needles scored by an fp32 and an FP8 graph, under onnxruntime.

Nothing is answered. Of each prompt: which chunks of 32 tokens are in the best tenth by either
graph, and whether each keeps the planted number at each keep rate. The error of every quantised
layer is the build's own, on its calibration text.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from perf.options import Seed_
from perf.recall import planted
from trtllm_specprefill.draft.load import load_draft
from trtllm_specprefill.draft.manifest import DraftManifest
from trtllm_specprefill.endings import run_app
from trtllm_specprefill.evaluation.forms import told
from trtllm_specprefill.evaluation.haystack import haystack
from trtllm_specprefill.evaluation.needle import fact_kept
from trtllm_specprefill.evaluation.report import check_out, command, machine
from trtllm_specprefill.prompt import prepare
from trtllm_specprefill.selection import select
from trtllm_specprefill.settings import Settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_screen = Console(stderr=True, highlight=False)

CHUNK = 32  # tokens, what selection takes of text
BEST = 0.1  # share of the chunks


@app.command(epilog="Example: python -m perf.fp8 --exact engines/fp32 --rounded engines/fp8")
def fp8(
    exact: Annotated[Path, typer.Option(help="Folder of the fp32 graph.")],
    rounded: Annotated[Path, typer.Option(help="Folder of the FP8 graph, of the same draft.")],
    lengths: Annotated[
        list[int], typer.Option(min=1, help="Tokens of the context; repeatable.")
    ] = [2000],  # noqa: B006
    needles: Annotated[int, typer.Option(min=1, help="Per length, form and kind of facts.")] = 2,
    form: Annotated[list[str], typer.Option(help="As for perf.recall.")] = ["message", "turns"],  # noqa: B006
    keep: Annotated[list[float], typer.Option(help="Keep rates; repeatable.")] = [0.05, 0.1],  # noqa: B006
    seed: Seed_ = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="The report, written after every prompt; the same command goes on."),
    ] = None,
) -> None:
    """Score every prompt with both graphs and compare."""
    for rate in keep:
        Settings.of(keep_rate=rate)
    check_out(out)
    drafts = {
        name: load_draft("onnx", "", path=str(folder), device="cpu")
        for name, folder in (("fp32", exact), ("fp8", rounded))
    }
    manifest = DraftManifest.read(rounded)
    settings = Settings.of(scoring=manifest.mode, min_keep_tokens=0)
    report: dict[str, Any] = {
        "command": command(),
        "machine": machine(),
        "draft": {"model": manifest.model, "mode": manifest.mode, "layers": manifest.layers},
        "layer_errors": layer_errors(rounded),
    }
    rows = _scored(out, report)
    tokenizer = drafts["fp32"].tokenizer
    asked = planted(tokenizer, haystack(), lengths, needles, form, seed)
    for facts, shape, case in itertools.islice(asked, len(rows), None):
        source, question = told(case, shape)
        prompts = {
            rate: prepare(
                source,
                target_tokenizer=tokenizer,
                settings=settings.model_copy(update={"keep_rate": rate}),
                question=question,
            )
            for rate in keep
        }
        prompt = prompts[keep[0]]
        found = {
            name: draft.score(prompt.draft.ids, prompt.settings, prompt.question)
            for name, draft in drafts.items()
        }
        scores = {name: importance.scores for name, importance in found.items()}
        row = {
            "facts": facts,
            "form": shape,
            "tokens": len(prompt.draft),
            "depth": case.depth,
            "overlap": overlap(scores["fp32"], scores["fp8"]),
            "kept": {
                name: {
                    f"{rate:g}": fact_kept(p, select(p, importance), case)
                    for rate, p in prompts.items()
                }
                for name, importance in found.items()
            },
        }
        rows.append(row)
        _screen.print(str(row))
        report["prompts"] = rows
        if out is not None:
            whole = report | {"summary": summary(rows)}
            out.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    print(json.dumps(summary(rows), indent=1))


def _scored(out: Path | None, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Prompts that the same command has scored before, on the same engines."""
    if out is None or not out.is_file():
        return []
    before = json.loads(out.read_text("utf-8"))
    same = all(before.get(name) == report[name] for name in ("command", "draft", "layer_errors"))
    return before["prompts"] if same else []


def overlap(exact: NDArray[np.float32], rounded: NDArray[np.float32]) -> float:
    """Share of the best tenth of the chunks by `exact` that is in that by `rounded`."""
    best = [_best_chunks(scores) for scores in (exact, rounded)]
    return len(best[0] & best[1]) / len(best[0])


def _best_chunks(scores: NDArray[np.float32]) -> set[int]:
    starts = np.arange(0, scores.size, CHUNK)
    means = np.add.reduceat(scores, starts) / np.diff([*starts, scores.size])
    count = max(1, round(BEST * means.size))
    return set(np.argsort(-means, kind="stable")[:count].tolist())


def layer_errors(folder: Path) -> dict[str, Any]:
    """Relative error of each quantised layer, and the least, the median and the largest."""
    ranges = json.loads((folder / "calibration.json").read_text("utf-8"))["ranges"]
    errors = {name: round(one["error"], 4) for name, one in ranges.items()}
    values = list(errors.values())
    return {
        "least": min(values),
        "median": round(float(np.median(values)), 4),
        "largest": max(values),
        "layers": errors,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all prompts: mean and least overlap, and the share of facts kept by either graph."""
    overlaps = [row["overlap"] for row in rows]
    return {
        "prompts": len(rows),
        "overlap": round(float(np.mean(overlaps)), 3),
        "least_overlap": round(min(overlaps), 3),
        "kept": {
            name: {
                rate: round(float(np.mean([row["kept"][name][rate] for row in rows])), 3)
                for rate in rows[0]["kept"][name]
            }
            for name in rows[0]["kept"]
        },
    }


if __name__ == "__main__":
    run_app(app)
