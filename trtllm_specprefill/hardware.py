"""Which device and which dtype a person's `auto` means on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from trtllm_specprefill.errors import InputError
from trtllm_specprefill.fetch import cache_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(device: str) -> torch.device:
    """What `auto`, `cpu`, `cuda` or `cuda:N` means here; `auto` is the GPU if torch sees one.

    Raises:
        InputError: `device` is none of these, or torch does not see that GPU.
    """
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return torch.device("cuda" if cuda else "cpu")
    if device == "cpu" or (device == "cuda" and cuda):
        return torch.device(device)
    numbered = re.fullmatch(r"cuda:(\d+)", str(device))
    if numbered and int(numbered[1]) < cuda:
        return torch.device("cuda", int(numbered[1]))
    seen = f"cuda, cuda:0 to cuda:{cuda - 1}" if cuda else "no cuda: torch sees no GPU here"
    raise InputError("device", device, f"auto, cpu ({seen})")


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """What `auto`, `float32`, `bfloat16` or `float16` means on `device`.

    `auto` on a GPU is bfloat16 where the hardware has it, else float16; on a CPU whichever
    of float32 and bfloat16 is faster, measured once per machine (under a second).

    Raises:
        InputError: `dtype` is none of these.
    """
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise InputError("dtype", dtype, ", ".join(["auto", *DTYPES]))
    if device.type == "cuda":
        # Older cards only emulate bfloat16.
        modern = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if modern else torch.float16
    return DTYPES[_faster_cpu_dtype(cache_folder() / "cpu_dtype.json")]


def _faster_cpu_dtype(memory: Path) -> str:
    """`float32` or `bfloat16`, measured once for each CPU and torch and remembered."""
    machine = f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    try:
        known = json.loads(memory.read_text())
        if known[machine] in DTYPES:
            return str(known[machine])
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    seconds = _seconds_by_dtype()
    # Rounding costs accuracy, so it has to buy something.
    name = "bfloat16" if seconds["bfloat16"] < 0.8 * seconds["float32"] else "float32"
    with contextlib.suppress(OSError):  # a read-only cache: measure again next time
        memory.parent.mkdir(parents=True, exist_ok=True)
        fresh = memory.with_name(f"{memory.name}.{os.getpid()}")
        fresh.write_text(json.dumps({**known, machine: name}, indent=1))
        os.replace(fresh, memory)
    return name


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def _seconds_by_dtype() -> dict[str, float]:
    """Median time of one MLP projection and one attention call, the dtypes taking turns."""
    work: dict[str, Callable[[], object]] = {
        name: _layer_work(DTYPES[name]) for name in ("float32", "bfloat16")
    }
    samples: dict[str, list[float]] = {name: [] for name in work}
    started = time.perf_counter()
    for turn in range(6):
        for name, run in work.items():
            before = time.perf_counter()
            run()
            if turn > 0:  # the first is the warm-up
                samples[name].append(time.perf_counter() - before)
        if turn > 0 and time.perf_counter() - started > 0.6:
            break
    return {name: statistics.median(times) for name, times in samples.items()}


def _layer_work(kind: torch.dtype) -> Callable[[], object]:
    tokens, hidden, inner, heads, width = 128, 1024, 2816, 8, 64
    x, w = torch.randn(tokens, hidden, dtype=kind), torch.randn(inner, hidden, dtype=kind)
    q = torch.randn(1, heads, tokens, width, dtype=kind)

    def run() -> object:
        with torch.inference_mode():
            return (
                functional.linear(x, w),
                functional.scaled_dot_product_attention(q, q, q, is_causal=True),
            )

    return run
