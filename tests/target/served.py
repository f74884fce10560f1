"""A repository for the real tritonserver with an engine of the recorded API as its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engine_build.description import describe
from tests.strategies import WORDS
from tests.target.conftest import CONTRACTS, KINDS, manifest_of
from trtllm_specprefill.serving.client import stream
from trtllm_specprefill.serving.launch import with_free_ports
from trtllm_specprefill.serving.repository import render
from trtllm_specprefill.serving.settings import ServeSettings

KNOBS = {"threshold": 64, "min_keep_tokens": 0, "keep": 0.3, "positions": "original"}
# Before the target's own code: TensorRT-LLM's API as recorded, a model under torch behind it.
_RECORDED = """
import os
import sys

sys.path[:0] = [{contracts!r}, {root!r}]
from tests.contracts import engine
from trtllm_specprefill.models import load_model

model = load_model({model!r}, "float32", "cpu")
"""
_ALONE = 'engine.setup = engine.Setup(model, leader=os.environ.get("RANK", "0") == "0")\n'
_MPI = "from tests.contracts import mpi\nengine.setup = mpi.setup_of(model)\n"


def settings_of(kind: str, folder: Path, engine: Path, ranks: int = 1) -> ServeSettings:
    """Settings of a server with free ports.

    kind: one of `conftest.KINDS`. folder: of the draft, and of the model behind the engine.
    engine: where the engine's manifest is written, and what else is served of it.
    """
    manifest_of(kind, model=str(folder), tensor_parallel=ranks).write(engine)
    describe(engine)
    backend, *_ = kind.split()
    return with_free_ports(
        ServeSettings.of(
            {
                "draft": {"model": str(folder), "dtype": "float32", "device": "cpu"},
                "target": {"backend": backend, "model": str(engine)},
                "ports": {"http": 0, "grpc": 0, "metrics": 0},
                "limits": {"answers": 4, "presence": 0.25},
                "infer_instances": 1,
            }
        )
    )


def repository_of(
    kind: str, served: ServeSettings, folder: Path, work: Path, mpi: bool = False
) -> Path:
    """The repository of a server, rendered into `work`.

    mpi: whether a rank learns from MPI which one it is; else from the variable RANK.
    """
    repository = render(served, work)
    own = repository / "target" / "1" / "model.py"
    before = _RECORDED.format(
        contracts=str(CONTRACTS / KINDS[kind]),
        root=str(Path(__file__).parents[2]),
        model=str(folder),
    )
    own.write_text(before + (_MPI if mpi else _ALONE) + own.read_text())
    return repository


def text_of_words(count: int) -> str:
    """A prompt of random words."""
    return " ".join(np.random.default_rng().choice(WORDS, size=count)) + ". Where is the key?"


def whole(url: str, text: str, **values: Any) -> tuple[str, dict[str, Any]]:
    """A streamed answer, gathered, and its report."""
    request = {"text_input": text, "specprefill": KNOBS, "max_tokens": 8, **values}
    pieces, report = [], None
    for piece, report in stream(url, request):  # noqa: B007
        pieces.append(piece)
    assert report is not None
    return "".join(pieces), report
