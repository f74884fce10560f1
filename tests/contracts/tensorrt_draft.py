"""Engines of small models over the recorded TensorRT, and the memory of a host for them."""

from __future__ import annotations

import functools
import importlib
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_build.engine import Profile, build_engine
from engine_build.graph import export_draft, save_graph
from engine_build.scoring_model import Scoring
from tests.contracts import onnx_engine
from tests.engine_build.drafts import described, manifest_of, small
from trtllm_specprefill.draft.graph import GraphDraft
from trtllm_specprefill.draft.manifest import GRAPH, DraftManifest
from trtllm_specprefill.draft.tensorrt import ENGINE, TensorRTEngine
from trtllm_specprefill.fetch import sha256_of

RECORDED = Path(__file__).parent / "recorded_tensorrt"
MAX_TOKENS, MAX_BATCH, SM = 300, 3, 90
BATCH = (1, 1, MAX_BATCH)
PREFILL = Profile("prefill", {"batch": BATCH, "tokens": (1, 64, 300), "capacity": (1, 64, 300)})
STEP = Profile("step", {"batch": BATCH, "tokens": (1, 1, 1), "capacity": (1, 64, 300)})
_FOLDERS = tempfile.TemporaryDirectory(prefix="engines-")


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the recorded `tensorrt` the one that is imported, with nothing seen yet."""
    for name in [n for n in sys.modules if n.split(".")[0] == "tensorrt"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(RECORDED))
    monkeypatch.setattr(onnx_engine, "seen", onnx_engine.Seen())
    importlib.invalidate_caches()
    return importlib.import_module("tensorrt")


class HostMemory:
    """Memory of the host in the place of a GPU's; everything is done at once."""

    stream, capability = 7, SM

    def __init__(self, number: int = 0) -> None:
        self.number, self.waits = number, 0
        self.taken: list[weakref.ref[torch.Tensor]] = []
        self.pinned: list[weakref.ref[torch.Tensor]] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        before, onnx_engine.current.device = onnx_engine.current.device, self.number
        try:
            yield
        finally:
            onnx_engine.current.device = before

    def device(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return self._made(elements, dtype, self.taken)

    def host(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return self._made(elements, dtype, self.pinned)

    def _made(
        self, elements: int, dtype: torch.dtype, noted: list[weakref.ref[torch.Tensor]]
    ) -> torch.Tensor:
        onnx_engine.note("memory")
        # As uninitialised memory may be: not a number wherever nothing was written.
        made = torch.full((elements,), -1, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
        noted.append(weakref.ref(made))
        return made

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        onnx_engine.note("memory")
        to.copy_(source)

    def zero(self, tensor: torch.Tensor) -> None:
        onnx_engine.note("memory")
        tensor.zero_()

    def wait(self) -> None:
        onnx_engine.note("memory")
        self.waits += 1


@functools.cache
def graph_of(family: str, scoring: Scoring) -> Path:
    """The exported graph of a small model."""
    folder = Path(tempfile.mkdtemp(dir=_FOLDERS.name))
    save_graph(export_draft(small(family), scoring), folder / GRAPH)
    return folder / GRAPH


def built(trt: Any, family: str, scoring: Scoring, **fields: Any) -> Path:
    """A folder with an engine and its manifest; fields: of the manifest, in others' place."""
    folder = Path(tempfile.mkdtemp(dir=_FOLDERS.name))
    profiles = [PREFILL, STEP] if scoring.mode == "lookahead" else [PREFILL]
    made = build_engine(
        trt,
        "tensorrt",
        graph_of(family, scoring),
        profiles,
        sm=(),
        timing_cache=None,
        progress=lambda line: None,
    )
    (folder / ENGINE).write_bytes(made)
    stated = manifest_of(small(family), scoring, MAX_TOKENS, MAX_BATCH).model_dump()
    stated |= {"runtime": "tensorrt", "versions": {"tensorrt": trt.__version__}, "sm": (SM,)}
    stated |= {"files": {ENGINE: sha256_of(folder / ENGINE)}}
    DraftManifest(**{**stated, **fields}).write(folder)
    return folder


def opened(folder: Path, family: str, memory: HostMemory | None = None) -> GraphDraft:
    """The engine in `folder`, loaded."""
    manifest = DraftManifest.read(folder)
    engine = TensorRTEngine(folder, manifest, memory=memory or HostMemory())
    return GraphDraft(folder, manifest, described(small(family)), engine)
