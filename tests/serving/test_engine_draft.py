"""The real tritonserver with a draft that was built ahead, and with one that cannot be used."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from engine_build.scoring_model import Scoring
from tests.engine_build import drafts
from tests.test_judges import random_model
from trtllm_specprefill import SpecPrefill
from trtllm_specprefill.draft.load import load_draft
from trtllm_specprefill.draft.manifest import MANIFEST
from trtllm_specprefill.models import load_model
from trtllm_specprefill.serving.client import infer
from trtllm_specprefill.serving.launch import Server, launch_of, with_free_ports
from trtllm_specprefill.serving.repository import render
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.target.torch import TorchTarget

pytest.importorskip("tritonclient.grpc")
pytest.importorskip("pytriton")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KNOBS = {"threshold": 64, "min_keep_tokens": 0, "keep": 0.3, "window": 24}


@pytest.fixture(scope="module")
def folders(
    byte_level: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A small model's folder, and that of an engine made of it."""
    torch.manual_seed(13)
    own = tmp_path_factory.mktemp("model")
    random_model("llama", byte_level, vocab_size=len(byte_level)).module.save_pretrained(own)
    byte_level.save_pretrained(own)
    model = load_model(str(own), "float32", "cpu")
    return own, drafts.build(model, Scoring("window", 2, queries=24), 300)


@contextmanager
def serving(model: Path, engine: Path) -> Iterator[str]:
    own = {"model": str(model), "dtype": "float32", "device": "cpu"}
    draft = {**own, "backend": "onnx", "path": str(engine)}
    ports = {"http": 0, "grpc": 0, "metrics": 0}
    settings = with_free_ports(ServeSettings.of({"ports": ports, "draft": draft, "target": own}))
    folder = Path(tempfile.mkdtemp(prefix="specprefill-"))  # short: it holds sockets
    try:
        launch = launch_of(settings, render(settings, folder), (), print)
        with Server(launch, settings.ports, folder) as server:
            server.wait_ready(print)
            yield f"127.0.0.1:{settings.ports.grpc}"
    finally:
        shutil.rmtree(folder)


def asked(prose: str) -> dict[str, Any]:
    return {"text_input": prose[:3000], "specprefill": KNOBS, "max_tokens": 4}


def test_a_served_engine_selects_what_it_selects_in_one_process(
    folders: tuple[Path, Path], prose: str
) -> None:
    own, engine = folders
    with serving(own, engine) as grpc:
        values = asked(prose)
        values["specprefill"] = {**KNOBS, "kept_spans": True}
        _, report = infer(grpc, values)
    draft = load_draft("onnx", str(own), path=str(engine), device="cpu")
    target = TorchTarget(load_model(str(own), "float32", "cpu"))
    expected = SpecPrefill(draft, target).generate(prose[:3000], max_tokens=4, **KNOBS).report()
    assert (report["reason"], report["detail"]) == ("pruned", expected["detail"])
    assert report["kept_tokens"] == expected["kept_tokens"]
    assert report["kept_spans"] == expected["kept_spans"]


def test_in_the_place_of_a_broken_engine_a_server_scores_with_torch_and_says_so(
    folders: tuple[Path, Path], prose: str, tmp_path: Path
) -> None:
    own, engine = folders
    broken = tmp_path / "engine"
    shutil.copytree(engine, broken)
    manifest = json.loads((broken / MANIFEST).read_text())
    manifest["probe"]["importance"] = np.roll(manifest["probe"]["importance"], 7).tolist()
    (broken / MANIFEST).write_text(json.dumps(manifest))
    with serving(own, broken) as grpc:
        _, report = infer(grpc, asked(prose))
    assert report["reason"] == "pruned"
    assert "torch in its place: probe.importance" in report["detail"]
