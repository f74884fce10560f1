"""How long a draft's engine takes to build, by stage, and how large it is.

Seconds are what a clock shows; those of the processor do not depend on what else it does.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from engine_build.choices import DraftBuild
from engine_build.draft import build_draft
from trtllm_specprefill.endings import run_app
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.evaluation.report import check_out, command, machine
from trtllm_specprefill.prompt import read_text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_screen = Console(stderr=True, highlight=False)


@app.command(epilog="Example: python -m perf.engines window:8:bf16 window:8:fp8 --sm 89 --sm 120")
def engines(
    builds: Annotated[list[str], typer.Argument(metavar="MODE:LAYERS:PRECISION...")],
    model: Annotated[str, typer.Option(help="The draft.")] = "smollm2-135m",
    runtime: Annotated[str, typer.Option(help="As for `engine_build draft`.")] = "tensorrt-rtx",
    max_tokens: Annotated[int, typer.Option(help="Longest sequence.")] = 8192,
    max_batch: Annotated[int, typer.Option(help="Most sequences at a time.")] = 4,
    sm: Annotated[list[int] | None, typer.Option(help="Capability; repeatable.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The report, written after every build; what else it holds is kept."),
    ] = None,
) -> None:
    """Build each in an empty folder."""
    report: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "max_batch": max_batch}
    kept: dict[str, Any] | None = {}
    check_out(out)
    if out is not None and out.is_file():
        try:
            earlier = json.loads(read_text("out", out))
            kept = earlier["builds"] if report.items() <= earlier.items() else None
        except (json.JSONDecodeError, AttributeError, KeyError):
            kept = None
        if kept is None:
            raise InputError("out", str(out), f"a report of {report}, or none")
    for spec in builds:
        mode, layers, precision = _parsed(spec)
        with tempfile.TemporaryDirectory() as folder:
            build = DraftBuild(
                model,
                Path(folder) / "engine",
                runtime=runtime,  # type: ignore[arg-type]
                precision=precision,
                mode=mode,
                layers=layers,
                max_tokens=max_tokens,
                max_batch=max_batch,
                sm=tuple(sm or ()),
            )
            before = time.process_time()
            built = build_draft(build, lambda line: None)
        kept[spec] = {
            "command": command(),
            "machine": machine(),
            "sm": built.manifest.sm,
            "scoring_heads": built.manifest.heads,
            "versions": built.manifest.versions,
            "seconds": built.seconds,
            "processor_seconds": round(time.process_time() - before, 1),
            "megabytes": {name: round(size / 1e6, 1) for name, size in built.bytes.items()},
        }
        report["builds"] = kept
        _screen.print(f"{spec}: {kept[spec]['seconds']}, {kept[spec]['megabytes']}")
        if out is not None:
            out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def _parsed(spec: str) -> tuple[Any, int, Any]:
    parts = spec.split(":")
    if len(parts) != 3 or not parts[1].isdigit():
        raise InputError("builds", spec, "MODE:LAYERS:PRECISION, such as window:8:fp8")
    return parts[0], int(parts[1]), parts[2]


if __name__ == "__main__":
    run_app(app)
