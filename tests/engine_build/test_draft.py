"""`python -m engine_build draft`: what it builds, what it takes up again, what it refuses."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
import pytest
import torch
from filelock import FileLock

from engine_build import choices
from engine_build import draft as build_module
from engine_build import stages as stages_module
from engine_build.__main__ import app
from engine_build.choices import DraftBuild
from engine_build.commands import BuildFailed
from engine_build.draft import build_draft
from engine_build.probe import TOLERANCE
from tests.contracts.tensorrt_draft import HostMemory, install
from tests.engine_build.drafts import files_of_at_most
from tests.plugins.layers import ROOT
from tests.test_judges import random_model
from trtllm_specprefill import SpecPrefill
from trtllm_specprefill.draft.engine import Engine
from trtllm_specprefill.draft.engine import read as engine_read
from trtllm_specprefill.draft.graph import GraphDraft
from trtllm_specprefill.draft.load import load_draft
from trtllm_specprefill.draft.manifest import GRAPH, MANIFEST, DraftManifest
from trtllm_specprefill.draft.tensorrt import ENGINE, TensorRTEngine
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.models import Model, engine_model, load_model
from trtllm_specprefill.plan import Reason
from trtllm_specprefill.settings import Settings
from trtllm_specprefill.target.torch import TorchTarget

CALIBRATION = "The clerk writes every ship that calls into the register, twice, in ink. " * 60


@pytest.fixture(scope="module")
def model(byte_level: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random model's folder."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(4)
    made = random_model("llama", byte_level, vocab_size=len(byte_level))
    made.module.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "calibration.txt"
    file.write_text(CALIBRATION, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> DraftBuild:
    """A finished fp32 build for onnxruntime; copied by whoever changes it."""
    out = tmp_path_factory.mktemp("build") / "engine"
    build = DraftBuild(model, out, precision="fp32", layers=2, max_tokens=400)
    build_draft(build, lambda line: None)
    return build


@pytest.fixture
def copied(whole: DraftBuild, tmp_path: Path) -> DraftBuild:
    shutil.copytree(whole.out, tmp_path / "engine")
    return replace(whole, out=tmp_path / "engine")


def quietly(build: DraftBuild) -> dict[str, bool]:
    """Build; which stages were made."""
    return build_draft(build, lambda line: None).made


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_torch_takes_its_place(unfinished: DraftBuild) -> None:
    """What a build left that did not finish serves nobody, and prompts are pruned all the same."""
    draft = load_draft(
        "onnx",
        unfinished.model,
        path=str(unfinished.out),
        fallback="torch",
        device="cpu",
        dtype="float32",
    )
    target = TorchTarget(load_model(unfinished.model, "float32", "cpu"))
    asked = {"threshold": 0, "min_keep_tokens": 0, "keep": 0.4, "max_tokens": 1}
    plan = SpecPrefill(draft, target).generate(CALIBRATION[:600], **asked).plan
    assert plan.reason is Reason.PRUNED
    assert f"made by `python -m engine_build draft`, with {MANIFEST}" in plan.detail


# --- what is built


def test_a_built_draft_scores_as_torch_does(whole: DraftBuild) -> None:
    draft = load_draft("onnx", path=str(whole.out), device="cpu", threads=1)
    judge = TorchDraft(load_model(whole.model, "float32", "cpu"))
    ids = np.random.default_rng().integers(3, 200, 333).astype(np.int32)
    asked = Settings(draft_window=0, draft_layers=2)
    found, expected = draft.score(ids, asked), judge.score(ids, asked)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-4)
    assert files(whole.out) == {GRAPH, MANIFEST, "build.json", "probe.json"}
    manifest = DraftManifest.read(whole.out)
    assert (manifest.precision, manifest.mode, manifest.layers) == ("fp32", "window", 2)
    assert set(manifest.files) == {GRAPH}
    assert manifest.probe.tolerance == 1e-3


def test_an_fp8_draft_with_look_ahead_and_chosen_heads_runs_under_onnxruntime(
    model: str, text: Path, tmp_path: Path
) -> None:
    pytest.importorskip("modelopt")
    heads = [[0, 3], [], [2]]
    (tmp_path / "heads.json").write_text(json.dumps(heads), encoding="utf-8")
    build = DraftBuild(
        model,
        tmp_path / "engine",
        mode="lookahead",
        heads=tmp_path / "heads.json",
        max_tokens=300,
        calibration=text,
    )
    built = build_draft(build, lambda line: None)
    manifest = built.manifest
    assert manifest.heads == ((0, 3), (), (2,))
    assert manifest.cache is not None
    assert (manifest.cache.layers, manifest.cache.dtype) == (3, "float32")
    assert manifest.calibration is not None
    assert "nvidia-modelopt" in manifest.versions
    graph = onnx.load(build.out / GRAPH)
    kinds = [node.op_type for node in graph.graph.node]
    # q, k and v read one tensor, gate and up another; o and down their own.
    assert kinds.count("QuantizeLinear") == 4 * 3
    assert kinds.count("DequantizeLinear") == 4 * 3 + 7 * 3
    draft = load_draft("onnx", path=str(build.out), device="cpu", threads=1)
    assert isinstance(draft, GraphDraft)
    assert 1e-5 < draft.probe_error < manifest.probe.tolerance


@pytest.mark.model
def test_layers_and_heads_are_the_librarys_own_unless_told(smollm2: Model, tmp_path: Path) -> None:
    draft = TorchDraft(smollm2)

    def baked(**options: Any) -> Any:
        build = DraftBuild("smollm2-135m", tmp_path, **options)
        return choices.Choices(build, lambda line: None).scoring

    found = baked()
    assert found.layers == draft.depth(Settings())
    assert found.heads == draft.scoring_heads(Settings())
    assert found.heads is not None
    found = baked(layers=7)
    assert (found.layers, found.heads) == (7, draft.scoring_heads(Settings(draft_layers=7)))
    found = baked(mode="lookahead")
    assert (found.layers, found.heads, found.queries, found.votes) == (30, None, 9, "mean")


def test_a_window_draft_is_tuned_for_what_it_is_fed_and_takes_little_more(model: str) -> None:
    read: list[tuple[int, ...]] = []

    class Reads(Engine):
        batch = choices.MOST_BATCH["window"]

        def read(self, input_ids: Any, *_: Any) -> Any:
            read.append(input_ids.shape)
            return np.zeros(input_ids.shape, dtype=np.float32)

        def begin(self, batch: int, capacity: int) -> NoReturn:
            raise AssertionError

    made = choices.Choices(DraftBuild(model, Path(), layers=2), lambda line: None)
    (prefill,) = made.profiles()
    _, batch, most_batch = prefill.spans["batch"]
    _, tokens, most = prefill.spans["tokens"]
    windows = TorchDraft(load_model(model, "float32", "cpu")).windows(50_000, Settings(), None)
    engine_read(Reads(), [*windows.tokens], [1] * len(windows.tokens))
    assert read[0] == (batch, tokens)
    assert read.count(read[0]) >= len(read) - 1
    assert (most_batch, made.max_batch) == (batch, batch)
    assert tokens < most == made.max_tokens < 2 * tokens
    asked = DraftBuild(model, Path(), layers=2, max_tokens=2048, max_batch=3)
    (prefill,) = choices.Choices(asked, lambda line: None).profiles()
    assert prefill.spans == {"batch": (1, 3, 3), "tokens": (1, tokens, 2048)}


def test_limits_and_tolerances_are_those_that_the_documentation_states() -> None:
    text = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    for option, most in (("tokens", choices.MOST_TOKENS), ("batch", choices.MOST_BATCH)):
        stated = f"{most['window']}, with `lookahead` {most['lookahead']}"
        assert f"| `--max-{option}` | {stated} |" in text
    tolerances = [f"{value:g} in {precision}" for precision, value in TOLERANCE.items()]
    assert ", ".join(tolerances) in text


def test_a_look_ahead_draft_takes_keys_and_values_of_one_prompt_unless_told(model: str) -> None:
    build = DraftBuild(model, Path(), mode="lookahead")
    prefill, step = choices.Choices(build, lambda line: None).profiles()
    assert prefill.spans["batch"] == step.spans["batch"] == (1, 1, 1)
    told = choices.Choices(replace(build, max_batch=4), lambda line: None)
    assert [profile.spans["batch"] for profile in told.profiles()] == [(1, 1, 4)] * 2


def test_an_engine_of_tensorrt_is_built_and_scores(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trt = install(monkeypatch)
    build = DraftBuild(
        model,
        tmp_path / "engine",
        runtime="tensorrt",
        precision="fp32",
        mode="lookahead",
        max_tokens=300,
        sm=(90,),
    )
    manifest = build_draft(build, lambda line: None).manifest
    assert manifest.versions["tensorrt"] == trt.__version__
    assert (manifest.max_tokens, manifest.max_batch) == (300, 1)
    assert set(manifest.files) == {ENGINE}
    assert (build.out / "timing.cache").is_file()
    engine = TensorRTEngine(build.out, manifest, memory=HostMemory())
    draft = GraphDraft(build.out, manifest, engine_model(model), engine)
    assert draft.probe_error < 1e-4


@pytest.mark.slow
def test_a_plugin_build_holds_the_plugin_in_the_functions_place(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    # Its registration is TensorRT's own Python layer's affair: tests/plugins.
    monkeypatch.setitem(sys.modules, "plugins.importance.tensorrt_plugin", sys)
    build = DraftBuild(
        model,
        tmp_path / "engine",
        runtime="tensorrt",
        precision="bf16",
        scorer="plugin",
        layers=2,
        max_tokens=300,
        sm=(90,),
    )
    manifest = build_draft(build, lambda line: None).manifest
    assert manifest.kernels is not None
    graph = onnx.load(build.out / GRAPH)
    own = [node.op_type for node in graph.graph.node if node.domain == "specprefill"]
    assert own == ["importance_lse", "importance_pool"] * 2
    assert not [function for function in graph.functions if function.domain == "specprefill"]


def test_the_command_takes_its_options_and_prints_what_was_built(
    copied: DraftBuild, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", copied.model, "--out", str(copied.out), "--precision", "fp32"]
    asked += ["--layers", "2", "--max-tokens", "400", "--json"]
    app(["draft", *asked], standalone_mode=False)
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    stated = DraftManifest.model_validate_json(json.dumps(found["manifest"]))
    assert stated == DraftManifest.read(copied.out)
    assert found["made"] == {"graph": False, "probe": False}
    assert found["bytes"] == {GRAPH: (copied.out / GRAPH).stat().st_size}
    assert "graph: as it was built before" in shown.err
    with pytest.raises(InputError, match=r"precision: got .int8.*fp32, bf16 or fp8"):
        app(["draft", *asked[:4], "--precision", "int8"], standalone_mode=False)


# --- resuming


def test_the_same_command_makes_nothing_anew(copied: DraftBuild) -> None:
    before = (copied.out / MANIFEST).read_bytes()
    assert quietly(copied) == {"graph": False, "probe": False}
    assert (copied.out / MANIFEST).read_bytes() == before


def test_only_what_changed_is_built_anew(copied: DraftBuild) -> None:
    longer = replace(copied, max_tokens=300)
    assert quietly(longer) == {"graph": False, "probe": True}
    assert DraftManifest.read(copied.out).max_tokens == 300
    with (copied.out / GRAPH).open("r+b") as file:  # a file that is not what was written
        file.seek(1000)
        file.write(b"broken")
    assert quietly(longer) == {"graph": True, "probe": False}


def test_a_build_that_is_interrupted_goes_on_with_the_stage_that_was_not_finished(
    copied: DraftBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    (copied.out / "probe.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "probe_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quietly(copied)
    assert files(copied.out) == {GRAPH, MANIFEST, "build.json"}
    assert quietly(copied) == {"graph": False, "probe": True}


@pytest.mark.slow
def test_a_build_killed_between_a_file_and_its_record_builds_it_again(
    copied: DraftBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> Any:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(stages_module.Stages, "_write_record", killed)
        with pytest.raises(SystemExit):
            quietly(replace(copied, layers=1))
    assert MANIFEST not in files(copied.out)  # the graph is another's by now
    assert quietly(copied)["graph"]
    assert DraftManifest.read(copied.out).layers == 2


@pytest.mark.slow
def test_a_killed_process_leaves_finished_stages_and_nothing_that_looks_finished(
    model: str, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "engine"
    command = [sys.executable, "-m", "engine_build", "draft", "--model", model, "--out", str(out)]
    command += ["--layers", "2", "--max-tokens", "300", "--calibration", str(text)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "torch exports" in line:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    assert not {MANIFEST, GRAPH} & files(out)
    assert_torch_takes_its_place(DraftBuild(model, out))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "calibration: as it was built before" in done.stderr
    assert files(out) == {GRAPH, MANIFEST, "build.json", "calibration.json", "probe.json"}


# --- what fails


def test_a_disk_that_is_full_is_named_and_nothing_is_left(
    whole: DraftBuild, tmp_path: Path
) -> None:
    build = replace(whole, out=tmp_path / "engine")
    said = r"graph: cannot be written to .*engine: File too"
    with files_of_at_most(20_000), pytest.raises(BuildFailed, match=said):  # the graph is larger
        quietly(build)
    assert not build.out.exists()
    assert_torch_takes_its_place(build)


def test_a_disk_that_fills_up_later_keeps_the_finished_stages(
    copied: DraftBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    build = replace(copied, max_tokens=320)
    with monkeypatch.context() as patch:
        patch.setattr(DraftManifest, "write", full)
        with pytest.raises(BuildFailed, match=r"engine\.json: cannot be .*No space left"):
            quietly(build)
    assert files(copied.out) == {GRAPH, "build.json", "probe.json"}
    assert_torch_takes_its_place(build)
    assert quietly(build) == {"graph": False, "probe": False}


def test_a_wrong_model_directory_is_named_and_no_folder_is_made(model: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "model.safetensors").unlink()
    for folder in (tmp_path / "nowhere", empty, bare):
        build = DraftBuild(str(folder), tmp_path / "engine", precision="fp32", max_tokens=300)
        with pytest.raises(InputError, match="model"):
            quietly(build)
        assert not build.out.exists()


def test_a_folder_that_another_build_writes_is_refused(copied: DraftBuild) -> None:
    with FileLock(copied.out / ".lock"), pytest.raises(InputError, match="no other build"):
        quietly(copied)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"scorer": "plugin"}, "scorer: got 'plugin'.*onnx takes no"),
        ({"scorer": "plugin", "runtime": "tensorrt-rtx"}, "scorer: got 'plugin'.*rtx takes no"),
        ({"precision": "bf16"}, "precision: got 'bf16'.*fp32 or fp8"),
        ({"sm": (89,)}, "sm: .*runtime onnx"),
        ({"runtime": "tensorrt-rtx", "sm": (80,)}, "sm: got 80.*89 or later for fp8"),
        ({"runtime": "tensorrt", "sm": (89, 90)}, "sm: .*at most one"),
        ({"max_batch": 0}, "max_batch: got 0"),
        ({"max_tokens": 9}, "max_tokens: got 9.*16 to"),
        ({"max_tokens": 10**6}, "max_tokens: got 1000000.*positions of"),
        ({"layers": 9}, "layers: got 9.*1 to 4"),
        ({"heads": Path("nowhere.json")}, r"heads: got 'nowhere\.json'.*JSON"),
        ({"calibration": Path("nowhere.txt")}, r"calibration: .*nowhere\.txt"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_built(
    options: dict[str, Any], named: str, model: str, tmp_path: Path
) -> None:
    build = DraftBuild(model, tmp_path / "engine", **{"max_tokens": 300, **options})
    with pytest.raises(InputError, match=named):
        quietly(build)
    assert not build.out.exists()


@pytest.mark.parametrize(
    ("apt", "said"),
    [
        ("", "apt-get is not here"),
        ("echo 'E: Unable to locate package' >&2; exit 100", "E: Unable"),
    ],
)
def test_without_the_handbook_the_way_out_is_named_and_nothing_is_left(
    apt: str, said: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("apt-get", "dpkg-deb") if apt else ():
        (programs / name).write_text(f"#!/bin/sh\n{apt}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("SPECPREFILL_CACHE", str(tmp_path / "cache"))
    build = DraftBuild(model, tmp_path / "engine", layers=2)
    with pytest.raises(InputError, match=f"calibration: got None.*--calibration FILE.*{said}"):
        quietly(build)
    assert not build.out.exists()


def test_tensorrt_builds_for_the_gpu_that_is_here_and_no_other(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "_this_gpu", lambda: 90)
    build = DraftBuild(model, tmp_path / "engine", runtime="tensorrt", sm=(89,))
    with pytest.raises(InputError, match=r"sm: got \(89,\).*90, this GPU's"):
        quietly(build)


@pytest.mark.parametrize("content", ["", "7", "[[0], 3]", '[["a"]]', "[[true]]"])
def test_a_heads_file_that_is_none_says_what_one_is(content: str, tmp_path: Path) -> None:
    (tmp_path / "heads.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=r"such as \[\[0, 3\], \[\], \[5\]\]"):
        choices.read_heads(tmp_path / "heads.json")
