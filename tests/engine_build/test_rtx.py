"""Drafts through the parser and builder of TensorRT for RTX, which need no GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from engine_build.choices import DraftBuild
from engine_build.draft import build_draft
from tests.engine_build.test_draft import CALIBRATION
from trtllm_specprefill.draft.bindings import load_bindings
from trtllm_specprefill.draft.manifest import DraftManifest
from trtllm_specprefill.draft.tensorrt import ENGINE

pytest.importorskip("tensorrt_rtx_bindings")
pytestmark = pytest.mark.model

EMBEDDING = 49152 * 576 * 2  # bytes, in bf16 whatever the precision
LAYER = 3.54e6  # weights of a layer of SmolLM2-135M
LAST = 0.33e6  # those of the last layer that window mode runs: its queries and keys
BYTES = {"bf16": 2, "fp8": 1}
# Of programs for one layer, for every profile and SM: 0.5 to 2.4 MB in the eight builds below. An
# FP8 engine whose weights are in bf16 is larger by 3.5 MB a layer.
PROGRAMS = 3e6


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "calibration.txt"
    file.write_text(CALIBRATION, encoding="utf-8")
    return file


def loaded(engine: bytes) -> tuple[Any, list[str]]:
    """What the real runtime makes of an engine without a GPU, and its words."""
    trt = load_bindings("tensorrt-rtx")
    words: list[str] = []

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            words.append(msg)

    return trt.Runtime(Logger()).deserialize_cuda_engine(engine), words


def check_engine(folder: Path) -> None:
    """It loads, or the driver of a GPU is all that is missing; half of it does not even parse."""
    engine = (folder / ENGINE).read_bytes()
    found, words = loaded(engine)
    assert found is not None or any("cudaError" in line for line in words), words
    assert not [line for line in words if "Serialization" in line]
    found, words = loaded(engine[: len(engine) // 2])
    assert found is None
    assert [line for line in words if "Serialization" in line]


def built(
    mode: Any, layers: int, precision: Any, sm: tuple[int, ...], text: Path, out: Path
) -> DraftManifest:
    """SmolLM2's draft for prompts of up to 8,192 tokens, four at a time."""
    build = DraftBuild(
        "smollm2-135m",
        out,
        runtime="tensorrt-rtx",
        precision=precision,
        mode=mode,
        layers=layers,
        max_tokens=8192,
        max_batch=4,
        calibration=text,
        sm=sm,
    )
    begin = time.monotonic()
    made = build_draft(build, lambda line: None)
    print(f"{mode}, {layers}, {precision}: {time.monotonic() - begin:.0f} s, {made.seconds}")
    return made.manifest


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("layers", [30, 9])
@pytest.mark.parametrize("mode", ["lookahead", "window"])
def test_the_whole_draft_and_an_early_exit_are_built(
    mode: Any, layers: int, precision: Any, text: Path, tmp_path: Path
) -> None:
    sm = (89,) if layers == 30 else (89, 120)  # for two it takes twice as long
    manifest = built(mode, layers, precision, sm, text, tmp_path / "engine")
    assert manifest == DraftManifest.read(tmp_path / "engine")
    assert (manifest.mode, manifest.layers, manifest.precision) == (mode, layers, precision)
    assert (manifest.max_tokens, manifest.max_batch, manifest.sm) == (8192, 4, sm)
    check_engine(tmp_path / "engine")
    weights = (tmp_path / "engine" / ENGINE).stat().st_size - EMBEDDING
    run = layers * LAYER if mode == "lookahead" else (layers - 1) * LAYER + LAST
    assert 0.9 * BYTES[precision] * run < weights < BYTES[precision] * run + PROGRAMS * layers
