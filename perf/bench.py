"""`make bench`: TTFT by stage, dense and pruned interleaved; how scoring grows; its memory.

Times are medians over rounds in one process, each round answering the same prompt dense, pruned
by the paper's draft (every layer, whole prompt, look-ahead) and pruned by the fast one (windows,
first layers). Every round also multiplies two matrices of the draft's sizes: a stage's
operations over that rate are its floor. Memory is read from processes of their own, from the end of
loading on: loading peaks higher than scoring does.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from perf.options import Draft_, Positions_
from trtllm_specprefill import cli
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.endings import run_app
from trtllm_specprefill.errors import DraftFailed, given_as
from trtllm_specprefill.evaluation.haystack import haystack
from trtllm_specprefill.evaluation.needle import Case, cases
from trtllm_specprefill.evaluation.report import check_folder, command, machine
from trtllm_specprefill.forward import last_logits, new_cache
from trtllm_specprefill.hardware import choose_dtype
from trtllm_specprefill.importance import Importance
from trtllm_specprefill.models import Model, load_config, load_model
from trtllm_specprefill.pipeline import SpecPrefill
from trtllm_specprefill.plan import make_plan
from trtllm_specprefill.prompt import ask, encode, prepare
from trtllm_specprefill.selection import select
from trtllm_specprefill.settings import Settings
from trtllm_specprefill.target.torch import TorchTarget

# What each pruned arm asks of the draft.
DRAFTS: dict[str, dict[str, Any]] = {"paper": {"scoring": "lookahead"}, "fast": {}}

KEPT_BYTES = 512 << 20  # of keys and values of windows, kept between two turns

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_screen = Console(stderr=True, highlight=False)


@app.command(epilog="Example: python -m perf.bench --rounds 5 --out perf/results")
def bench(
    draft: Draft_ = "smollm2-135m",
    target: Annotated[str, typer.Option(help="Model that answers.")] = "smollm2-135m",
    tokens: Annotated[list[int], typer.Option(min=1, help="Prompt lengths; repeatable.")] = [  # noqa: B006
        3000,
        7200,
    ],
    memory_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt length of the memory run.")
    ] = 8000,
    growth: Annotated[
        list[int], typer.Option(min=1, help="Lengths the fast draft scores alone.")
    ] = [  # noqa: B006
        4000,
        16000,
        64000,
    ],
    plan_tokens: Annotated[
        int, typer.Option(min=1, help="Length of the prompt that is selected from and planned.")
    ] = 1_000_000,
    keep: Annotated[float, typer.Option(help="Keep rate.")] = 0.1,
    positions: Positions_ = "contiguous",
    dtype: cli.Dtype_ = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder of the JSON result.")] = Path("perf/results"),
    peak: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure, print a short summary, and write `bench.json`."""
    if peak:
        print(json.dumps(_peak(draft, dtype, memory_tokens, peak, rounds)))
        return
    Settings.of(keep_rate=keep, positions=positions)
    choose_dtype(dtype, torch.device("cpu"))
    for field, name in (("draft", draft), ("target", target)):
        with given_as(model=field):
            load_config(name, _say)
    check_folder(out)
    memory = {
        what: _alone(draft, dtype, memory_tokens, what) for what in ("load", "prefill", *DRAFTS)
    }
    grown = [_alone(draft, dtype, n, "fast", rounds) for n in growth]
    model = SpecPrefill.from_pretrained(draft, target, dtype=dtype, progress=_say)
    assert isinstance(model.draft, TorchDraft)
    lengths = [_stages(model, n, keep, positions, rounds) for n in tokens]
    second = _second_turn(model, max(tokens), keep, positions, rounds)
    known = _known_head(model, positions, rounds)
    planned = _planning(model, plan_tokens, rounds)
    report = {
        "command": command(),
        "machine": machine(),
        "draft": draft,
        "target": target,
        "dtype": str(model.draft.model.dtype).removeprefix("torch."),
        "keep": keep,
        "positions": positions,
        "rounds": rounds,
        "memory": memory,
        "growth": grown,
        "lengths": lengths,
        "second_turn": second,
        "known_head": known,
        "planning": planned,
    }
    path = out / "bench.json"
    path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    for row in lengths:
        for name in DRAFTS:
            print(
                f"{row['prompt_tokens']} tokens: TTFT dense {row['dense']['ttft_s']:.2f} s,"
                f" {name} draft {row[name]['ttft_s']:.2f} s, ratio {row[name]['speedup']:.2f}"
            )
    for peak_of in grown:
        print(
            f"scoring {peak_of['tokens']} tokens: {peak_of['seconds']:.2f} s,"
            f" peak {peak_of['peak_mib']:.0f} MiB, {peak_of['loaded_mib']:.0f} before"
        )
    print(
        f"second turn after {second['known_tokens']} tokens: TTFT {second['warm_ttft_s']:.2f} s,"
        f" with nothing kept {second['cold_ttft_s']:.2f} s, {second['warm_share']:.0%}"
    )
    print(
        f"system prompt of {known['head_tokens']} tokens, known: TTFT {known['warm_ttft_s']:.2f} s,"
        f" not known {known['cold_ttft_s']:.2f} s, {known['warm_share']:.0%}"
    )
    print(
        f"selecting and planning {planned['tokens']} tokens: {1e3 * planned['seconds']:.0f} ms"
        " of one core"
    )
    print(f"written to {path}")


def _say(line: str) -> None:
    _screen.print(line, style="dim", markup=False)


def _stages(
    model: SpecPrefill, tokens: int, keep: float, positions: str, rounds: int
) -> dict[str, Any]:
    """Medians of TTFT and of each stage, the arms in turn, and the floor of each stage."""
    assert isinstance(model.draft, TorchDraft)
    config = model.draft.config
    case = next(cases(haystack(), model.target.tokenizer, [tokens], [1], 5))
    source = ask(case.context, case.question, model.target.tokenizer)
    pruned = {"keep": keep, "threshold": 0, "positions": positions}
    arms = {"dense": {"enabled": False}} | {n: {**pruned, **own} for n, own in DRAFTS.items()}
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    rates = []
    for i in range(rounds):
        for name, knobs in arms.items():
            report = model.generate(source, max_tokens=16, **knobs).report()
            if name in DRAFTS and report["reason"] != "pruned":
                raise DraftFailed(f"not pruned: {report['reason']}: {report['detail']}")
            reports[name].append(report)
            rates.append(_matrix_rate(config, model.draft.model.dtype))
            _say(
                f"{tokens} tokens, round {i + 1} of {rounds}, {name}:"
                f" TTFT {reports[name][-1]['ttft_s']:.2f} s"
            )
    n = reports["dense"][0]["prompt_tokens"]
    rate = statistics.median(rates)
    row: dict[str, Any] = {"prompt_tokens": n, "matrix_gflops": rate / 1e9}
    for name, runs in reports.items():
        kept = runs[0]["kept_tokens"]
        floors = {"target_prefill": model.target.operations(kept) / rate}
        if name in DRAFTS:
            settings = Settings.of(**DRAFTS[name])
            floors["draft_prefill"] = model.draft.operations(n, settings) / rate
        stages = {s: statistics.median(r["stages"][s] for r in runs) for s in runs[0]["stages"]}
        row[name] = {
            "ttft_s": statistics.median(r["ttft_s"] for r in runs),
            "ttft_min_s": min(r["ttft_s"] for r in runs),
            "ttft_max_s": max(r["ttft_s"] for r in runs),
            "stages": stages,
            "floors": floors,
            "share_of_floor_rate": {stage: floors[stage] / stages[stage] for stage in floors},
            "speedup": statistics.median(
                d["ttft_s"] / p["ttft_s"] for d, p in zip(reports["dense"], runs, strict=True)
            ),
            "kept_tokens": kept,
            "text": runs[0]["text"],
            "right": case.answer in runs[0]["text"],
        }
    return row


def _second_turn(
    model: SpecPrefill, tokens: int, keep: float, positions: str, rounds: int
) -> dict[str, Any]:
    """TTFT of a second question about a document, its windows kept from the first and not."""
    assert isinstance(model.draft, TorchDraft)
    case, other = cases(haystack(), model.target.tokenizer, [tokens], [2], 7)
    first = [{"role": "user", "content": f"{case.context}\n\n{other.fact}\n\n{case.question}"}]
    knobs = {"keep": keep, "threshold": 0, "positions": positions, "max_tokens": 16}
    loaded = model.draft.model
    runs = []
    for i in range(rounds):
        keeping = SpecPrefill(TorchDraft(loaded, KEPT_BYTES), model.target)
        answered = keeping.generate(first, **knobs)
        second = [
            *first,
            {"role": "assistant", "content": answered.text},
            {"role": "user", "content": other.question},
        ]
        warm = keeping.generate(second, **knobs)
        cold = SpecPrefill(TorchDraft(loaded, KEPT_BYTES), model.target).generate(second, **knobs)
        if warm.plan.input_ids.tolist() != cold.plan.input_ids.tolist():
            raise DraftFailed("kept windows and read ones select different tokens")
        runs.append((warm, cold))
        _say(f"second turn, round {i + 1}: {warm.ttft_s:.2f} s, cold {cold.ttft_s:.2f} s")
    warm, cold = runs[0]
    return {
        "known_tokens": answered.plan.prompt_tokens,
        "prompt_tokens": warm.plan.prompt_tokens,
        "warm_ttft_s": statistics.median(w.ttft_s for w, _ in runs),
        "cold_ttft_s": statistics.median(c.ttft_s for _, c in runs),
        "warm_share": statistics.median(w.ttft_s / c.ttft_s for w, c in runs),
        "warm_stages": warm.stages,
        "cold_stages": cold.stages,
        "right": other.answer in warm.text,
        "text": warm.text,
    }


def _known_head(model: SpecPrefill, positions: str, rounds: int) -> dict[str, Any]:
    """TTFT of a document behind a system prompt whose keys and values are kept, and are not."""
    assert isinstance(model.target, TorchTarget)
    rules, first, second = cases(haystack(), model.target.tokenizer, [1000, 3000], [1, 2], 9)
    loaded, knobs = model.target.model, {"keep": 0.35, "threshold": 0, "positions": positions}

    def told(case: Case) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": rules.context},
            {"role": "user", "content": f"{case.context}\n\n{case.question}"},
        ]

    runs = []
    for i in range(rounds):
        keeping = SpecPrefill(model.draft, TorchTarget(loaded, KEPT_BYTES))
        keeping.generate(told(first), max_tokens=1, **knobs)
        warm = keeping.generate(told(second), max_tokens=16, **knobs)
        cold = SpecPrefill(model.draft, TorchTarget(loaded, KEPT_BYTES)).generate(
            told(second), max_tokens=16, **knobs
        )
        if warm.text != cold.text or warm.plan.reason.value != "pruned":
            raise DraftFailed(f"{warm.plan.reason.value}: {warm.text!r}, {cold.text!r}")
        runs.append((warm, cold))
        _say(f"known system prompt, round {i + 1}: {warm.ttft_s:.2f} s, cold {cold.ttft_s:.2f} s")
    warm, cold = runs[0]
    return {
        "head_tokens": warm.plan.head,
        "prompt_tokens": warm.plan.prompt_tokens,
        "kept_tokens": int(warm.plan.input_ids.size),
        "warm_ttft_s": statistics.median(w.ttft_s for w, _ in runs),
        "cold_ttft_s": statistics.median(c.ttft_s for _, c in runs),
        "warm_share": statistics.median(w.ttft_s / c.ttft_s for w, c in runs),
        "warm_stages": warm.stages,
        "cold_stages": cold.stages,
    }


def _planning(model: SpecPrefill, tokens: int, rounds: int) -> dict[str, Any]:
    """Processor seconds of selecting from a long prompt, scores given, and of its plan."""
    prose, tokenizer = haystack(), model.target.tokenizer
    share = len(encode(tokenizer, prose[:100_000], special=False)) / 100_000
    text = (prose * (1 + int(tokens / share) // len(prose)))[: int(tokens / share)]
    prompt = prepare(text, target_tokenizer=tokenizer, settings=Settings(keep_rate=0.1))
    scores = np.random.default_rng(0).random(len(prompt.draft), dtype=np.float32)
    seconds = []
    for _ in range(rounds):
        begin = time.process_time()
        kept = select(prompt, Importance(scores, 1, 1, (0,)))
        make_plan(prompt, kept, "original")
        seconds.append(time.process_time() - begin)
    return {"tokens": len(prompt.draft), "seconds": statistics.median(seconds)}


def _matrix_rate(config: Any, dtype: torch.dtype) -> float:
    """Operations a second of one product of a layer's sizes, the best of ten."""
    rows = torch.randn(1024, config.hidden_size, dtype=dtype)
    inner = config.intermediate_size
    weight = torch.randn(inner, config.hidden_size, dtype=dtype)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        torch.nn.functional.linear(rows, weight)
        seconds.append(time.perf_counter() - started)
    return 2.0 * rows.numel() * inner / min(seconds)


def _alone(draft: str, dtype: str, tokens: int, what: str, rounds: int = 1) -> dict[str, float]:
    """Time and memory of a prefill or of scoring, in a process of its own; of loading for `load`.

    loaded_mib: resident memory before. peak_mib: the most of it from then on.
    """
    _say(f"{what} at {tokens} tokens, alone")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "perf.bench", "--peak", what),
            *("--draft", draft, "--dtype", dtype, "--memory-tokens", str(tokens)),
            *("--rounds", str(rounds)),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _peak(draft: str, dtype: str, tokens: int, what: str, rounds: int) -> dict[str, float]:
    model = load_model(draft, dtype)
    scorer = TorchDraft(model)
    ids = encode(model.tokenizer, haystack()[: tokens * 8], special=True).ids[:tokens]
    seconds = []
    loaded = _resident()
    for _ in range(rounds):
        started = time.perf_counter()
        if what in DRAFTS:
            scorer.score(ids, Settings.of(**DRAFTS[what]))
        elif what == "prefill":
            _prefill(model, ids)
        seconds.append(time.perf_counter() - started)
    return {
        "tokens": len(ids),
        "seconds": statistics.median(seconds),
        "loaded_mib": loaded["VmRSS"],
        "peak_mib": _resident()["VmHWM"],
    }


def _resident() -> dict[str, float]:
    """Resident memory of this process now, and its peak since this was last asked, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {name: line.split() for line in lines for name in ("VmRSS", "VmHWM") if name in line}
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    return {name: int(words[1]) / 1024 for name, words in found.items()}


def _prefill(model: Model, ids: Any) -> None:
    with torch.inference_mode():
        positions = torch.arange(ids.size)
        last_logits(model, torch.from_numpy(ids.astype(np.int64)), positions, new_cache(model))


if __name__ == "__main__":
    run_app(app)
