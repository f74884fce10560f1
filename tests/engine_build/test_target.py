"""What a build of a target would run, and the limits it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from typer.testing import CliRunner

from engine_build.__main__ import app
from engine_build.commands import BuildFailed, Command, run_all
from engine_build.description import describe
from engine_build.probes import probe_tokens
from engine_build.rotary_config import for_both, rotate_by_position_ids, write_rotation
from engine_build.target import TargetBuild
from tests.target.conftest import manifest_of
from tests.target.evidence import measured
from tests.target.rope import LLAMA3, YARN, with_rope
from tests.test_judges import Spelling, random_model
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.measured import write
from trtllm_specprefill.models import engine_model, local_fingerprint
from trtllm_specprefill.plan import PrunePlan
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.evidence import FOLDER, evidence_for
from trtllm_specprefill.target.manifest import DESCRIPTION, Manifest
from trtllm_specprefill.target.positions import Recorded, check_positions
from trtllm_specprefill.target.torch import TorchTarget

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
GOLDEN = {
    "llama-3.1-70b-fp8-tp8": ["llama-3.1-70b", "--precision", "fp8", "--tp", "8"],
    "llama-3.1-405b-fp8-tp8": ["llama-3.1-405b", "--precision", "fp8", "--tp", "8"],
    "qwen2.5-72b-pytorch": [
        *("qwen2.5-72b", "--backend", "pytorch", "--precision", "fp8", "--tp", "4"),
        *("--kept", "16384"),
    ],
}


def run(*arguments: str) -> str:
    """What the command line prints."""
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert not done.exit_code, done.output
    return done.stdout


def printed(name: str) -> str:
    model, *options = GOLDEN[name]
    where = f"tests/engine_build/configs/{model}"
    shown = run("target", "--model", where, "--out", f"engines/{name}", *options, "--dry-run")
    return shown.replace(str(ROOT), "CHECKOUT")


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_commands_are_those_committed(name: str) -> None:
    golden = HERE / "golden" / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(printed(name), encoding="utf-8")
    assert printed(name) == golden.read_text(encoding="utf-8")


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    where = HERE / "configs" / "llama-3.1-8b"
    run("target", "--model", str(where), "--out", str(tmp_path / "made"), "--dry-run")
    assert not list(tmp_path.iterdir())


def build_of(model: str = "llama-3.1-70b", **changes: Any) -> TargetBuild:
    build = TargetBuild(
        model=model,
        out=Path("engine"),
        backend="tensorrt",
        precision="fp8",
        tensor_parallel=8,
        pipeline_parallel=1,
        kept=30_000,
        prompt=120_000,
        output=1000,
        batch_size=8,
        chunk=8192,
        examples="examples",
        calibration="texts",
        record_probes=False,
    )
    return replace(build, **changes)


def config_of(model: str, **changes: Any) -> Any:
    config = AutoConfig.from_pretrained(HERE / "configs" / model)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def options_of(command: Command) -> dict[str, str]:
    words = command.arguments
    return {a: b for a, b in pairwise(words) if a.startswith("--")}


@pytest.mark.parametrize("backend", ["tensorrt", "pytorch"])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_every_flag_is_in_its_public_source(backend: Any, precision: Any) -> None:
    known = json.loads((HERE / "flags.json").read_text(encoding="utf-8"))
    build = build_of(backend=backend, precision=precision, record_probes=True)
    seen = set()
    for command in build.commands(config_of("llama-3.1-70b")):
        tool = next((t for t in known if any(a.endswith(t) for a in command.arguments)), None)
        if tool is None:
            assert command.arguments[0] == "cp" or "engine_build" in command.arguments
            continue
        seen.add(tool)
        for flag, value in options_of(command).items():
            allowed = known[tool]["flags"][flag]
            assert allowed is None or value in allowed, (flag, value)
    assert "trtllm-build" in seen or backend == "pytorch"


def test_the_two_lengths_are_kept_apart() -> None:
    build, config = build_of(), config_of("llama-3.1-70b")
    build.check(config)
    options = options_of(build.commands(config)[-1])
    assert options["--max_seq_len"] == "31000"  # what is kept, and the answer
    assert options["--max_input_len"] == "30000"
    manifest = build.manifest(config)
    assert (manifest.kv_tokens, manifest.positions) == (31_000, 121_000)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": 130_073}, r"prompt.*131072 positions"),
        ({"kept": 120_001}, r"kept.*120000"),
        ({"kept": 0}, "kept"),
        ({"tensor_parallel": 3}, r"tp.*64 heads"),
        ({"tensor_parallel": 0}, "tp"),
        ({"pipeline_parallel": 3}, r"pp.*80 layers"),
        ({"pipeline_parallel": 2}, r"pp.*no position ids"),
    ],
)
def test_a_limit_that_cannot_hold_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_of(**changes).check(config_of("llama-3.1-70b"))


def test_the_last_token_of_the_longest_answer_still_has_a_position() -> None:
    build_of(prompt=130_072).check(config_of("llama-3.1-70b"))


def test_families_that_cannot_be_rotated_are_refused() -> None:
    with pytest.raises(InputError, match=r"gemma.*llama"):
        build_of().check(config_of("llama-3.1-70b", model_type="gemma"))


def test_the_pytorch_backend_says_where_positions_do_not_reach() -> None:
    shown = run(
        *("target", "--model", str(HERE / "configs" / "llama-3.1-8b"), "--out", "made"),
        *("--backend", "pytorch", "--precision", "bf16", "--dry-run"),
    )
    assert "contiguous positions only" in shown
    assert '"original_positions": false' in shown
    build_of(backend="pytorch", pipeline_parallel=2).check(config_of("llama-3.1-70b"))


def test_a_qwen_config_that_rotates_by_position_ids_is_ordinary_rotary_embedding() -> None:
    text = (HERE / "configs" / "qwen2.5-72b" / "config.json").read_text(encoding="utf-8")
    before = json.loads(text)
    after = rotate_by_position_ids(before)
    rotary = after["rope_scaling"]
    assert rotary["mrope_section"] == [16, 24, 24]  # as Qwen2-VL has it, of 64
    assert sum(rotary["mrope_section"]) == 64
    assert after["disable_fuse_rope"] is True
    changed = {"rope_scaling", "rope_parameters", "rope_theta", "disable_fuse_rope"}
    assert {k: v for k, v in after.items() if k not in changed} == {
        k: v for k, v in before.items() if k not in changed
    }
    assert rotate_by_position_ids(after) == after
    # Three equal axes, cut into sections and put together again, are the one axis.
    embedding = Qwen2RotaryEmbedding(config=Qwen2Config(hidden_size=512, num_attention_heads=4))
    positions = torch.from_numpy(np.random.default_rng().integers(0, 30_000, (1, 50)))
    cos, _ = embedding(torch.zeros(1, 50, 512), positions)
    axes = cos[None, :, :, :64].expand(3, -1, -1, -1)
    parts = [p[i % 3] for i, p in enumerate(axes.split(rotary["mrope_section"], dim=-1))]
    assert torch.equal(torch.cat(parts, dim=-1), cos[..., :64])


def theta_of(config: Any) -> float:
    """As transformers 5 or 4 has it."""
    stated = getattr(config, "rope_parameters", None) or {}
    return float(stated.get("rope_theta") or config.rope_theta)


@pytest.mark.parametrize("written", ["by this transformers", "by 5", "by 4"])
def test_a_rotated_checkpoint_keeps_its_theta_for_whoever_reads_it(
    tmp_path: Path, written: str
) -> None:
    theta = float(np.random.default_rng().integers(2, 1000) * 5000)
    rope = {"rope_type": "default", "rope_theta": theta}
    with_rope(Qwen2Config, rope, hidden_size=512, num_attention_heads=4).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    if written != "by this transformers":
        stated = json.loads(path.read_text())
        for name in ("rope_parameters", "rope_scaling", "rope_theta"):
            stated.pop(name, None)
        stated |= {"rope_parameters": rope} if written == "by 5" else {"rope_theta": theta}
        path.write_text(json.dumps(stated))
    manifest_of("trtllm_llm").write(tmp_path)
    write_rotation(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert theta_of(config) == theta
    # TensorRT-LLM asks for the kind and the sections under the old name, whatever it runs on.
    assert config.rope_scaling["type"] == "mrope"
    assert sum(config.rope_scaling["mrope_section"]) == 64
    assert config.rope_scaling.get("factor", 1.0) == 1.0
    made = json.loads(path.read_text())  # transformers 4 has the theta beside the parameters
    assert made["rope_theta"] == made["rope_parameters"]["rope_theta"] == theta
    assert made["disable_fuse_rope"] is True


@pytest.mark.parametrize("rope", [LLAMA3, YARN, {"rope_type": "default", "rope_theta": 2e6}])
def test_a_checkpoint_that_is_not_rotated_is_read_alike_by_both(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    with_rope(LlamaConfig, rope, max_position_embeddings=131_072).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    stated = json.loads(path.read_text())
    for name in ("rope_parameters", "rope_scaling", "rope_theta"):
        stated.pop(name, None)
    path.write_text(json.dumps({**stated, "rope_parameters": rope}))  # as 5 writes it
    manifest_of("trtllm_llm", original_positions=False).write(tmp_path)
    write_rotation(tmp_path)
    made = json.loads(path.read_text())
    read_by_5 = AutoConfig.from_pretrained(tmp_path)
    assert theta_of(read_by_5) == made["rope_theta"] == rope["rope_theta"]
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    if rope["rope_type"] == "default":
        assert not made.get("rope_scaling")
    else:
        assert made["rope_scaling"] == scaling
        assert scaling.items() <= read_by_5.rope_scaling.items()
    assert for_both(made) == made
    by_4 = {**stated, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    assert for_both(by_4) == by_4
    by_layer = {"rope_parameters": {"full_attention": dict(rope)}}
    assert for_both(by_layer) == by_layer


def test_a_config_that_cannot_say_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="llama"):
        rotate_by_position_ids({"model_type": "llama"})
    yarn = {"factor": 4.0, "rope_theta": 1e6}
    for name, kind in (("rope_scaling", "type"), ("rope_parameters", "rope_type")):
        with pytest.raises(InputError, match=name):
            rotate_by_position_ids({"model_type": "qwen2", name: {kind: "yarn", **yarn}})
    with pytest.raises(InputError, match="engine"):
        write_rotation(tmp_path)


def test_the_positions_step_changes_the_checkpoint_in_place(tmp_path: Path) -> None:
    text = (HERE / "configs" / "qwen2.5-72b" / "config.json").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    manifest_of("trtllm_llm").write(tmp_path)
    run("positions", "--engine", str(tmp_path))
    made = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert made == rotate_by_position_ids(json.loads(text))


def test_recorded_probes_are_what_the_model_itself_answers_and_nothing_else_does() -> None:
    model = random_model("llama", Spelling())
    probes = probe_tokens(model)
    recorded = Recorded(probes.scattered, probes.contiguous)
    target = TorchTarget(model)

    def token(plan: PrunePlan) -> np.ndarray:
        shown = next(target.stream(plan, Sampling(max_tokens=1))).token_ids[0]
        return np.array([-1 if shown in model.eos_token_ids else shown])

    vocabulary = model.config.vocab_size
    assert check_positions(token, vocabulary, recorded).honoured
    other = probe_tokens(random_model("llama", Spelling()))
    wrong = Recorded(other.scattered, other.contiguous)
    assert not check_positions(token, vocabulary, wrong).honoured


@pytest.mark.parametrize(
    ("backend", "precision", "words"),
    [
        ("tensorrt", "fp8", r"up to 1\.3\.0rc20 have$"),
        ("tensorrt", "bf16", r"up to 1\.3\.0rc20 have$"),
        ("pytorch", "fp8", r"up to 1\.3\.0rc20 have.*1\.4 serve too"),
        ("pytorch", "bf16", None),
    ],
)
def test_a_version_that_no_longer_quantises_is_told_from_before_anything_is_written(
    tmp_path: Path, backend: Any, precision: Any, words: str | None
) -> None:
    build = build_of(backend=backend, precision=precision, examples=str(tmp_path))
    if words is None:
        build.check_examples()
        return
    with pytest.raises(InputError, match=rf"examples: .*{words}"):
        build.check_examples()
    (tmp_path / "quantization").mkdir()
    (tmp_path / "quantization" / "quantize.py").touch()
    build.check_examples()
    where = ("--model", str(HERE / "configs" / "qwen2.5-72b"), "--out", str(tmp_path / "made"))
    options = ("--backend", backend, "--precision", precision, "--kept", "8192")
    done = CliRunner().invoke(app, ["target", *where, *options, "--examples", str(tmp_path / "x")])
    assert isinstance(done.exception, InputError)
    assert not (tmp_path / "made").exists()


def test_a_build_runs_its_commands_in_order_and_stops_at_the_first_that_fails(
    tmp_path: Path,
) -> None:
    def touch(name: str, code: int = 0) -> Command:
        program = f"import os, pathlib, sys; pathlib.Path({str(tmp_path / name)!r}).write_text("
        program += f"os.environ['FOR']); sys.exit({code})"
        return Command(name, (sys.executable, "-c", program), {"FOR": name})

    said: list[str] = []
    with pytest.raises(BuildFailed, match="code 3"):
        run_all([touch("first"), touch("second", 3), touch("third")], said.append)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "second"]
    assert (tmp_path / "second").read_text() == "second"
    assert len(said) == 2
    with pytest.raises(BuildFailed, match="no-such-program"):
        run_all([Command("x", ("no-such-program",))], said.append)


def test_a_shown_command_is_one_that_a_shell_takes() -> None:
    command = Command("x", (sys.executable, "-c", "import sys; print(sys.argv[1:])", "--a", "b c"))
    done = subprocess.run(["bash", "-c", command.shown()], capture_output=True, text=True)
    assert done.stdout.strip() == "['--a', 'b c']"


@pytest.fixture
def qwen2(byte_level: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A small Qwen2 with weights and a tokenizer, in a folder."""
    where = tmp_path / "model"
    random_model("qwen2", byte_level, vocab_size=len(byte_level)).module.save_pretrained(where)
    byte_level.save_pretrained(where)
    return where


def test_a_bf16_checkpoint_is_copied_and_told_about_and_can_be_served_without_its_model(
    qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECPREFILL_CACHE", str(tmp_path / "cache"))
    known, fingerprint = engine_model(str(qwen2)), local_fingerprint(str(qwen2))
    assert fingerprint is not None
    one = measured(fingerprint, original=3, contiguous=20)
    write(tmp_path / "cache" / FOLDER / "mine.json", one)
    weights = (qwen2 / "model.safetensors").read_bytes()
    out = tmp_path / "engine"
    run(
        *("target", "--model", str(qwen2), "--out", str(out), "--backend", "pytorch"),
        *("--precision", "bf16", "--kept", "512", "--prompt", "1024", "--output", "64"),
    )
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(qwen2)
    assert (out / "model.safetensors").read_bytes() == weights
    assert json.loads((out / "config.json").read_text())["disable_fuse_rope"] is True
    manifest = Manifest.read(out)
    assert manifest.original_positions
    assert (manifest.model, manifest.fingerprint) == (str(qwen2), fingerprint)
    described = engine_model(manifest.described_in(out))
    text = "The key lies under the third stone. 敏捷的棕色狐狸"
    assert described.tokenizer.encode(text) == known.tokenizer.encode(text)
    assert described.tokenizer.chat_template == known.tokenizer.chat_template
    assert described.end_ids == known.end_ids
    assert described.config.to_diff_dict() == known.config.to_diff_dict()  # not the changed one
    assert evidence_for(fingerprint, out / FOLDER) == one
    assert evidence_for(fingerprint) is None


def test_of_another_model_nothing_is_left_beside_the_engine(qwen2: Path, tmp_path: Path) -> None:
    made = tmp_path / "engine"
    made.mkdir()
    build_of(model=str(qwen2)).manifest(config_of("llama-3.1-70b")).write(made)
    beside = made / DESCRIPTION
    beside.mkdir()
    for name in ("tokenizer.model", "vocab.json", "notes"):
        (beside / name).write_text("{}")
    describe(made)
    left = {path.name for path in beside.iterdir()}
    assert left == {p.name for p in qwen2.iterdir() if p.suffix != ".safetensors"} | {"notes"}
    describe(made)
    assert {path.name for path in beside.iterdir()} == left
    stated = json.loads((beside / "config.json").read_text())  # for transformers 4 and 5
    assert stated["rope_theta"] == theta_of(AutoConfig.from_pretrained(qwen2))
    (qwen2 / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="tokenizer"):
        describe(made)
