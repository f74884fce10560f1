"""What a result was measured on, so that it can be read a year later."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

from trtllm_specprefill.errors import InputError


def machine() -> dict[str, object]:
    """Processor, cores, memory, accelerator and versions, as plain JSON values."""
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "numpy", "tokenizers")},
    }


def command() -> str:
    """The command line that is running, with the module form restored."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        head = f"python -m {program.parent.parent.name}.{program.parent.name}"
    else:
        head = f"python -m perf.{program.stem}" if program.suffix == ".py" else program.name
    return " ".join([head, *sys.argv[1:]])


def check_out(out: Path | None) -> None:
    """Make the folder of a result; raise `InputError` where the file cannot be written.

    For before the measuring: it takes long, and its result should have a place to go.
    """
    if out is None:
        return
    if out.is_dir():
        raise InputError("out", str(out), "a file, not a folder")
    check_folder(out.parent)


def check_folder(out: Path) -> None:
    """Make the folder of results; raise `InputError` where nothing can be written into it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        allowed = f"a place to write to ({error.strerror})"
        raise InputError("out", str(out), allowed) from None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
