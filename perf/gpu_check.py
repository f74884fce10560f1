"""Correctness and time of the importance kernels on one GPU, in one run of under six minutes.

    python perf/gpu_check.py                     # on a machine with a GPU: everything
    TRITON_INTERPRET=1 python perf/gpu_check.py  # without: everything but the timing, small sizes

Needs torch, triton and numpy. Writes `gpu_check.json` into the folder given by `--out` and prints
a table last. Exits with 1 if any check failed. What could not run is written down with the reason:
a run without a GPU holds no time at all.

1. Correctness: the kernels against float64 on fresh random inputs, for every dtype and head size,
   odd shapes, ragged lengths, causal windows and chosen heads; outputs start as NaN.
2. compute-sanitizer, where it is installed: memcheck over small cases.
3. Time by CUDA events, the median over inputs that together exceed L2, so that keys come from
   memory each time: against the byte floor (the bytes that must move, at the copy bandwidth
   measured in the same run) and against the plain torch form on the same GPU.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

BUDGET_SECONDS = 330
TYPES = {
    "fp32": (torch.float32, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
}
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 1e-2, "fp8": 1e-2}
DRAFTS = {  # query heads, key heads, head size
    "Llama-3.2-1B": (32, 8, 64),
    "Llama-3.1-8B": (32, 8, 128),
    "Qwen3-0.6B": (16, 8, 128),
}
LENGTHS = (8_192, 32_768, 131_072)
QUERIES = 8
POOL = 13


@dataclass(frozen=True)
class Case:
    """One layer to score; `lengths` as fractions of `tokens`, `heads` as in `importance_layer`."""

    query_heads: int
    kv_heads: int
    dim: int
    queries: int
    tokens: int
    pool: int = POOL
    causal: bool = False
    lengths: tuple[float, ...] = (1.0,)
    heads: tuple[int, ...] | None = None


SMALL = (
    Case(4, 2, 64, 3, 70, lengths=(1.0, 0.47)),
    Case(3, 1, 80, 1, 33, pool=5, causal=True),
    Case(2, 2, 96, 5, 65, causal=True, lengths=(0.6, 1.0)),
    Case(6, 2, 128, 9, 90, heads=(0, 1, 5)),
    Case(2, 1, 256, 2, 40, lengths=(0.0, 0.9)),
)
LARGE = (
    Case(32, 8, 64, 8, 8_192),
    Case(12, 4, 80, 17, 1_531, causal=True, lengths=(1.0, 0.031, 0.77)),
    Case(8, 8, 96, 64, 2_049, causal=True),
    Case(14, 2, 128, 9, 4_097, heads=(0, 1, 5, 13), lengths=(0.501, 1.0)),
    Case(4, 1, 256, 1, 5_000, lengths=(0.9, 0.0)),
)


def reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    running: torch.Tensor,
    lengths: list[int],
    scale: float,
    pool: int,
    causal: bool,
    heads: tuple[int, ...] | None,
    key_scale: torch.Tensor,
) -> torch.Tensor:
    """The layer in float64 from the definition, whole rows at a time: `[B, W, N]`."""
    (b, query_heads, w, _), (_, kv_heads, n, _) = queries.shape, keys.shape
    chosen = list(range(query_heads) if heads is None else heads)
    kv = [h // (query_heads // kv_heads) for h in chosen]
    out = torch.zeros(b, w, n, dtype=torch.float64, device=queries.device)
    for i in range(b):
        length = lengths[i]
        if not length:
            continue
        for j in range(w):
            seen = length - w + j + 1 if causal else length
            if seen < 1:
                out[i, j, :length] = running[i, j, :length]
                continue
            k = keys[i, kv, :seen].double() * key_scale[kv].double()[:, None, None]
            logits = scale * torch.einsum("hd,hnd->hn", queries[i, chosen, j].double(), k)
            weights = torch.softmax(logits, -1)
            padded = torch.nn.functional.pad(weights, (0, length - seen))
            pooled = torch.nn.functional.avg_pool1d(
                padded, pool, stride=1, padding=pool // 2, count_include_pad=True
            )
            out[i, j, :length] = torch.maximum(running[i, j, :length].double(), pooled.amax(0))
    return out


def inputs_of(
    case: Case, types: str, device: str, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int], torch.Tensor]:
    """Fresh random queries, keys, running maximum, lengths and key scales for a case."""
    generator = torch.Generator(device).manual_seed(seed)
    b, d = len(case.lengths), case.dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    queries = normal(b, case.query_heads, case.queries, d).to(TYPES[types][0])
    keys = normal(b, case.kv_heads, case.tokens, d).to(TYPES[types][1])
    # Around the size of a uniform weight, so that both sides of the maximum win somewhere.
    running = normal(b, case.queries, case.tokens).abs() / case.tokens
    lengths = [round(case.tokens * share) for share in case.lengths]
    key_scale = 0.5 + torch.rand(case.kv_heads, generator=generator, device=device)
    return queries, keys, running, lengths, key_scale


def check_case(case: Case, types: str, device: str, seed: int) -> dict[str, object]:
    """Run both kernels on one case and measure their largest error against float64."""
    from plugins.importance.torch_op import launch, problem_of
    from trtllm_specprefill.importance_op import head_table

    queries, keys, running, lengths, key_scale = inputs_of(case, types, device, seed)
    scale = case.dim**-0.5
    table = torch.tensor(
        head_table(case.query_heads, case.kv_heads, case.heads), dtype=torch.int32, device=device
    )
    problem = problem_of(queries, keys, table, scale, case.pool, case.causal)
    if device == "cpu":  # the interpreter runs one program after the other
        problem = replace(problem, splits=4)
    parts = torch.full(problem.parts_shape(len(lengths), case.queries), float("nan"), device=device)
    out = torch.full_like(running, float("nan"))
    sizes = torch.tensor(lengths, dtype=torch.int32, device=device)
    launch(problem, queries, keys, sizes, table, key_scale, running, parts, out)
    expected = reference(
        queries, keys, running, lengths, scale, case.pool, case.causal, case.heads, key_scale
    )
    unwritten = int(out.isnan().sum() + parts.isnan().sum())
    error = float(((out.double() - expected).abs() / expected.clamp(min=1e-30)).max())
    return {
        "check": "correctness",
        "types": types,
        "case": asdict(case),
        "relative_error": error,
        "unwritten": unwritten,
        "passed": unwritten == 0 and error <= TOLERANCE[types],
    }


def sanitize(tool: str) -> dict[str, object]:
    """Run the small cases under compute-sanitizer's memcheck, in a process of its own."""
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__]
    command += ["--only-small-cases"]
    # Each allocation on its own, so that a stray access is not inside a neighbour's memory.
    environment = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=90, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {"check": "memcheck", "passed": None, "reason": "stopped after 90 s"}
    return {
        "check": "memcheck",
        "passed": done.returncode == 0,
        "summary": (done.stdout + done.stderr).strip().splitlines()[-3:],
    }


def median_milliseconds(calls: list, repeats: int) -> float:
    """Median time of the calls by CUDA events, taken in turn after one untimed round.

    Each call is queued behind a pause of about a millisecond, so that the events see the GPU's
    time and not Python's.
    """
    for call in calls:
        call()
    times = []
    for i in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        start.record()
        calls[i % len(calls)]()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a device-to-device copy of 2 GiB."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_milliseconds([lambda: target.copy_(source)], 10) * 1e3


def time_layer(name: str, types: str, tokens: int, bandwidth: float) -> dict[str, object]:
    """Time one layer of a draft: the op, the byte floor, and the plain torch form."""
    from plugins.importance.torch_op import problem_of
    from trtllm_specprefill.importance_op import head_table, plain_layer

    query_heads, kv_heads, dim = DRAFTS[name]
    case = Case(query_heads, kv_heads, dim, QUERIES, tokens)
    table = torch.tensor(head_table(query_heads, kv_heads), dtype=torch.int32, device="cuda")
    lengths = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    scale = dim**-0.5
    problem = problem_of(*inputs_of(case, types, "cuda", 0)[:2], table, scale, POOL, False)
    floor_bytes = problem.bytes_floor(1, QUERIES, tokens)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    # Half the floor is one reading of the keys; the sets together are three times L2.
    sets = max(2, math.ceil(3 * l2_bytes / (floor_bytes / 2)))
    arguments = []
    for seed in range(sets):
        queries, keys, running, _, key_scale = inputs_of(case, types, "cuda", seed)
        arguments.append((queries, keys, lengths, table, key_scale, running, scale, POOL, False))

    def call(form, values):  # bind now, run later
        return lambda: form(*values)

    op = torch.ops.specprefill.importance_layer
    kernel = median_milliseconds([call(op, values) for values in arguments], max(50, sets))
    plain = median_milliseconds([call(plain_layer, values) for values in arguments[:2]], 4)
    floor = floor_bytes / bandwidth * 1e3
    return {
        "check": "time",
        "draft": name,
        "types": types,
        "tokens": tokens,
        "queries": QUERIES,
        "milliseconds": kernel,
        "floor_milliseconds": floor,
        "share_of_floor": floor / kernel,
        "plain_milliseconds": plain,
        "times_plain": plain / kernel,
        "tflops": problem.flops(1, QUERIES, tokens) / kernel / 1e9,
    }


def run(device: str, small_only: bool) -> dict[str, object]:
    """All checks that this machine can do, in order, inside the budget."""
    started = time.monotonic()
    results: list[dict[str, object]] = []
    skipped: list[str] = []
    cases = SMALL if small_only or device == "cpu" else SMALL + LARGE
    for i, case in enumerate(cases):
        results += [check_case(case, types, device, seed=1000 + i) for types in TYPES]
    if device == "cpu":
        skipped.append("compute-sanitizer and all times: no GPU here")
    elif not small_only:
        tool = shutil.which("compute-sanitizer")
        if tool is None:
            skipped.append("compute-sanitizer: not installed")
        else:
            results.append(sanitize(tool))
        bandwidth = copy_bandwidth()
        results.append({"check": "copy", "bytes_per_second": bandwidth, "passed": None})
        for types in ("bf16", "fp8"):
            for name in DRAFTS:
                for tokens in reversed(LENGTHS):
                    if time.monotonic() - started > BUDGET_SECONDS - 20:
                        skipped.append(f"time of {name} {types} N={tokens}: out of time")
                        continue
                    results.append(time_layer(name, types, tokens, bandwidth))
    import triton

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu (interpreter)",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "seconds": round(time.monotonic() - started, 1),
        "skipped": skipped,
        "results": results,
    }


def table_of(report: dict) -> str:
    """The report as a short table, failures in full."""
    results = report["results"]
    checks = [r for r in results if r["check"] == "correctness"]
    lines = [f"{report['device']}, torch {report['torch']}, triton {report['triton']}"]
    for types in TYPES:
        errors = [r["relative_error"] for r in checks if r["types"] == types]
        passed = sum(r["passed"] for r in checks if r["types"] == types)
        lines.append(
            f"{types:5} {passed}/{len(errors)} cases, largest relative error {max(errors):.1e} "
            f"(limit {TOLERANCE[types]:.0e})"
        )
    lines += [f"memcheck: {r}" for r in results if r["check"] == "memcheck"]
    lines += [f"FAILED: {r}" for r in checks if not r["passed"]]
    times = [r for r in results if r["check"] == "time"]
    if times:
        lines.append(f"{'draft':14} {'keys':5} {'N':>7} {'ms':>8} {'of floor':>9} {'x plain':>8}")
    for r in times:
        lines.append(
            f"{r['draft']:14} {r['types']:5} {r['tokens']:7} {r['milliseconds']:8.3f} "
            f"{r['share_of_floor']:9.0%} {r['times_plain']:8.1f}"
        )
    lines += [f"not run: {reason}" for reason in report["skipped"]]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only-small-cases", action="store_true", help="write no file")
    chosen = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("no GPU here: set TRITON_INTERPRET=1 to run the kernels in the interpreter")
    report = run(device, chosen.only_small_cases)
    if not chosen.only_small_cases:
        chosen.out.mkdir(parents=True, exist_ok=True)
        path = chosen.out / "gpu_check.json"
        path.write_text(json.dumps(report, indent=2) + "\n")
    print(table_of(report))
    return int(any(r.get("passed") is False for r in report["results"]))


if __name__ == "__main__":
    sys.exit(main())
