"""A server to measure, prompts to send it, and what a keep rate means there."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtllm_specprefill.errors import InputError
from trtllm_specprefill.evaluation.haystack import haystack
from trtllm_specprefill.evaluation.needle import Case, cases
from trtllm_specprefill.fetch import Progress
from trtllm_specprefill.prompt import ask
from trtllm_specprefill.serving.client import check_url, server_facts
from trtllm_specprefill.serving.commands import check_models
from trtllm_specprefill.serving.launch import Server, launch_of, with_free_ports
from trtllm_specprefill.serving.repository import render
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.settings import Settings

OFF = "off"  # the keep rate of prompts that are answered in full


@contextmanager
def running(url: str | None, config: Path | None, progress: Progress) -> Iterator[str]:
    """The gRPC address of a running server, or of one that is started and stopped here.

    url: host:port. config: settings of a server to start, the defaults when None. Its ports are
    free ones, and its models keep nothing between requests: prompts are sent more than once.
    Raises `InputError` when both are given, or a model of the running server keeps something.
    """
    if url is not None:
        if config is not None:
            raise InputError("--config", str(config), "no --config with --url: that server runs")
        check_url("--url", url)
        served, _ = server_facts(url)
        own = served.target.cache_mib if served.target.backend == "torch" else 0
        for name, keeps in (("draft", served.draft.cache_mib), ("target", own)):
            if keeps:
                raise InputError(f"{name}.cache_mib", keeps, "0: known prompts would not be read")
        yield url
        return
    settings = ServeSettings() if config is None else ServeSettings.read(config)
    check_models(settings)
    free = settings.ports.model_copy(update={"http": 0, "grpc": 0, "metrics": 0})
    forgetful: dict[str, Any] = {"draft": settings.draft.model_copy(update={"cache_mib": 0})}
    if settings.target.backend == "torch":  # no other target keeps anything here
        forgetful["target"] = settings.target.model_copy(update={"cache_mib": 0})
    settings = with_free_ports(settings.model_copy(update={"ports": free, **forgetful}))
    folder = Path(tempfile.mkdtemp(prefix="specprefill-"))  # short: it holds sockets
    try:
        launch = launch_of(settings, render(settings, folder), (), progress)
        with Server(launch, settings.ports, folder) as server:
            server.wait_ready(progress)
            yield f"{settings.ports.host}:{settings.ports.grpc}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prompts(
    tokenizer: Any, tokens: list[int], count: int, seed: int
) -> dict[int, list[tuple[Case, dict[str, str]]]]:
    """For each length so many prompts with a planted fact, as values of the server's inputs."""
    asked: dict[int, list[tuple[Case, dict[str, str]]]] = {length: [] for length in tokens}
    for case in cases(haystack(), tokenizer, tokens, [count] * len(tokens), seed):
        source = ask(case.context, case.question, tokenizer)
        text = isinstance(source, str)
        values = {"text_input": source} if text else {"messages": json.dumps(source)}
        asked[case.tokens].append((case, values))
    return asked


def knobs(keep: str, positions: str) -> dict[str, Any]:
    """Settings of a request: a keep rate and nothing beside it that decides how much is kept.

    Raises `InputError` for a keep rate that is neither a number above 0 and up to 1 nor `off`.
    """
    Settings.of(positions=positions)
    if keep == OFF:
        return {"enabled": False}
    try:
        rate = float(keep)
    except ValueError:
        raise InputError("--keep", keep, "a keep rate above 0 and up to 1, or off") from None
    Settings.of(keep_rate=rate)
    return {"keep": rate, "threshold": 0, "min_keep_tokens": 0, "positions": positions}
