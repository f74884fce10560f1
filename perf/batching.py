"""Decoding several answers in one pass against in turn: what it would bring, and what it changes.

Every answer has its own keys and values of the same length, which flatters the batch: real ones
differ and would be padded. Both ways decode the same tokens from the same caches, taking turns,
and the logits of a row are compared with those of the answer alone.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import DynamicCache

from trtllm_specprefill.endings import run_app
from trtllm_specprefill.errors import given_as
from trtllm_specprefill.evaluation.haystack import haystack
from trtllm_specprefill.evaluation.report import check_folder, command, machine
from trtllm_specprefill.forward import feed, new_cache
from trtllm_specprefill.models import Model, load_model
from trtllm_specprefill.prompt import encode

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_screen = Console(stderr=True, highlight=False)


@app.command(epilog="Example: python -m perf.batching --kept 300 --answers 4")
def batching(
    target: Annotated[str, typer.Option(help="Model that answers.")] = "smollm2-135m",
    dtype: Annotated[list[str], typer.Option(help="Repeatable.")] = ["float32", "bfloat16"],  # noqa: B006
    kept: Annotated[list[int], typer.Option(min=1, help="Kept tokens of a prompt; repeatable.")] = [  # noqa: B006
        300,
        1500,
    ],
    answers: Annotated[list[int], typer.Option(min=1, help="Answers at a time; repeatable.")] = [  # noqa: B006
        2,
        4,
        8,
    ],
    steps: Annotated[int, typer.Option(min=1, help="Tokens of each answer in a round.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder of the JSON result.")] = Path("perf/results"),
) -> None:
    """Measure, print each cell, and write `batching.json`, anew after each."""
    report: dict[str, Any] = {"command": command(), "machine": machine(), "target": target}
    cells: list[dict[str, Any]] = []
    check_folder(out)
    for kind in dtype:
        with given_as(model="target"):
            model = load_model(target, kind)
        for tokens in kept:
            for count in answers:
                cells.append({"dtype": kind, **_cell(model, tokens, count, steps, rounds)})
                _screen.print(cells[-1], style="dim", markup=False)
                text = json.dumps(report | {"cells": cells}, indent=1)
                (out / "batching.json").write_text(text + "\n", "utf-8")


@torch.inference_mode()
def _cell(model: Model, tokens: int, count: int, steps: int, rounds: int) -> dict[str, Any]:
    ids = torch.from_numpy(encode(model.tokenizer, haystack()[:200_000], special=False).ids).long()
    rows = torch.stack([ids[i * tokens : (i + 1) * tokens] for i in range(count)])
    together = new_cache(model)
    _pass(model, rows, torch.arange(tokens).repeat(count, 1), together)
    alone = [_row(together, i) for i in range(count)]
    fed = torch.stack([ids[-(i + 1) * steps :][:steps] for i in range(count)])
    seconds: dict[str, list[float]] = {"in turn": [], "together": []}
    difference, argmax = 0.0, 0
    for _ in range(rounds + 1):
        one, many = [copy.deepcopy(cache) for cache in alone], copy.deepcopy(together)
        begin = time.perf_counter()
        singles = [
            [_step(model, fed[i : i + 1, s], tokens + s, one[i])[0] for i in range(count)]
            for s in range(steps)
        ]
        middle = time.perf_counter()
        batched = [_step(model, fed[:, s], tokens + s, many) for s in range(steps)]
        seconds["in turn"].append(middle - begin)
        seconds["together"].append(time.perf_counter() - middle)
        pairs = [(singles[s][i], batched[s][i]) for s in range(steps) for i in range(count)]
        difference = max(float((a - b).abs().max()) for a, b in pairs)
        argmax = sum(int(a.argmax() != b.argmax()) for a, b in pairs)
    rate = {n: steps * count / statistics.median(times[1:]) for n, times in seconds.items()}
    return {
        "kept_tokens": tokens,
        "answers": count,
        "tokens_per_s": rate,
        "gain": rate["together"] / rate["in turn"],
        "largest_difference_of_logits": difference,
        "other_tokens_greedily": f"{argmax} of {steps * count}",
    }


def _row(cache: DynamicCache, row: int) -> DynamicCache:
    """One answer's own cache out of those of several."""
    own = copy.deepcopy(cache)
    for layer in own.layers:
        layer.keys = layer.keys[row : row + 1].clone()
        layer.values = layer.values[row : row + 1].clone()
    return own


def _step(model: Model, ids: torch.Tensor, position: int, cache: DynamicCache) -> torch.Tensor:
    """Logits `[B, vocab]` after one more token of each row."""
    return _pass(model, ids[:, None], torch.full((len(ids), 1), position), cache)


def _pass(
    model: Model, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
) -> torch.Tensor:
    logits: torch.Tensor = feed(model, ids, positions, cache).logits[:, -1].float()
    return logits


if __name__ == "__main__":
    run_app(app)
