"""The draft under TensorRT's recorded API, with onnxruntime behind it and a host's memory."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine_build.scoring_model import Scoring
from tests.contracts import onnx_engine
from tests.contracts.tensorrt_draft import (
    MAX_BATCH,
    MAX_TOKENS,
    HostMemory,
    built,
    install,
    opened,
)
from tests.engine_build.drafts import described, fresh_ids, small
from trtllm_specprefill.draft.footprint import footprint_of
from trtllm_specprefill.draft.load import load_draft
from trtllm_specprefill.draft.manifest import DraftManifest, EngineRefused
from trtllm_specprefill.draft.memory import CudaMemory
from trtllm_specprefill.draft.tensorrt import ENGINE, TensorRTEngine
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.errors import ContextTooLong, DraftFailed, InputError
from trtllm_specprefill.settings import Settings

WINDOW = Scoring("window", 2, queries=24)
LOOK_AHEAD = Scoring("lookahead", 4, queries=6, votes="mean")
READS = Settings(window=24, draft_window=0, draft_layers=2)
DECODES = Settings(scoring="lookahead", look_ahead=5)


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(monkeypatch)


def prompts(*lengths: int) -> list[Any]:
    return [fresh_ids(n) for n in lengths]


@pytest.mark.parametrize(("scoring", "asked"), [(WINDOW, READS), (LOOK_AHEAD, DECODES)])
def test_scores_are_those_of_torch_alone_and_in_ragged_batches(
    scoring: Scoring, asked: Settings, trt: Any
) -> None:
    draft = opened(built(trt, "llama", scoring), "llama")
    judge = TorchDraft(small("llama"))
    given = prompts(1, 33, 290, 150, 17)
    assert len(given) > MAX_BATCH
    for ids, found in zip(given, draft.score_batch(given, asked), strict=True):
        expected = judge.score(ids, asked)
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)
        assert found.queries == expected.queries
        np.testing.assert_allclose(draft.score(ids, asked).scores, expected.scores, atol=1e-5)


def test_a_step_reads_keys_and_values_where_the_one_before_wrote_them(trt: Any) -> None:
    draft = opened(built(trt, "llama", LOOK_AHEAD), "llama")
    seen = onnx_engine.seen
    seen.addresses.clear()
    seen.profiles.clear()
    for ids in prompts(40, 71):
        draft.score(ids, DECODES)
    assert seen.profiles.count(0) == 2
    assert seen.profiles.count(1) >= 2
    names = [f"{kind}.{i}" for i in range(LOOK_AHEAD.layers) for kind in ("keys", "values")]
    steps = [i for i, profile in enumerate(seen.profiles) if profile == 1]
    for i in steps:
        for name in names:
            assert seen.addresses[i][f"past_{name}"] == seen.addresses[i - 1][f"present_{name}"]
    # Two places for each, and one for everything else, whatever the prompt.
    for name in names:
        assert len({call[f"past_{name}"] for call in seen.addresses}) == 2
    for name in ("input_ids", "lengths", "importance", "next_token"):
        assert len({call[name] for call in seen.addresses}) == 1


def test_prefill_and_step_each_use_their_profile(trt: Any) -> None:
    draft = opened(built(trt, "llama", LOOK_AHEAD), "llama")
    onnx_engine.seen.profiles.clear()
    onnx_engine.seen.shapes.clear()
    draft.score(fresh_ids(50), DECODES)
    tokens = [shapes["input_ids"][1] for shapes in onnx_engine.seen.shapes]
    assert tokens[0] == 50
    assert set(tokens[1:]) == {1}
    assert onnx_engine.seen.profiles == [0] + [1] * (len(tokens) - 1)


def test_the_pass_before_cannot_go_on_in_anothers_keys_and_values(trt: Any) -> None:
    folder = built(trt, "llama", LOOK_AHEAD)
    engine = TensorRTEngine(folder, DraftManifest.read(folder), memory=HostMemory())
    ids, one = np.full((1, 4), 5), np.array([4], dtype=np.int32)
    places, nothing = np.arange(4)[None], np.array([0], dtype=np.int32)
    first = engine.begin(1, 10)
    first.step(ids, places, one, one, nothing)
    engine.begin(1, 10).step(ids, places, one, one, nothing)
    with pytest.raises(DraftFailed, match="another prompt"):
        first.step(ids, places, one, one, nothing)


@pytest.mark.parametrize(("scoring", "asked"), [(WINDOW, READS), (LOOK_AHEAD, DECODES)])
def test_every_call_of_an_engine_on_another_gpu_finds_that_gpu_current_in_its_thread(
    scoring: Scoring, asked: Settings, trt: Any
) -> None:
    folder = built(trt, "llama", scoring)
    memory = HostMemory(3)
    seen = onnx_engine.seen
    draft = opened(folder, "llama", memory)
    loading = len(seen.devices)
    current: list[int] = []

    def score() -> None:
        draft.score(fresh_ids(80), asked)
        current.append(onnx_engine.current.device)

    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    scored = len(seen.devices)
    draft.close()
    calls = [call for call, _ in seen.devices]
    assert {device for _, device in seen.devices} == {3}
    assert {"new runtime", "new engine", "new context", "engine", "context"} <= {*calls[:loading]}
    assert calls[loading:scored].count("context") >= 6  # shapes, addresses, the call itself
    contexts = 2 if scoring.mode == "lookahead" else 1
    assert calls.count("end of context") == calls.count("new context") == contexts
    assert calls[scored:].count("end of engine") == 1
    assert [*current, onnx_engine.current.device] == [0, 0]
    assert not [taken for taken in (*memory.taken, *memory.pinned) if taken() is not None]


@pytest.mark.parametrize("scoring", [WINDOW, LOOK_AHEAD])
def test_a_footprint_is_what_is_taken_and_room_for_the_workspace(
    scoring: Scoring, trt: Any
) -> None:
    folder = built(trt, "llama", scoring)
    manifest, memory = DraftManifest.read(folder), HostMemory()
    draft = opened(folder, "llama", memory)
    found = footprint_of(folder, manifest, small("llama").config)
    tensors = [made for ref in memory.taken if (made := ref()) is not None]
    workspace, *taken = (tensor.numel() * tensor.element_size() for tensor in tensors)
    count = len(memory.pinned)  # what goes in and out is on both sides, keys and values are not
    assert found.weights == (folder / ENGINE).stat().st_size
    assert found.kv == sum(taken[count:])
    assert (found.kv > 0) == (scoring.mode == "lookahead")
    assert found.work - sum(taken[:count]) > workspace
    draft.close()


@pytest.mark.parametrize(("device", "number"), [("cuda:2", 2), ("cuda", 1)])
def test_memory_of_a_gpu_makes_it_current_and_one_without_a_number_is_the_current_one(
    device: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[torch.device] = []

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: object) -> None: ...

    replaced = {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "get_device_capability": lambda device: (9, 0),
        "Stream": lambda device: SimpleNamespace(cuda_stream=7, device=device),
        "device": Guard,
    }
    for name, what in replaced.items():
        monkeypatch.setattr(torch.cuda, name, what)
    memory = CudaMemory(device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)  # another thread's
    assert memory._stream.device == torch.device("cuda", number)
    with memory.active():
        assert entered == [torch.device("cuda", number)]


@pytest.mark.parametrize("built_by", ["10.14.1.48", "10.14.1.48.post1", "10.14.1"])
def test_an_engine_of_the_same_tensorrt_is_taken_however_its_version_is_written(
    built_by: str, trt: Any
) -> None:
    assert trt.__version__ == "10.14.1.48"
    folder = built(trt, "llama", WINDOW, versions={"tensorrt": built_by})
    assert opened(folder, "llama").score(fresh_ids(60), READS).scores.any()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"versions": {"tensorrt": "10.13.2"}}, r"versions\.tensorrt: got '10\.13\.2'.*10\.14\.1"),
        ({"versions": {"tensorrt": "10.14.1.4"}}, r"tensorrt: got '10\.14\.1\.4'.*'10\.14\.1\.48'"),
        ({"versions": {"tensorrt": "11.14.1.48.post1"}}, r"'11\.14\.1\.48\.post1'.*'10\.14\.1"),
        ({"versions": {"tensorrt": "unknown"}}, r"'unknown'.*'10\.14\.1\.48'"),
        ({"versions": {}}, r"versions\.tensorrt: got None"),
        ({"files": {ENGINE: "0" * 64}}, r"files\.draft\.engine"),
        ({"sm": (80, 86)}, r"sm: got \(80, 86\).*90"),
        ({"runtime": "onnx"}, "runtime: got 'onnx'"),
        ({"tokenizer_hash": "another"}, "tokenizer_hash: got 'another'"),
    ],
)
def test_an_engine_whose_manifest_does_not_fit_is_refused_by_the_field(
    fields: dict[str, Any], named: str, trt: Any
) -> None:
    folder = built(trt, "llama", WINDOW, **fields)
    with pytest.raises(EngineRefused, match=named):
        opened(folder, "llama")


def test_an_engine_with_other_tensors_or_types_than_its_manifest_is_refused(trt: Any) -> None:
    read = built(trt, "llama", WINDOW)
    cache = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    stated = DraftManifest.read(read).model_dump()
    DraftManifest(**{**stated, "mode": "lookahead", "votes": "mean", "cache": cache}).write(read)
    with pytest.raises(EngineRefused, match=r"lengths, vot.*past_keys\.0"):
        opened(read, "llama")
    decoded = built(trt, "llama", LOOK_AHEAD)
    stated = DraftManifest.read(decoded).model_dump()
    stated["cache"]["dtype"] = "bfloat16"
    DraftManifest(**stated).write(decoded)
    with pytest.raises(EngineRefused, match=r"cache\.dtype: got 'bfloat16'.*FLOAT"):
        opened(decoded, "llama")


def test_an_engine_that_tensorrt_does_not_load_is_refused_with_its_words(
    trt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = built(trt, "llama", WINDOW)
    monkeypatch.setattr(trt, "__version__", "11.1.0.1")
    manifest = DraftManifest.read(folder)
    stated = {**manifest.model_dump(), "versions": {"tensorrt": "11.1.0.1"}}
    DraftManifest(**stated).write(folder)
    with pytest.raises(EngineRefused, match=r"loads \(an engine of version 10\.14"):
        opened(folder, "llama")
    (folder / ENGINE).unlink()
    with pytest.raises(InputError, match=f"a folder with {ENGINE}"):
        opened(folder, "llama")


def test_what_tensorrt_cannot_run_fails_the_draft_with_its_words(trt: Any) -> None:
    draft = opened(built(trt, "llama", WINDOW), "llama")
    onnx_engine.seen.fail_execution = True
    with pytest.raises(DraftFailed, match="out of memory"):
        draft.score(fresh_ids(40), READS)


def test_a_prompt_that_is_too_long_for_the_profile_names_the_limit(trt: Any) -> None:
    draft = opened(built(trt, "llama", LOOK_AHEAD), "llama")
    with pytest.raises(ContextTooLong, match=f"at most {MAX_TOKENS}, max_tokens of the engine"):
        draft.score(fresh_ids(MAX_TOKENS - 2), DECODES)
    # Whoever goes round the draft is stopped by the profile itself.
    folder = built(trt, "llama", WINDOW)
    engine = TensorRTEngine(folder, DraftManifest.read(folder), memory=HostMemory())
    ids, tokens = np.full((MAX_BATCH + 1, 9), 5), np.full(MAX_BATCH + 1, 9, dtype=np.int32)
    with pytest.raises(DraftFailed, match=r"outside the profile"):
        engine.read(ids, np.tile(np.arange(9), (MAX_BATCH + 1, 1)), tokens, tokens)


def test_without_tensorrt_or_a_gpu_the_error_says_what_is_missing(
    trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = built(trt, "llama", WINDOW)
    manifest = DraftManifest.read(folder)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="a GPU, which torch does not see"):
        TensorRTEngine(folder, manifest)
    monkeypatch.setattr(trt, "__version__", "10.13.3")
    with pytest.raises(InputError, match=r"10\.13\.3.*10\.14 or later"):
        TensorRTEngine(folder, manifest)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(InputError, match="pip install tensorrt"):
        TensorRTEngine(folder, manifest)


def test_load_draft_takes_an_engine_of_tensorrt(trt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = built(trt, "llama", WINDOW)
    monkeypatch.setattr(
        "trtllm_specprefill.draft.load.engine_model", lambda *_: described(small("llama"))
    )
    monkeypatch.setattr("trtllm_specprefill.draft.load.local_fingerprint", lambda *_: None)
    monkeypatch.setattr("trtllm_specprefill.draft.tensorrt.CudaMemory", lambda _: HostMemory())
    draft = load_draft("tensorrt", path=str(folder))
    assert draft.score(fresh_ids(60), READS).scores.any()
