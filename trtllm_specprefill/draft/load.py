"""One door to every kind of draft, for whoever reads settings from a file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.cache import remembering
from trtllm_specprefill.draft.base import Draft
from trtllm_specprefill.draft.manifest import DraftManifest
from trtllm_specprefill.errors import DraftFailed, InputError, SpecPrefillError
from trtllm_specprefill.fetch import Progress
from trtllm_specprefill.importance import Importance
from trtllm_specprefill.models import EngineModel, engine_model, load_model, local_fingerprint
from trtllm_specprefill.settings import Settings

DraftKind = Literal["torch", "onnx", "tensorrt"]
DraftFallback = Literal["torch", "dense", "none"]
_log = logging.getLogger(__name__)


def load_draft(
    kind: str,
    model: str = "",
    *,
    path: str = "",
    fallback: str = "none",
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    layers: int | None = None,
    cache_mib: int = 0,
    progress: Progress | None = None,
) -> Draft:
    """A draft that is ready to score; one that was built ahead has reproduced its probe.

    Args:
        kind: `torch`; `onnx` or `tensorrt`, what `python -m engine_build draft` made.
        model: a model as `load_model` takes it; for an engine the one it was built from, whose
            tokenizer and config it has. Empty: the one that the engine names.
        path: folder of an engine.
        fallback: for an engine that cannot be used: `torch` takes the model itself, `dense` a
            draft that fails every time, so that prompts are read in full, `none` raises.
        dtype: of `torch`. device: where it runs.
        threads: of an engine on a CPU; all cores when None.
        layers: of `torch`: load only so many of the first, see `load_model`.
        cache_mib: mebibytes of what is kept between prompts, see `cache`: of `torch` the keys and
            values of windows, and of every kind scores, at most a sixteenth of it.
        progress: told, in a line each, of anything that takes long, and of a fallback.

    Raises:
        InputError: names the argument, or the manifest's field, the value and what is allowed.
        SpecPrefillError: the engine's runtime is not installed.
    """
    if kind not in get_args(DraftKind):
        raise InputError("draft", kind, "one of " + ", ".join(get_args(DraftKind)))
    if fallback not in get_args(DraftFallback):
        raise InputError("fallback", fallback, "one of " + ", ".join(get_args(DraftFallback)))
    keep = cache_mib << 20

    def torch_draft(name: str) -> Draft:
        from trtllm_specprefill.draft.torch import TorchDraft

        return TorchDraft(load_model(name, dtype, device, progress, layers), keep)

    if kind == "torch":
        return remembering(torch_draft(model), keep)
    draft = _engine_or(torch_draft, kind, model, path, fallback, device, threads, progress)
    return remembering(draft, keep)


def _engine_or(
    torch_draft: Callable[[str], Draft],
    kind: str,
    model: str,
    path: str,
    fallback: str,
    device: str,
    threads: int | None,
    progress: Progress | None,
) -> Draft:
    """An engine, or what stands in its place."""
    try:
        return _engine(kind, model, path, device, threads, progress)
    except SpecPrefillError as error:
        if fallback == "none":
            raise
        words = f"the draft engine cannot be used, {fallback} in its place: {error}"
        _log.warning("%s", words)
        if progress is not None:
            progress(words)
        model = model or DraftManifest.read(path).model
        if fallback == "torch":
            return Substitute(torch_draft(model), words)
        return UnusableDraft(engine_model(model, progress), str(error))


def engine_kind(path: str) -> DraftKind:
    """What runs the engine in a folder. Raises `InputError` when there is none."""
    return "onnx" if DraftManifest.read(path).runtime == "onnx" else "tensorrt"


class Substitute(Draft):
    """A draft that takes the place of an engine, and says so of every importance."""

    def __init__(self, draft: Draft, why: str) -> None:
        self.name, self.tokenizer = draft.name, draft.tokenizer
        self.context_length, self._draft, self._why = draft.context_length, draft, why

    def score(
        self,
        ids: NDArray[np.int32],
        settings: Settings,
        question: NDArray[np.int64] | None = None,
    ) -> Importance:
        """See `Draft.score`."""
        return replace(self._draft.score(ids, settings, question), detail=self._why)

    def operations(self, tokens: int, settings: Settings) -> float:
        """See `Draft.operations`."""
        return self._draft.operations(tokens, settings)


class UnusableDraft(Draft):
    """Stands where a draft should be that could not be loaded: every prompt is read in full."""

    def __init__(self, model: EngineModel, why: str) -> None:
        self.name, self.tokenizer = model.name, model.tokenizer
        self.context_length = int(model.config.max_position_embeddings)
        self._why = why

    def score(
        self,
        ids: NDArray[np.int32],
        settings: Settings,
        question: NDArray[np.int64] | None = None,
    ) -> Importance:
        """Raises `DraftFailed`, saying why there is no draft."""
        raise DraftFailed(self._why)

    def operations(self, tokens: int, settings: Settings) -> float:
        """Nothing: it does not score."""
        return 0.0


def _engine(
    kind: str,
    model: str,
    folder: str,
    device: str,
    threads: int | None,
    progress: Progress | None,
) -> Draft:
    from trtllm_specprefill.draft.graph import GraphDraft, check_model

    if not folder:
        raise InputError("path", folder, f"the folder of an engine, for a draft of kind {kind}")
    manifest = DraftManifest.read(folder)
    described = engine_model(model or manifest.model, progress)
    check_model(manifest, described)  # before anything large is loaded
    weights = local_fingerprint(described.name, progress)
    if weights is not None:
        manifest.check_field("model_hash", weights, f"the weights of {described.name}")
    if kind == "onnx":
        from trtllm_specprefill.draft.onnx import OnnxEngine

        return GraphDraft(
            folder, manifest, described, OnnxEngine(Path(folder), manifest, device, threads)
        )
    from trtllm_specprefill.draft.tensorrt import TensorRTEngine

    on = "cuda" if device == "auto" else device
    return GraphDraft(folder, manifest, described, TensorRTEngine(folder, manifest, on))
