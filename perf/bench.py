"""`make bench`: time of every stage, dense and pruned interleaved, and the memory of scoring.

Times are medians over rounds in one process, each round answering the same prompt dense and
pruned. Memory is read from processes of their own, since a peak cannot be reset: one that
only prefills the prompt with the draft, and one that scores it; the difference is what scoring
adds.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from trtllm_specprefill import cli
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.errors import DraftFailed
from trtllm_specprefill.evaluation.haystack import haystack
from trtllm_specprefill.evaluation.needle import cases
from trtllm_specprefill.evaluation.report import command, machine
from trtllm_specprefill.forward import last_logits, new_cache
from trtllm_specprefill.models import Model, load_model
from trtllm_specprefill.pipeline import SpecPrefill
from trtllm_specprefill.prompt import ask, encode
from trtllm_specprefill.settings import Settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_screen = Console(stderr=True, highlight=False)


@app.command(epilog="Example: python -m perf.bench --rounds 5 --out perf/results")
def bench(
    draft: Annotated[str, typer.Option(help="Model that scores.")] = "smollm2-135m",
    target: Annotated[str, typer.Option(help="Model that answers.")] = "smollm2-135m",
    tokens: Annotated[list[int], typer.Option(help="Prompt lengths; repeatable.")] = [  # noqa: B006
        3000,
        7200,
    ],
    memory_tokens: Annotated[int, typer.Option(help="Prompt length of the memory run.")] = 8000,
    keep: Annotated[float, typer.Option(help="Keep rate.")] = 0.1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder of the JSON result.")] = Path("perf/results"),
    peak: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure, print a short summary, and write `bench.json`."""
    if peak:
        print(json.dumps(_peak(draft, memory_tokens, peak)))
        return
    memory = _memory(draft, memory_tokens)
    model = SpecPrefill.from_pretrained(draft, target, progress=_say)
    lengths = [_stages(model, n, keep, rounds) for n in tokens]
    report = {
        "command": command(),
        "machine": machine(),
        "draft": draft,
        "target": target,
        "keep": keep,
        "rounds": rounds,
        "memory": memory,
        "lengths": lengths,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / "bench.json"
    path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    for row in lengths:
        print(
            f"{row['prompt_tokens']} tokens: TTFT dense {row['dense']['ttft_s']:.2f} s,"
            f" pruned {row['pruned']['ttft_s']:.2f} s, ratio {row['speedup']:.2f}"
        )
    print(
        f"scoring {memory_tokens} tokens adds {memory['scoring_adds_mib']:.0f} MiB to a peak of"
        f" {memory['prefill_peak_mib']:.0f} MiB; written to {path}"
    )


def _say(line: str) -> None:
    _screen.print(line, style="dim", markup=False)


def _stages(model: SpecPrefill, tokens: int, keep: float, rounds: int) -> dict[str, Any]:
    """Medians of TTFT and of each stage, dense and pruned in turn."""
    case = next(cases(haystack(), model.target.tokenizer, [tokens], [1], 5))
    source = ask(case.context, case.question, model.target.tokenizer)
    arms: dict[str, dict[str, Any]] = {
        "dense": {"enabled": False},
        "pruned": {"keep": keep, "threshold": 0},
    }
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for i in range(rounds):
        for name, knobs in arms.items():
            report = model.generate(source, max_tokens=16, **knobs).report()
            if name == "pruned" and report["reason"] != "pruned":
                raise DraftFailed(f"not pruned: {report['reason']}: {report['detail']}")
            reports[name].append(report)
            _say(
                f"{tokens} tokens, round {i + 1} of {rounds}, {name}:"
                f" TTFT {reports[name][-1]['ttft_s']:.2f} s"
            )
    row: dict[str, Any] = {"prompt_tokens": reports["dense"][0]["prompt_tokens"]}
    for name, runs in reports.items():
        row[name] = {
            "ttft_s": statistics.median(r["ttft_s"] for r in runs),
            "ttft_min_s": min(r["ttft_s"] for r in runs),
            "ttft_max_s": max(r["ttft_s"] for r in runs),
            "stages": {
                stage: statistics.median(r["stages"][stage] for r in runs)
                for stage in runs[0]["stages"]
            },
            "kept_tokens": runs[0]["kept_tokens"],
            "text": runs[0]["text"],
        }
    pairs = zip(reports["dense"], reports["pruned"], strict=True)
    row["speedup"] = statistics.median(d["ttft_s"] / p["ttft_s"] for d, p in pairs)
    return row


def _memory(draft: str, tokens: int) -> dict[str, Any]:
    """Peak resident memory of loading, of a plain prefill, and of scoring, each on its own."""
    peaks = {}
    for what in ("load", "prefill", "score"):
        _say(f"peak memory of {what} at {tokens} tokens")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "perf.bench", "--peak", what),
                *("--draft", draft, "--memory-tokens", str(tokens)),
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        peaks[what] = json.loads(done.stdout.splitlines()[-1])
    return {
        "tokens": tokens,
        "load_peak_mib": peaks["load"]["peak_mib"],
        "prefill_peak_mib": peaks["prefill"]["peak_mib"],
        "score_peak_mib": peaks["score"]["peak_mib"],
        "scoring_adds_mib": peaks["score"]["peak_mib"] - peaks["prefill"]["peak_mib"],
        # What a scorer that stores layers x heads x queries x tokens in float32 would hold.
        "all_weights_at_once_mib": peaks["score"]["naive_mib"],
    }


def _peak(draft: str, tokens: int, what: str) -> dict[str, float]:
    model = load_model(draft)
    settings = Settings()
    rows = settings.look_ahead + 1
    if what != "load":
        scorer = TorchDraft(model)
        ids = encode(model.tokenizer, haystack()[: tokens * 8], special=True).ids[:tokens]
        if what == "score":
            scorer.score(ids, settings)
        else:
            _prefill(model, ids)
    heads = model.config.num_attention_heads * model.config.num_hidden_layers
    return {
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "naive_mib": 4 * heads * rows * tokens / 2**20,
    }


def _prefill(model: Model, ids: Any) -> None:
    with torch.inference_mode():
        positions = torch.arange(ids.size)
        last_logits(model, torch.from_numpy(ids.astype(np.int64)), positions, new_cache(model))


if __name__ == "__main__":
    cli.run_app(app)
