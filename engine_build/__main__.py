"""`python -m engine_build`: one thin layer over the builds."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from engine_build.commands import run_all
from trtllm_specprefill.draft.manifest import MANIFEST, Mode, Precision, Runtime, Scorer
from trtllm_specprefill.endings import run_app
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.models import load_config

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Build the models that are served.",
)

MODEL_HELP = "A directory in Hugging Face format, a .gguf file, a hub id, or a demo alias."


def _one_of(choices: Any) -> str:
    return " or ".join(get_args(choices)).replace(" or ", ", ", len(get_args(choices)) - 2)


def _chosen(name: str, value: str, choices: Any) -> Any:
    """`value` where it is one of the literal type's; `InputError` else."""
    if value not in get_args(choices):
        raise InputError(name, value, _one_of(choices))
    return value


Engine_ = Annotated[Path, typer.Option(help="Folder of a built target.")]


@app.callback()
def _commands() -> None:
    """Build the models that are served."""


@app.command()
def target(
    model: Annotated[str, typer.Option(help="Directory of a model in Hugging Face format.")],
    out: Annotated[Path, typer.Option(help="Where the engine goes.")],
    backend: Annotated[str, typer.Option(help="tensorrt or pytorch.")] = "tensorrt",
    precision: Annotated[str, typer.Option(help="fp8 or bf16.")] = "fp8",
    tp: Annotated[int, typer.Option(help="GPUs that share each layer.")] = 1,
    pp: Annotated[int, typer.Option(help="Stages of layers, each on tp GPUs.")] = 1,
    kept: Annotated[int, typer.Option(help="Longest prompt that is read, in tokens.")] = 40_960,
    prompt: Annotated[
        int | None,
        typer.Option(help="Longest prompt asked; as the model's positions allow when absent."),
    ] = None,
    output: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 2048,
    batch_size: Annotated[int, typer.Option(help="Most requests at a time.")] = 16,
    chunk: Annotated[int, typer.Option(help="Most tokens of one engine step.")] = 8192,
    examples: Annotated[
        str, typer.Option(help="TensorRT-LLM's folder examples, of the same version.")
    ] = "/app/tensorrt_llm/examples",
    calibration: Annotated[
        str, typer.Option(help="Data set for FP8: a hub id or a directory.")
    ] = "cnn_dailymail",
    record_probes: Annotated[
        bool, typer.Option("--record-probes", help="Let torch answer the start-up probes.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands and the manifest; run nothing.")
    ] = False,
) -> None:
    """Build a target for TensorRT-LLM: quantise, make the checkpoint, build the engine."""
    from engine_build.target import TargetBuild
    from trtllm_specprefill.target import manifest as target_manifest

    if backend not in ("tensorrt", "pytorch"):
        raise InputError("backend", backend, "tensorrt or pytorch")
    if precision not in ("fp8", "bf16"):
        raise InputError("precision", precision, "fp8 or bf16")
    config = load_config(model)
    build = TargetBuild(
        model=model,
        out=out,
        backend="tensorrt" if backend == "tensorrt" else "pytorch",
        precision="fp8" if precision == "fp8" else "bf16",
        tensor_parallel=tp,
        pipeline_parallel=pp,
        kept=kept,
        prompt=int(config.max_position_embeddings) - output if prompt is None else prompt,
        output=output,
        batch_size=batch_size,
        chunk=chunk,
        examples=examples,
        calibration=calibration,
        record_probes=record_probes,
    )
    build.check(config)
    manifest, commands = build.manifest(config), build.commands(config)
    if not manifest.original_positions:
        print("# this model serves contiguous positions only on the PyTorch backend")
    if dry_run:
        for command in commands:
            print(f"# {command.why}\n{command.shown()}\n")
        print(f"# {out / target_manifest.MANIFEST}\n{manifest.model_dump_json(indent=2)}")
        return
    build.check_examples()
    try:
        out.mkdir(parents=True, exist_ok=True)
        manifest.write(out)
    except OSError as error:
        raise InputError("out", str(out), f"a folder to write to ({error.strerror})") from None
    run_all(commands, print)


@app.command(
    epilog="""Example: python -m engine_build draft --model smollm2-135m --out engines/smollm2
    --runtime tensorrt-rtx --precision fp8 --mode window --max-batch 8"""
)
def draft(
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    out: Annotated[Path, typer.Option(help="Folder of the engine; made, or taken up again.")],
    runtime: Annotated[str, typer.Option(help=_one_of(Runtime))] = "onnx",
    precision: Annotated[str, typer.Option(help=_one_of(Precision))] = "fp8",
    scorer: Annotated[
        str, typer.Option(help=_one_of(Scorer) + "; plugin needs runtime tensorrt.")
    ] = "native",
    mode: Annotated[str, typer.Option(help=_one_of(Mode))] = "window",
    layers: Annotated[
        int | None,
        typer.Option(help="First layers, the only ones run; a quarter, with lookahead all."),
    ] = None,
    heads: Annotated[
        Path | None, typer.Option(help="JSON file: per layer, the query heads that score.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longest sequence; 1024, with lookahead 8192, or the model's positions where"
            " they are fewer."
        ),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Most sequences at a time; 4, with lookahead 1.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="UTF-8 text for FP8; the Debian handbook when absent.")
    ] = None,
    sm: Annotated[
        list[int] | None,
        typer.Option(help="Compute capability, 90 for Hopper; repeatable with tensorrt-rtx."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was built as one JSON object.")
    ] = False,
) -> None:
    """Build a draft that scores: quantise, export, build the engine, record what it must say.

    The same command goes on where an interrupted one ended, and rebuilds only what changed.
    """
    from engine_build.choices import DraftBuild
    from engine_build.draft import build_draft

    build = DraftBuild(
        model=model,
        out=out,
        runtime=_chosen("runtime", runtime, Runtime),
        precision=_chosen("precision", precision, Precision),
        scorer=_chosen("scorer", scorer, Scorer),
        mode=_chosen("mode", mode, Mode),
        layers=layers,
        heads=heads,
        max_tokens=max_tokens,
        max_batch=max_batch,
        calibration=calibration,
        sm=tuple(sm or ()),
    )
    built = build_draft(build, lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps(asdict(built) | {"manifest": built.manifest.model_dump()}, indent=1))
        return
    for name, size in built.bytes.items():
        print(f"{out / name}: {size / 1e6:.1f} MB")
    print(f"{out / MANIFEST}: {built.manifest.mode}, {built.manifest.layers} layers")


@app.command()
def describe(engine: Engine_) -> None:
    """Copy the model's config, tokenizer and measured positions beside the engine."""
    from engine_build.description import describe as write_description

    write_description(engine)


@app.command()
def positions(engine: Engine_) -> None:
    """Write into a checkpoint's config by what it rotates."""
    from engine_build.rotary_config import write_rotation

    write_rotation(engine)


@app.command()
def probes(engine: Engine_) -> None:
    """Let torch answer the probes of the start-up check, into the manifest."""
    from engine_build.probes import record_probes

    record_probes(engine)


if __name__ == "__main__":
    run_app(app)
