"""Drafts that were built ahead: what is refused at load, what is refused of a prompt, and how."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from engine_build.module_engine import ModuleEngine
from engine_build.scoring_model import Scoring, ScoringModel
from tests.contracts.tensorrt_draft import install
from tests.engine_build import drafts
from tests.engine_build.drafts import described, fresh_ids, manifest_of, small
from tests.test_judges import random_model
from trtllm_specprefill import SpecPrefill, cli
from trtllm_specprefill.draft.graph import GraphDraft
from trtllm_specprefill.draft.load import UnusableDraft, engine_kind, load_draft
from trtllm_specprefill.draft.manifest import GRAPH, MANIFEST, DraftManifest, EngineRefused
from trtllm_specprefill.draft.onnx import OnnxEngine
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.errors import (
    Cancelled,
    ContextTooLong,
    DraftFailed,
    InputError,
    SpecPrefillError,
)
from trtllm_specprefill.fetch import sha256_of
from trtllm_specprefill.forward import interruptible
from trtllm_specprefill.models import Model, load_model
from trtllm_specprefill.plan import Reason
from trtllm_specprefill.serving.orchestrator import importance_tensors, read_importance
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.settings import Settings
from trtllm_specprefill.target.torch import TorchTarget

WINDOW = Scoring("window", 2, queries=24)
AHEAD = Scoring("lookahead", 4, queries=5, votes="mean")
ASKED = Settings(window=24, draft_window=150)


def made(
    scoring: Scoring = WINDOW,
    model: Model | None = None,
    engine: Any = None,
    **changes: Any,
) -> GraphDraft:
    """A draft over torch itself, with some of its manifest changed."""
    model = model or small("llama")
    manifest = manifest_of(small("llama"), scoring)
    manifest = DraftManifest(**{**manifest.model_dump(), **changes})
    engine = engine or ModuleEngine(ScoringModel(small("llama"), scoring).eval())
    return GraphDraft("folder", manifest, described(model), engine)


# --- the manifest


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    for scoring in (WINDOW, AHEAD, Scoring("window", 2, ((1,), (0, 2)))):
        manifest = manifest_of(small("llama"), scoring)
        manifest.write(tmp_path)
        assert DraftManifest.read(tmp_path) == manifest
        assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pool": 12}, "pool: got 12"),
        ({"layers": "2"}, "layers"),
        ({"mode": "lookahead"}, "cache"),
        ({"runtime": "openvino"}, "runtime"),
        ({"depth": 2}, "depth"),
        ({"heads": [[0]]}, "heads: got 1"),
        ({"max_tokens": 20}, "probe.ids: got 60"),
        ({"queries": 0}, "queries"),
        ({"probe": {"ids": [1], "importance": [0.5, 0.5], "tolerance": 0.1}}, "2 scores for 1"),
    ],
)
def test_a_manifest_with_a_field_that_cannot_be_names_it(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    manifest_of(small("llama"), WINDOW).write(tmp_path)
    path = tmp_path / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError, match=words):
        DraftManifest.read(tmp_path)


@pytest.mark.parametrize("content", [None, b"{", b"\xff\xfe", b"[]"])
def test_a_folder_without_a_readable_manifest_says_what_makes_one(
    content: bytes | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(InputError, match=r"manifest|engine_build draft"):
        DraftManifest.read(tmp_path)


def test_a_manifest_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValidationError):
        manifest_of(small("llama"), WINDOW).pool = 5  # type: ignore[misc]


# --- at load


def test_an_engine_of_another_tokenizer_is_refused_by_the_field_that_differs() -> None:
    other = replace(small("llama"), tokenizer=drafts.Ids(salt=1))
    with pytest.raises(EngineRefused, match=r"tokenizer_hash: got '\w{16}', .*tokenizer of llama"):
        made(model=other)


def test_an_engine_deeper_than_the_model_is_refused() -> None:
    shallow = random_model("llama", drafts.Ids(), num_hidden_layers=1)
    with pytest.raises(EngineRefused, match=r"layers: got 2, .*at most 1"):
        made(model=shallow)


class Wrong(ModuleEngine):
    """An engine whose scores are not what they should be."""

    def __init__(self, change: Callable[[Any], Any], scoring: Scoring = WINDOW) -> None:
        super().__init__(ScoringModel(small("llama"), scoring).eval())
        self.change = change

    def read(self, *inputs: Any) -> Any:
        return self.change(super().read(*inputs))


def test_an_engine_that_scores_its_probe_differently_is_refused_with_the_numbers() -> None:
    figures = np.array(manifest_of(small("llama"), WINDOW).probe.importance)
    at, most = 17, figures.max()

    def off(by: float) -> Wrong:
        def change(scores: Any) -> Any:
            scores = scores.copy()
            scores[:, at] += by * most
            return scores

        return Wrong(change)

    words = (
        rf"probe\.importance: got '{figures[at] + 0.002 * most:.6g} at token 17'.*{figures[at]:.6g}"
    )
    with pytest.raises(EngineRefused, match=words + r".*off by at most 0\.001 .*off by 0\.002"):
        made(engine=off(0.002))
    assert made(engine=off(0.0005)).probe_error == pytest.approx(0.0005, rel=0.05)


def test_an_engine_whose_probe_is_not_a_number_or_does_not_run_is_refused() -> None:
    with pytest.raises(EngineRefused, match="nan at token 0"):
        made(engine=Wrong(lambda scores: scores * np.nan))

    def fails(scores: Any) -> Any:
        raise RuntimeError("no kernel image")

    with pytest.raises(EngineRefused, match="no kernel image"):
        made(engine=Wrong(fails))


class Babbling(ModuleEngine):
    """An engine that scores as it should and decodes other tokens."""

    def begin(self, batch: int, capacity: int) -> Any:
        inner = super().begin(batch, capacity)
        step = inner.step

        def babble(*inputs: Any) -> Any:
            rows, tokens = step(*inputs)
            return rows, tokens + 1

        inner.step = babble  # type: ignore[method-assign]
        return inner


def test_an_engine_that_decodes_other_tokens_of_the_probe_is_refused() -> None:
    tokens = manifest_of(small("llama"), AHEAD).probe.next_tokens
    babbling = Babbling(ScoringModel(small("llama"), AHEAD).eval())
    with pytest.raises(EngineRefused, match=r"probe\.next_tokens.*" + str(tokens[2])):
        made(AHEAD, engine=babbling)
    # Rounding moves a token where two are as likely: coarser engines are judged by scores.
    assert made(AHEAD, engine=babbling, precision="bf16").probe_error < 1e-3


# --- of a prompt


def test_any_length_is_read_in_windows_and_a_longer_one_at_once_names_the_limit() -> None:
    draft = made(max_tokens=200)
    ids = fresh_ids(900)
    expected = TorchDraft(replace(small("llama"), context_length=200)).score(
        ids, Settings(window=24, draft_layers=2)
    )
    np.testing.assert_allclose(draft.score(ids, Settings(window=24)).scores, expected.scores)
    with pytest.raises(ContextTooLong, match=r"201 draft tokens.*at most 200, max_tokens of the"):
        draft.score(ids[:201], Settings(draft_window=0, window=24))
    assert draft.score(ids[:200], Settings(draft_window=0, window=24)).scores.shape == (200,)


def test_look_ahead_beyond_the_engines_tokens_names_the_limit() -> None:
    draft = made(AHEAD, max_tokens=80)
    asked = Settings(scoring="lookahead", look_ahead=4)
    assert draft.score(fresh_ids(76), asked).scores.shape == (76,)
    with pytest.raises(ContextTooLong, match=r"77 draft tokens and 4.*max_tokens of the engine"):
        draft.score(fresh_ids(77), asked)


@pytest.mark.parametrize(
    ("scoring", "knobs", "words"),
    [
        (WINDOW, {"scoring": "lookahead"}, "scoring 'lookahead' .* built with 'window'"),
        (WINDOW, {"pool": 5}, "pool 5 .* built with 13"),
        (WINDOW, {"votes": "mean"}, "votes 'mean' .* built with 'max'"),
        (WINDOW, {"draft_layers": 3}, "draft_layers 3 .* built with 2"),
        (WINDOW, {"window": 25}, "window 25 .* at most 24"),
        (AHEAD, {"scoring": "lookahead", "look_ahead": 5}, "look_ahead 5 .* at most 4"),
    ],
)
def test_settings_that_are_not_built_in_fail_the_draft_and_are_named(
    scoring: Scoring, knobs: dict[str, Any], words: str
) -> None:
    draft = made(scoring)
    with pytest.raises(DraftFailed, match=words):
        draft.score(fresh_ids(100), Settings(**{"window": 24, **knobs}))


def test_fewer_voters_and_fewer_steps_than_were_built_are_taken() -> None:
    ids = fresh_ids(120)
    judge = TorchDraft(small("llama"))
    for scoring, asked in (
        (WINDOW, Settings(window=7, draft_layers=2)),
        (AHEAD, Settings(scoring="lookahead", look_ahead=2)),
    ):
        found, expected = made(scoring).score(ids, asked), judge.score(ids, asked)
        assert found.queries == expected.queries
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4, atol=1e-7)


@hypothesis.settings(max_examples=15)
@given(data=st.data(), family=st.sampled_from(["llama", "gemma3"]))
def test_ragged_batches_in_any_pieces_score_as_each_prompt_alone_under_torch(
    data: st.DataObject, family: str
) -> None:
    model, steps = small(family), data.draw(st.integers(0, 6))
    prompts = [
        fresh_ids(n) for n in data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    ]
    scoring = Scoring("lookahead", 4, queries=7, votes="mean")
    engine = ModuleEngine(ScoringModel(model, scoring).eval())
    engine.batch, engine.piece = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 100))
    draft = GraphDraft("folder", manifest_of(model, scoring), described(model), engine)
    asked = Settings(scoring="lookahead", look_ahead=steps)
    judge = TorchDraft(model)
    for ids, found in zip(prompts, draft.score_batch(prompts, asked), strict=True):
        expected = judge.score(ids, asked)
        assert (found.layers, found.queries) == (expected.layers, expected.queries)
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4, atol=1e-7)


def test_a_draft_none_of_whose_layers_sees_the_whole_prompt_fails() -> None:
    model = small("gemma3")  # its first layer has a window of 64
    scoring = Scoring("window", 1, queries=24)
    engine = ModuleEngine(ScoringModel(model, scoring).eval())
    draft = GraphDraft("folder", manifest_of(model, scoring), described(model), engine)
    whole = Settings(draft_window=0, window=24)
    assert draft.score(fresh_ids(64), whole).layers == (0,)
    with pytest.raises(DraftFailed, match="no layer"):
        draft.score(fresh_ids(65), whole)


def test_scoring_can_be_stopped_between_two_calls_of_the_engine() -> None:
    for scoring, asked in ((WINDOW, ASKED), (AHEAD, Settings(scoring="lookahead", look_ahead=4))):
        draft = made(scoring)
        draft._engine.batch, draft._engine.piece = 1, 50
        looks: list[None] = []

        def check(looks: list[None] = looks) -> None:
            looks.append(None)
            if len(looks) == 3:
                raise Cancelled

        with pytest.raises(Cancelled), interruptible(check):
            draft.score(fresh_ids(390), asked)


# --- the pipeline


@pytest.fixture(scope="module")
def text_model(byte_level: PreTrainedTokenizerFast) -> Model:
    torch.manual_seed(3)
    return random_model("llama", byte_level, vocab_size=len(byte_level))


@pytest.fixture(scope="module")
def text_folder(text_model: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model's own folder, and an engine's made of it."""
    own = tmp_path_factory.mktemp("model")
    text_model.module.save_pretrained(own)
    text_model.tokenizer.save_pretrained(own)
    model = load_model(str(own), "float32", "cpu")
    return own, drafts.build(model, WINDOW, 300)


KNOBS: dict[str, Any] = {"threshold": 0, "min_keep_tokens": 0, "keep": 0.4, "max_tokens": 2}


def test_the_pipeline_prunes_with_an_engine_as_with_torch(
    text_model: Model, text_folder: tuple[Path, Path], prose: str
) -> None:
    own, engine = text_folder
    target = TorchTarget(text_model)
    draft = load_draft("onnx", str(own), path=str(engine), device="cpu", threads=1)
    asked = {**KNOBS, "window": 24, "draft_layers": 2}
    found = SpecPrefill(draft, target).generate(prose[:3000], **asked)
    judge = TorchDraft(replace(text_model, context_length=300))  # the engine's tokens
    expected = SpecPrefill(judge, target).generate(prose[:3000], **asked)
    assert found.plan.reason is Reason.PRUNED
    np.testing.assert_array_equal(found.plan.input_ids, expected.plan.input_ids)


def test_the_pipeline_reads_in_full_what_the_engine_cannot_score_and_says_why(
    text_model: Model, text_folder: tuple[Path, Path], prose: str
) -> None:
    draft = load_draft("onnx", path=str(text_folder[1]), device="cpu", threads=1)
    pipeline = SpecPrefill(draft, TorchTarget(text_model))
    for knobs, reason, words in (
        ({"draft_window": 0}, Reason.CONTEXT_TOO_LONG, "max_tokens of the engine"),
        ({"pool": 5}, Reason.DRAFT_FAILED, "built with 13"),
    ):
        asked = {**KNOBS, "window": 24, **knobs}
        answered = pipeline.generate(prose[:3000], **asked)
        assert answered.plan.reason is reason
        assert words in answered.plan.detail
        with pytest.raises(SpecPrefillError, match=words):
            pipeline.generate(prose[:3000], strict=True, **asked)


def changed_manifest(folder: Path, **fields: Any) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def wrong_figures(folder: Path) -> None:
    probe = json.loads((folder / MANIFEST).read_text())["probe"]
    probe["importance"][3] += 1
    changed_manifest(folder, probe=probe)


def cut_graph(folder: Path) -> None:
    (folder / GRAPH).write_bytes((folder / GRAPH).read_bytes()[:1000])


# What is wrong with an engine, and the word by which it is named.
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "graph": (cut_graph, f"files.{GRAPH}"),
    "no manifest, as a killed build leaves it": (lambda f: (f / MANIFEST).unlink(), MANIFEST),
    "probe": (wrong_figures, "probe.importance"),
    "other tokenizer": (lambda f: changed_manifest(f, tokenizer_hash="0" * 16), "tokenizer_hash"),
    "other weights": (lambda f: changed_manifest(f, model_hash="0" * 16), "model_hash"),
    "other TensorRT": (
        lambda f: changed_manifest(f, runtime="tensorrt", versions={"tensorrt": "10.13.3"}),
        "versions.tensorrt",
    ),
}


@pytest.mark.parametrize("breaking", BROKEN)
def test_in_the_place_of_a_broken_engine_stands_what_was_chosen_and_says_so(
    breaking: str,
    text_model: Model,
    text_folder: tuple[Path, Path],
    prose: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    own, engine = text_folder
    broken = tmp_path / "engine"
    shutil.copytree(engine, broken)
    change, word = BROKEN[breaking]
    change(broken)
    where = {"path": str(broken), "device": "cpu", "dtype": "float32"}
    kind = "tensorrt" if word == "versions.tensorrt" else "onnx"
    told: list[str] = []

    def loaded(fallback: str) -> Any:
        return load_draft(kind, str(own), fallback=fallback, progress=told.append, **where)

    with pytest.raises(InputError, match=word):
        loaded("none")
    assert not told
    ids = text_model.tokenizer(prose[:2000])["input_ids"]
    torch_in_its_place = loaded("torch").score(np.array(ids, np.int32), ASKED)
    expected = TorchDraft(text_model).score(np.array(ids, np.int32), ASKED)
    np.testing.assert_allclose(torch_in_its_place.scores, expected.scores, rtol=1e-5)
    assert word in told[-1]
    pipeline = SpecPrefill(loaded("torch"), TorchTarget(text_model))
    pruned = pipeline.generate(prose[:3000], **KNOBS)
    assert pruned.plan.reason is Reason.PRUNED
    assert word in pruned.plan.detail
    dense = SpecPrefill(loaded("dense"), TorchTarget(text_model)).generate(prose[:3000], **KNOBS)
    assert isinstance(loaded("dense"), UnusableDraft)
    assert dense.plan.reason is Reason.DRAFT_FAILED
    assert word in dense.plan.detail


@pytest.mark.parametrize("fallback", ["torch", "dense", "none"])
def test_an_engine_whose_models_folder_is_gone_names_it_whatever_the_fallback(
    fallback: str, text_folder: tuple[Path, Path], tmp_path: Path
) -> None:
    """Without the model there is no tokenizer, so nothing can take the engine's place."""
    orphan = tmp_path / "engine"
    shutil.copytree(text_folder[1], orphan)
    changed_manifest(orphan, model=str(tmp_path / "gone"))
    with pytest.raises(InputError, match=r"model: .*gone"):
        load_draft("onnx", path=str(orphan), fallback=fallback, device="cpu")


def test_what_takes_an_engines_place_crosses_the_wire() -> None:
    importance = made().score(fresh_ids(50), ASKED)
    sent = replace(importance, detail="torch in its place")
    assert read_importance(importance_tensors(sent), 1.0).detail == "torch in its place"


# --- the door


def test_the_command_line_scores_and_answers_with_an_engine(
    text_folder: tuple[Path, Path],
    prose: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own, engine = text_folder
    (tmp_path / "prompt.txt").write_text(prose[:1500])
    (tmp_path / "nothing").mkdir()

    def told(command: str, folder: Path, *options: str) -> tuple[int, str, str]:
        given = ["--prompt", str(tmp_path / "prompt.txt"), "--draft-engine", str(folder)]
        knobs = ["--set", "window=24", "--device", "cpu", "--json", *options]
        monkeypatch.setattr(sys, "argv", ["specprefill", command, *given, *knobs])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    code, out, err = told("score", engine)
    assert code == 0, err
    tokens = json.loads(out)["tokens"]
    ids = np.array([token["id"] for token in tokens], dtype=np.int32)
    draft = load_draft("onnx", path=str(engine), device="cpu")
    found = [token["importance"] for token in tokens]
    # The whole text asks: the tail is the same whether the question is named or not.
    np.testing.assert_allclose(found, draft.score(ids, Settings(window=24)).scores, rtol=1e-5)

    options = ["--target", str(own), "--threshold", "0", "--max-tokens", "2", "--keep", "0.4"]
    code, out, err = told("run", engine, *options, "--set", "min_keep_tokens=0")
    assert code == 0, err
    report = json.loads(out)
    assert (report["reason"], report["prompt_tokens"]) == ("pruned", ids.size)
    for command in ("score", "run"):
        code, out, _ = told(command, tmp_path / "nothing")
        error = json.loads(out)["error"]
        assert (code, error["field"], error["value"]) == (2, "draft_engine", f"{tmp_path}/nothing")
        assert "engine_build draft" in error["allowed"]


def test_an_engine_of_other_weights_under_the_same_tokenizer_is_refused(
    text_model: Model, text_folder: tuple[Path, Path], tmp_path: Path
) -> None:
    own, engine = text_folder
    other = tmp_path / "tuned"
    shutil.copytree(own, other)
    module = copy.deepcopy(text_model.module)
    with torch.no_grad():
        module.lm_head.weight += 0.01
    module.save_pretrained(other)
    load_draft("onnx", str(own), path=str(engine), device="cpu")
    with pytest.raises(EngineRefused, match=r"model_hash: got '\w{16}'.*weights of .*tuned"):
        load_draft("onnx", str(other), path=str(engine), device="cpu")
    # Without weights on this disk there is nothing to compare: a served engine needs none.
    (other / "model.safetensors").unlink()
    load_draft("onnx", str(other), path=str(engine), device="cpu")


def test_a_draft_is_asked_for_by_words_that_are_known(text_folder: tuple[Path, Path]) -> None:
    own, engine = text_folder
    assert engine_kind(str(engine)) == "onnx"
    with pytest.raises(InputError, match=r"draft: got 'openvino', .*torch, onnx, tensorrt"):
        load_draft("openvino", str(own))
    with pytest.raises(InputError, match=r"fallback: got 'maybe', .*torch, dense, none"):
        load_draft("onnx", str(own), path=str(engine), fallback="maybe")
    with pytest.raises(InputError, match="path: got ''"):
        load_draft("onnx", str(own))


def test_a_server_is_told_of_an_engine_in_its_settings() -> None:
    settings = ServeSettings.of({"draft": {"backend": "onnx", "path": "engines/draft"}})
    assert (settings.draft.path, settings.draft.fallback) == ("engines/draft", "torch")
    assert ServeSettings().draft.backend == "torch"
    with pytest.raises(InputError, match=r"draft\.backend"):
        ServeSettings.of({"draft": {"backend": "openvino"}})


def test_onnxruntime_takes_no_engine_that_is_not_for_it_and_no_device_it_has_not(
    text_folder: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = text_folder[1]
    manifest = DraftManifest.read(folder)
    for changes, word in (
        ({"runtime": "tensorrt"}, "runtime"),
        ({"precision": "bf16"}, "precision"),
    ):
        with pytest.raises(EngineRefused, match=word):
            OnnxEngine(folder, manifest.model_copy(update=changes), "cpu")
    (tmp_path / GRAPH).write_bytes(b"no graph")
    files = {GRAPH: sha256_of(tmp_path / GRAPH)}
    with pytest.raises(InputError, match="a graph that onnxruntime takes"):
        OnnxEngine(tmp_path, manifest.model_copy(update={"files": files}), "cpu")
    with pytest.raises(InputError, match=f"a folder with {GRAPH}"):
        OnnxEngine(tmp_path / "empty", manifest, "cpu")
    with pytest.raises(InputError, match="device: got 'npu'"):
        OnnxEngine(folder, manifest, "npu")
    with pytest.raises(InputError, match="onnxruntime-gpu"):
        OnnxEngine(folder, manifest, "cuda:1")


def test_without_onnxruntime_the_error_says_what_to_install(
    text_folder: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(SpecPrefillError, match=r"trtllm-specprefill\[onnx\]"):
        load_draft("onnx", path=str(text_folder[1]))
