"""The recorded TensorRT: where it is from, and that TensorRT for RTX really has it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contracts import refresh
from tests.contracts.tensorrt_draft import install
from trtllm_specprefill.draft.bindings import load_bindings

RECORDED = "recorded_tensorrt"


def test_it_names_its_sources_for_both_versions() -> None:
    text = (Path(refresh.HERE) / RECORDED / "tensorrt" / "__init__.py").read_text("utf-8")
    assert re.findall(r"@ [0-9a-f]{40} \(release/([\d.]+)\)", text) == ["10.14", "11.1"]


def test_it_agrees_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert not list(refresh.differences(RECORDED))
    assert len(list(refresh.recorded(RECORDED))) > 15


def real(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The installed TensorRT for RTX, under the name that is recorded."""
    pytest.importorskip("tensorrt_rtx_bindings")
    bindings = load_bindings("tensorrt-rtx")
    monkeypatch.setitem(sys.modules, "tensorrt", bindings)
    return bindings


def test_everything_recorded_is_in_tensorrt_for_rtx(monkeypatch: pytest.MonkeyPatch) -> None:
    real(monkeypatch)
    gone = [line for line, is_gone in refresh.differences(RECORDED) if is_gone]
    assert gone == []


def test_a_recorded_argument_that_is_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = real(monkeypatch)

    class Newer:
        def set_shape(self, input: str, least: Any, usual: Any, most: Any) -> None: ...

    monkeypatch.setattr(bindings, "IOptimizationProfile", Newer)
    gone = [line for line, is_gone in refresh.differences(RECORDED) if is_gone]
    assert "tensorrt.IOptimizationProfile.set_shape(opt=): gone" in gone
