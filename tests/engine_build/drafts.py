"""Engines made once for many tests: small random models, exported and described."""

from __future__ import annotations

import functools
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_build.graph import export_draft, save_graph
from engine_build.probe import figures_of
from engine_build.scoring_model import Scoring, ScoringModel
from tests.test_judges import random_model
from trtllm_specprefill.draft.graph import GraphDraft
from trtllm_specprefill.draft.manifest import (
    GRAPH,
    CacheGeometry,
    DraftManifest,
    tokenizer_hash,
)
from trtllm_specprefill.draft.onnx import OnnxEngine
from trtllm_specprefill.fetch import sha256_of
from trtllm_specprefill.models import EngineModel, Model

VOCABULARY = 211
_FOLDERS = tempfile.TemporaryDirectory(prefix="drafts-")


class Ids:
    """A tokenizer of ids written as numbers; `salt` makes one that is not the same."""

    bos_token_id, eos_token_id = None, 1

    def __init__(self, salt: int = 0) -> None:
        self.salt = salt

    def get_vocab(self) -> dict[str, int]:
        return {f"{self.salt + i}": i for i in range(VOCABULARY)}

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(c) % (VOCABULARY - 2) for c in text]}


@functools.cache
def small(family: str) -> Model:
    """The small random model of a family."""
    torch.manual_seed(len(family))
    return random_model(family, Ids())


@functools.cache
def folder_of(family: str, scoring: Scoring, max_tokens: int = 400, max_batch: int = 4) -> Path:
    """An engine's folder: graph and manifest."""
    return build(small(family), scoring, max_tokens, max_batch)


def build(model: Model, scoring: Scoring, max_tokens: int, max_batch: int = 4) -> Path:
    """Export a draft and describe it in a new folder."""
    folder = Path(tempfile.mkdtemp(dir=_FOLDERS.name))
    save_graph(export_draft(model, scoring), folder / GRAPH)
    manifest_of(model, scoring, max_tokens, max_batch, folder).write(folder)
    return folder


def manifest_of(
    model: Model,
    scoring: Scoring,
    max_tokens: int = 400,
    max_batch: int = 4,
    folder: Path | None = None,
) -> DraftManifest:
    """What an engine of this kind says of itself, with torch's figures of a probe.

    folder: where its files lie.
    """
    files = {} if folder is None else {path.name: sha256_of(path) for path in folder.iterdir()}
    module = ScoringModel(model, scoring).eval()
    cache = None
    if scoring.mode == "lookahead":
        cache = CacheGeometry(
            layers=scoring.layers,
            kv_heads=module.kv_heads,
            head_dim=module.head_dim,
            dtype="float32",
        )
    ids = fresh_ids(min(60, max_tokens), int(model.config.vocab_size), seed=5).astype(np.int64)
    return DraftManifest(
        model=model.name,
        model_hash=model.fingerprint,
        tokenizer_hash=tokenizer_hash(model.tokenizer),
        versions={"torch": torch.__version__},
        runtime="onnx",
        precision="fp32",
        scorer="native",
        mode=scoring.mode,
        layers=scoring.layers,
        heads=scoring.heads,
        pool=scoring.pool,
        queries=scoring.queries,
        votes=scoring.votes,
        max_tokens=max_tokens,
        max_batch=max_batch,
        cache=cache,
        files=files,
        probe=figures_of(module, ids, "fp32"),
    )


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Within it this process can write no file longer than `size` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def described(model: Model) -> EngineModel:
    return EngineModel(model.name, model.tokenizer, model.config, model.eos_token_ids)


def opened(model: Model, folder: Path, batch: int = 1, piece: int = 1024) -> GraphDraft:
    """The engine under onnxruntime, reading `batch` sequences in pieces of `piece` tokens."""
    manifest = DraftManifest.read(folder)
    engine = OnnxEngine(folder, manifest, "cpu", threads=1)
    engine.batch, engine.piece = batch, piece
    return GraphDraft(folder, manifest, described(model), engine)


def fresh_ids(n: int, vocabulary: int = VOCABULARY, seed: Any = None) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(2, vocabulary, n).astype(np.int32)
