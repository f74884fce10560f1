"""One door to every kind of target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_build.description import describe
from tests.contracts import engine
from tests.target.conftest import install, manifest_of
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.models import load_tokenizer
from trtllm_specprefill.plan import PrunePlan, Reason
from trtllm_specprefill.serving.ranks import budget_of, world_of
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.base import Target
from trtllm_specprefill.target.load import load_target, source_model
from trtllm_specprefill.target.manifest import MANIFEST, Manifest


def answer(target: Target, tokenizer: Any) -> list[int]:
    ids = np.asarray(tokenizer.encode("The key to the cellar lies"), np.int32)
    at = (np.arange(ids.size) * 3).astype(np.int32)
    n = int(at[-1]) + 1
    plan = PrunePlan(ids, at, n, "original", n, Reason.PRUNED)
    steps = target.stream(plan, Sampling(max_tokens=6))
    return [token for step in steps for token in step.token_ids]


@pytest.mark.parametrize("kind", ["trtllm_executor", "trtllm_llm"])
def test_an_engine_is_found_by_its_folder(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_target = load_target("torch", str(folder), dtype="float32", device="cpu")
    install("recorded_1_2", monkeypatch)
    setup = engine.Setup(torch_target.model)  # type: ignore[attr-defined]
    monkeypatch.setattr(engine, "setup", setup)
    manifest_of(kind, model=str(folder)).write(tmp_path)
    target = load_target(kind, str(tmp_path), timeout_s=60)
    assert target.position_support.honoured
    assert target.position_support.context == 4096
    assert answer(target, target.tokenizer) == answer(torch_target, torch_target.tokenizer)
    assert target.operations(100) == torch_target.operations(100)
    wrong = "trtllm_llm" if kind == "trtllm_executor" else "trtllm_executor"
    with pytest.raises(InputError, match="backend"):
        load_target(wrong, str(tmp_path))
    target.close()


@pytest.mark.parametrize("kind", ["trtllm_executor", "trtllm_llm"])
def test_an_engine_is_served_where_its_model_is_not(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engines = tmp_path / "models" / "small", tmp_path / "engines" / "target"
    shutil.copytree(folder, model)
    engines.mkdir(parents=True)
    manifest_of(kind, model=str(model)).write(engines)
    describe(engines)
    torch_target = load_target("torch", str(model), dtype="float32", device="cpu")
    shutil.rmtree(model.parent)
    mounted = engines.rename(tmp_path / "mounted")
    install("recorded_1_2", monkeypatch)
    monkeypatch.setattr(engine, "setup", engine.Setup(torch_target.model))  # type: ignore[attr-defined]
    target = load_target(kind, str(mounted), timeout_s=60)
    assert target.name == str(model)
    assert answer(target, target.tokenizer) == answer(torch_target, torch_target.tokenizer)
    assert load_tokenizer(source_model(kind, str(mounted))).encode("key") == (
        torch_target.tokenizer.encode("key")
    )
    served = ServeSettings.of(
        {
            "draft": {"model": str(folder)},
            "target": {"backend": kind, "model": str(mounted)},
        }
    )
    assert budget_of(served, world_of(served), gpu_memory=80e9) is not None
    target.close()


def test_an_endpoint_needs_a_url_and_may_have_fewer_positions(folder: Path) -> None:
    with pytest.raises(InputError, match="url"):
        load_target("endpoint", str(folder))
    url = "http://127.0.0.1:9/v1"
    assert load_target("endpoint", str(folder), url=url).position_support.context == 4096
    short = load_target("endpoint", str(folder), url=url, context_tokens=512)
    assert short.position_support.context == 512
    assert not short.position_support.honoured


def test_an_unknown_kind_and_a_folder_without_a_manifest_say_what_is_allowed(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"'vllm'.*torch, trtllm_executor, trtllm_llm, endpoint"):
        load_target("vllm", str(folder))
    with pytest.raises(InputError, match=rf"engine_build, with {MANIFEST}"):
        load_target("trtllm_llm", str(folder))
    (tmp_path / MANIFEST).write_text('{"model": "x", "backend": "onnx"}')
    with pytest.raises(InputError, match="backend"):
        load_target("trtllm_llm", str(tmp_path))
    stated = manifest_of("trtllm_llm").model_dump(mode="json")
    (tmp_path / MANIFEST).write_text(json.dumps({**stated, "tensorrt_llm": "newest"}))
    with pytest.raises(InputError, match=r"tensorrt_llm: got 'newest'.*such as 1\.2\.1"):
        load_target("trtllm_llm", str(tmp_path))


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    manifest = manifest_of("trtllm_llm", probes={"scattered": (1, 2), "contiguous": (3, 4)})
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
