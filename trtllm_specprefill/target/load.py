"""One door to every kind of target, for whoever reads settings from a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from trtllm_specprefill.errors import InputError
from trtllm_specprefill.fetch import Progress
from trtllm_specprefill.models import engine_model, load_model, local_fingerprint
from trtllm_specprefill.target.base import Target
from trtllm_specprefill.target.evidence import FOLDER, evidence_for
from trtllm_specprefill.target.manifest import Manifest
from trtllm_specprefill.target.trtllm_executor import ExecutorTarget
from trtllm_specprefill.target.trtllm_llm import LLMTarget

TargetKind = Literal["torch", "trtllm_executor", "trtllm_llm", "endpoint"]


def load_target(
    kind: str,
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    url: str = "",
    served_name: str = "",
    as_text: bool = False,
    context_tokens: int | None = None,
    block_reuse: bool = False,
    kv_cache_tokens: int | None = None,
    cache_mib: int = 0,
    timeout_s: float = 600.0,
    progress: Progress | None = None,
) -> Target:
    """A target that is ready to answer; how it treats positions has been found out.

    Args:
        kind: `torch`; `trtllm_executor` or `trtllm_llm`, an engine made by `engine_build`;
            `endpoint`, any server that runs the model unchanged.
        model: a model as `load_model` takes it; for an engine its folder; for an endpoint the
            model whose tokenizer and config the server uses.
        dtype, device: of `torch`.
        url: of an endpoint, as `endpoint.connect` takes it.
        served_name: what an endpoint calls the model; `model` when empty.
        as_text: send an endpoint the prompt as text; for servers that take no token ids.
        context_tokens: positions of an endpoint, where it has fewer than its model.
        block_reuse: of an engine: keep KV blocks, prompts with gaps under salts of their own.
        kv_cache_tokens: of an engine: what its KV cache holds; None for all there is room for.
        cache_mib: of `torch`: mebibytes of keys and values of heads kept between prompts, see
            `PrunePlan.head`.
        timeout_s: of engines and endpoints: longest wait for the next token.
        progress: told, in a line each, of anything that takes long.

    Raises:
        InputError: names the argument, the value and what is allowed.
        TargetFailed: an engine did not start, or the check of its positions failed to run.
    """
    if kind not in get_args(TargetKind):
        raise InputError("target", kind, "one of " + ", ".join(get_args(TargetKind)))
    if kind == "torch":
        from trtllm_specprefill.target.torch import TorchTarget

        return TorchTarget(load_model(model, dtype, device, progress), cache_mib << 20)
    if kind == "endpoint":
        from trtllm_specprefill.target.endpoint import EndpointTarget, connect

        connection = connect(url, served_name or model, timeout_s, as_text=as_text)
        evidence = evidence_for(local_fingerprint(model, progress))
        return EndpointTarget(connection, engine_model(model, progress), context_tokens, evidence)
    manifest = Manifest.read(model)
    place = manifest.described_in(model)
    weights = manifest.fingerprint or local_fingerprint(place, progress)
    made = ExecutorTarget if kind == "trtllm_executor" else LLMTarget
    return made(
        model,
        replace(engine_model(place, progress), name=manifest.model),
        manifest,
        evidence=evidence_for(weights, Path(model) / FOLDER),
        block_reuse=block_reuse,
        kv_cache_tokens=kv_cache_tokens,
        timeout_s=timeout_s,
    )


def source_model(kind: TargetKind, model: str) -> str:
    """Where the tokenizer and the config of a target are, as `load_config` takes it.

    Raises `InputError` for a folder that holds no engine.
    """
    return Manifest.read(model).described_in(model) if kind.startswith("trtllm") else model
