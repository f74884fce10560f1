"""`specprefill serve` and `specprefill client`."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from trtllm_specprefill.errors import InputError, SpecPrefillError, given_as

SERVE_EXAMPLE = "Example: specprefill serve --draft smollm2-135m --target smollm2-135m"
CLIENT_EXAMPLE = "Example: specprefill client --context report.txt --question 'Who signed it?'"


def serve(
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Settings of the server, as YAML.")
    ] = None,
    draft: Annotated[str | None, typer.Option(metavar="MODEL", help="Draft model.")] = None,
    target: Annotated[str | None, typer.Option(metavar="MODEL", help="Target model.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    http_port: Annotated[int | None, typer.Option(help="8000; 0 takes a free one.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="8001; 0 takes a free one.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="8002; 0 takes a free one.")] = None,
    repository: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where the model repository is written; kept afterwards."),
    ] = None,
    triton_option: Annotated[
        list[str] | None, typer.Option(help="Handed to tritonserver as it is; may be repeated.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="Ranks of the target's engine; as it was built when absent.")
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="HOST,...", help="Where the ranks run, as many on each; here if not."),
    ] = None,
    launcher: Annotated[
        str, typer.Option(help="What starts the ranks: mpirun or srun.")
    ] = "mpirun",
    gpu: Annotated[
        str | None,
        typer.Option(help="Whose memory to plan with: a100-80gb, h100, h200, l40s; this one's."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the repository and print what runs where.")
    ] = False,
) -> None:
    """Serve draft and target behind Triton Inference Server."""
    from trtllm_specprefill.serving.launch import Server, launch_of, with_free_ports
    from trtllm_specprefill.serving.ranks import budget_of, gpu_memory_of, world_of
    from trtllm_specprefill.serving.repository import render
    from trtllm_specprefill.serving.settings import ServeSettings

    settings = ServeSettings() if config is None else ServeSettings.read(Path(config))
    values = settings.model_dump(exclude_unset=True)
    for part, name, value in (
        ("draft", "model", draft),
        ("target", "model", target),
        ("ports", "host", host),
        ("ports", "http", http_port),
        ("ports", "grpc", grpc_port),
        ("ports", "metrics", metrics_port),
    ):
        if value is not None:
            values.setdefault(part, {})[name] = value
    settings = ServeSettings.of(values)
    _check_host(settings.ports.host)
    settings = with_free_ports(settings)
    settings.check_positions()
    check_models(settings)
    world = world_of(settings, world_size, nodes.split(",") if nodes else (), launcher)
    memory = gpu_memory_of(gpu)
    budget = None if memory is None else budget_of(settings, world, memory)
    if budget is not None:
        target_settings = settings.target.model_copy(
            update={"kv_cache_tokens": settings.target.kv_cache_tokens or budget.kv_tokens}
        )
        settings = settings.model_copy(update={"target": target_settings})
    kept = repository is not None or dry_run
    folder = Path(repository) if repository else Path(tempfile.mkdtemp(prefix="specprefill-"))
    try:
        try:
            rendered = render(settings, folder)
        except OSError as error:
            allowed = f"a folder to write to ({error.strerror})"
            raise InputError("repository", str(folder), allowed) from None
        launch = launch_of(settings, rendered, triton_option or (), _say, world)
        if dry_run:
            if not repository:
                _say(f"the repository is in {folder}")
            placed = launch.ranks if world.size > 1 else ()
            said = [*(rank.line() for rank in placed), *(budget.lines() if budget else ())]
            print("\n".join([*(f"# {line}" for line in said), launch.line()]))
            return
        _fetch(settings)
        ports = settings.ports
        signal.signal(signal.SIGTERM, _interrupt)
        with Server(launch, ports, folder) as server:
            try:
                server.wait_ready(_say)
                print(f"http    http://{ports.host}:{ports.http}/v2/models/specprefill/generate")
                print(f"grpc    {ports.host}:{ports.grpc}  models specprefill, specprefill_infer")
                print(f"metrics http://{ports.host}:{ports.metrics}/metrics", flush=True)
                status = server.wait()
            except KeyboardInterrupt:
                _say("stopping")
                return
        raise SpecPrefillError(f"tritonserver ended with status {status}")
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def client(
    prompt: Annotated[
        str | None, typer.Option(metavar="FILE", help="A text to complete; - is stdin.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(metavar="FILE", help="A text to ask --question about.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="Asked about --context.")] = None,
    messages: Annotated[
        str | None, typer.Option(metavar="FILE", help="Chat messages as JSON.")
    ] = None,
    url: Annotated[str, typer.Option(help="host:port of the gRPC endpoint.")] = "127.0.0.1:8001",
    keep: Annotated[float | None, typer.Option(help="Share of the prompt to keep.")] = None,
    setting: Annotated[
        str | None, typer.Option("--specprefill", metavar="JSON", help="Settings, or off.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Text and report as one JSON object.")
    ] = False,
) -> None:
    """Send one prompt to a running server and stream the answer."""
    from trtllm_specprefill.prompt import read_input
    from trtllm_specprefill.serving.client import check_url, stream
    from trtllm_specprefill.settings import Settings

    sources = {"--prompt": prompt, "--context": context, "--messages": messages}
    given = {field: name for field, name in sources.items() if name is not None}
    if len(given) != 1:
        allowed = "one of --prompt, --messages, or --context with --question"
        raise InputError("prompt", " and ".join(given) or None, allowed)
    if (context is None) != (question is None):
        raise InputError("--question", question, "a text, together with --context")
    if question is not None and not question.strip():
        raise InputError("--question", question, "a text that is not empty")
    ((field, name),) = given.items()
    text = read_input(field, name)
    if context is not None:
        text = json.dumps([{"role": "user", "content": f"{text}\n\n{question}"}])
    check_url("--url", url)
    if keep is not None and setting is not None:
        raise InputError("--keep", keep, "only one of --keep and --specprefill")
    if keep is not None:
        Settings.of(keep_rate=keep)
    values: dict[str, Any] = {
        "text_input" if prompt is not None else "messages": text,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stop": stop or None,
        "specprefill": setting if keep is None else {"keep": keep},
    }
    texts: list[str] = []
    report: dict[str, Any] | None = None
    for piece, told in stream(url, values):
        texts.append(piece)
        report = told or report
        if not as_json:
            print(piece, end="", flush=True)
    if as_json:
        print(json.dumps({"text": "".join(texts), **(report or {})}, ensure_ascii=False))
    elif report is not None:
        print()
        _say(
            f"{report['reason']}: {report['kept_tokens']} of {report['prompt_tokens']} tokens"
            f" read, TTFT {report['ttft_s']:.2f} s"
        )


def _check_host(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise InputError("ports.host", host, f"a name or address ({error.strerror})") from None


def check_models(settings: Any) -> None:
    """Raise `InputError` for a model that is neither here nor one to be fetched."""
    from trtllm_specprefill.fetch import DEMO_MODELS
    from trtllm_specprefill.models import load_config

    named = {"draft.model": settings.draft.model}
    if not settings.target.backend.startswith("trtllm"):
        named["target.model"] = settings.target.model
    for field, model in named.items():
        if model not in DEMO_MODELS and ("/" not in model or Path(model).exists()):
            with given_as(model=field):
                load_config(model)
            if field == "draft.model":
                check_layers(settings)


def check_layers(settings: Any) -> None:
    """Raise `InputError` unless the draft loads as many layers as the settings in force run."""
    if settings.draft.layers is None:
        return
    from trtllm_specprefill.serving.orchestrator import RemoteDraft

    draft = RemoteDraft(settings.draft.model, lambda _: {}, lambda *_: {}, settings.limits)
    most, asked = int(draft.config.num_hidden_layers), settings.settings.in_force()
    least = most if asked.scoring == "lookahead" else draft.depth(asked)
    if not least <= settings.draft.layers <= most:
        allowed = f"{least} to {most}: so many are run, and so many {draft.name} has"
        raise InputError("draft.layers", settings.draft.layers, allowed)


def _fetch(settings: Any) -> None:
    """Fetch and convert the models before the server starts: it has no progress line."""
    from trtllm_specprefill.models import load_config
    from trtllm_specprefill.target.load import source_model

    target = source_model(settings.target.backend, settings.target.model)
    for field, model in (("draft.model", settings.draft.model), ("target.model", target)):
        with given_as(model=field):
            load_config(model, _say)
    check_layers(settings)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _interrupt(number: int, frame: Any) -> None:
    del number, frame
    raise KeyboardInterrupt
