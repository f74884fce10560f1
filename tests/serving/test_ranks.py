"""What runs where for a target on several GPUs, and whether it fits."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from tests.target.conftest import manifest_of
from trtllm_specprefill.capacity import NOBODY, Guest, Memory
from trtllm_specprefill.cli import app
from trtllm_specprefill.draft.manifest import DraftManifest
from trtllm_specprefill.draft.tensorrt import ENGINE
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.serving.control import listen
from trtllm_specprefill.serving.launch import Launch, Server, with_free_ports
from trtllm_specprefill.serving.ranks import (
    Rank,
    World,
    budget_of,
    draft_gpu,
    ranks_of,
    started_by,
    world_of,
)
from trtllm_specprefill.serving.repository import CONTROL, MODELS
from trtllm_specprefill.serving.settings import ServeSettings, TargetSettings

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "engine_build" / "configs"
H200, L40S = 141e9, 48e9


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., ServeSettings]:
    """Settings of a server whose target is an engine with the given manifest."""

    def made(
        model: str, ranks: int, kind: str = "trtllm_executor", draft: str = "cuda:0", **built: Any
    ) -> ServeSettings:
        fields = {"precision": "fp8", "kv_tokens": 20_480, "positions": 131_072, "batch_size": 64}
        fields |= {"model": str(CONFIGS / model), "tensor_parallel": ranks, **built}
        engine = tmp_path / "engine"
        engine.mkdir(exist_ok=True)
        manifest_of(kind, **fields).write(engine)
        return ServeSettings.of(
            {
                "draft": {"model": str(CONFIGS / "llama-3.1-8b"), "device": draft},
                "target": {"backend": kind, "model": str(engine)},
            }
        )

    return made


def printed(
    served: ServeSettings, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> str:
    """What `specprefill serve --dry-run` prints where tritonserver is installed."""
    binary = folder / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.touch(0o755)
    monkeypatch.setenv("PATH", str(binary.parent), prepend=":")
    config = folder / "serve.yaml"
    config.write_text(yaml.safe_dump(served.model_dump(exclude_defaults=True)))
    command = ["serve", "--config", str(config), "--repository", str(folder / "repository")]
    done = CliRunner().invoke(app, [*command, *options, "--dry-run"], catch_exceptions=False)
    assert not done.exit_code
    text = done.stdout.replace(str(binary), "tritonserver")
    return text.replace(str(folder / "repository"), "REPOSITORY")


TWO_NODES = ("--nodes", "node-a,node-b")
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama-3.1-70b-tp8": (
        {"model": "llama-3.1-70b", "ranks": 8},
        ("--gpu", "h200", "--world-size", "8"),
    ),
    "llama-3.1-70b-tp4-own-draft-gpu": (
        {"model": "llama-3.1-70b", "ranks": 4, "draft": "cuda:4"},
        ("--gpu", "h100"),
    ),
    "llama-3.1-405b-tp16-mpirun": (
        {"model": "llama-3.1-405b", "ranks": 16, "precision": "bf16"},
        ("--gpu", "h200", *TWO_NODES),
    ),
    "llama-3.1-405b-tp16-srun": (
        {"model": "llama-3.1-405b", "ranks": 16, "precision": "bf16"},
        ("--gpu", "h200", *TWO_NODES, "--launcher", "srun"),
    ),
    "qwen2.5-72b-llm-tp8": (
        {"model": "qwen2.5-72b", "ranks": 8, "kind": "trtllm_llm"},
        ("--gpu", "h200"),
    ),
    "qwen2.5-72b-llm-tp16-srun": (
        {"model": "qwen2.5-72b", "ranks": 16, "kind": "trtllm_llm"},
        ("--gpu", "h200", *TWO_NODES, "--launcher", "srun"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_runs_where_is_printed_exactly(
    case: str,
    settings: Callable[..., ServeSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of, options = CASES[case]
    text = printed(settings(**of), tmp_path, monkeypatch, *options)
    programs = tmp_path / "repository" / "ranks.conf"
    if programs.exists():
        listed = programs.read_text().replace(str(tmp_path / "bin/tritonserver"), "tritonserver")
        text += "\nranks.conf:\n" + listed.replace(str(tmp_path / "repository"), "REPOSITORY")
    golden = HERE / "golden" / f"{case}.txt"
    assert text == golden.read_text()


def test_ranks_above_0_load_the_target_alone_and_open_no_port(
    settings: Callable[..., ServeSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed(settings("llama-3.1-70b", 8), tmp_path, monkeypatch, "--gpu", "h200")
    lines = [line.removesuffix("\\") for line in text.splitlines() if not line.startswith("#")]
    command = shlex.split(" ".join(lines))
    assert command[:4] == ["mpirun", "--allow-run-as-root", "--bind-to", "none"]
    ends = [4, *(i + 1 for i, word in enumerate(command) if word == ":"), len(command) + 1]
    calls = [command[a : b - 1] for a, b in pairwise(ends)]
    assert len(calls) == 8
    for number, words in enumerate(calls):
        assert words[:4] == ["-n", "1", "sh", "-c"]
        assert words[5:7] == ["rank", "tritonserver"]
        loaded = [w.removeprefix("--load-model=") for w in words if w.startswith("--load-model=")]
        assert ("draft" in loaded) == (number == 0)
        assert "target" in loaded
        assert len(loaded) == (5 if number == 0 else 1)
        assert any("port=" in w for w in words) == (number == 0)
        assert ("--allow-http=false" in words) == (number > 0)
        assert f"--backend-config=python,shm-region-prefix-name=prefix{number}_" in words


@pytest.mark.parametrize("status", [0, 1, 7, 126])
def test_a_rank_never_ends_well_for_mpirun_lets_a_rank_that_does_leave_the_others(
    status: int, settings: Callable[..., ServeSettings], tmp_path: Path
) -> None:
    served = settings("llama-3.1-70b", 2)
    world = world_of(served)
    ranks = ranks_of(world, served, ("sh", "-c", f"exit {status}"), ())
    command = started_by(world, ranks, tmp_path)
    rank = command[command.index("sh") : command.index(":")]
    assert subprocess.run(rank, check=False).returncode == (status or 1)


def test_a_rank_hands_signals_on_and_waits_for_its_server(
    settings: Callable[..., ServeSettings], tmp_path: Path
) -> None:
    served, done = settings("llama-3.1-70b", 2), tmp_path / "done"
    server = (
        f"trap 'sleep 0.5; echo stopped > {done}; exit 0' TERM; echo; while :; do sleep 0.1; done"
    )
    world = world_of(served)
    command = started_by(world, ranks_of(world, served, ("sh", "-c", server), ()), tmp_path)
    rank = command[command.index("sh") : command.index(":")]
    with subprocess.Popen(rank, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.terminate()
        assert running.wait() == 1
    assert done.read_text() == "stopped\n"


def test_a_server_ends_with_the_process_that_holds_its_part_of_the_engine() -> None:
    part = """
import time
from trtllm_specprefill.serving.ranks import end_with_this_process
watch = end_with_this_process()
print("up", flush=True)
time.sleep(600)
"""
    server = """
import signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
signal.pause()
"""
    command = [sys.executable, "-c", server, part]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"up\n"
        [process] = psutil.Process(running.pid).children()
        process.kill()
        assert running.wait() == -signal.SIGTERM


def test_other_nodes_are_given_what_the_servers_environment_needs(
    settings: Callable[..., ServeSettings], tmp_path: Path
) -> None:
    served = settings("llama-3.1-70b", 8)
    for nodes in ((), ("a", "b")):
        world = world_of(served, nodes=nodes)
        ranks = ranks_of(world, served, ("tritonserver",), ())
        command = started_by(world, ranks, tmp_path, ["LD_LIBRARY_PATH", "PATH"])
        taken = [command[i + 1] for i, word in enumerate(command) if word == "-x"]
        assert taken == (["LD_LIBRARY_PATH", "PATH"] if nodes else [])


def test_the_kv_cache_that_fits_is_what_the_engine_is_told(
    settings: Callable[..., ServeSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed(settings("llama-3.1-70b", 8), tmp_path, monkeypatch, "--gpu", "h200")
    fits = re.search(r"KV cache: (\d+) tokens", text)
    assert fits is not None
    config = (tmp_path / "repository" / "models" / "target" / "config.pbtxt").read_text()
    found = re.search(r'key: "settings" value { string_value: (".*") }', config)
    assert found is not None
    rendered = ServeSettings.of(json.loads(json.loads(found[1])))
    assert rendered.target.kv_cache_tokens == int(fits[1])


def test_a_draft_on_rank_0_takes_its_memory_from_every_ranks_cache(
    settings: Callable[..., ServeSettings],
) -> None:
    # 8 ranks each hold 1 of the 8 KV heads of 80 layers in fp8; 8B of draft in bf16.
    shared, own = settings("llama-3.1-70b", 8), settings("llama-3.1-70b", 8, draft="cuda:8")
    world = world_of(shared)
    with_draft, alone = budget_of(shared, world, H200), budget_of(own, world, H200)
    assert with_draft is not None
    assert alone is not None
    assert alone.gpus[0].kv_per_token == 2 * 80 * 128
    assert with_draft.gpus[1:] == alone.gpus[1:]
    draft = 2 * 8.03e9 + 2 * 2 * 32 * 8 * 128 * 131_072
    lost = (alone.kv_tokens - with_draft.kv_tokens) * 2 * 80 * 128
    assert lost == pytest.approx(draft, rel=1e-3)
    assert alone.kv_tokens % 64 == 0


@pytest.fixture
def engine(tmp_path: Path) -> Callable[..., Path]:
    """The folder of a draft of Llama-3.1-8B in FP8, of so many bytes, with the given manifest."""

    def made(size: int, mode: str, **fields: Any) -> Path:
        folder = tmp_path / f"{mode}-engine"
        folder.mkdir()
        with (folder / ENGINE).open("wb") as file:
            file.truncate(size)
        cache = {"layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
        given = {
            **dict.fromkeys(("model", "model_hash", "tokenizer_hash"), "of-llama"),
            **{"versions": {}, "runtime": "tensorrt", "precision": "fp8", "scorer": "native"},
            **{"mode": mode, "layers": 32, "pool": 13, "queries": 9, "votes": "mean"},
            "cache": cache if mode == "lookahead" else None,
            "files": {ENGINE: "digest"},
            "probe": {"ids": (1,), "importance": (1.0,), "tolerance": 0.25},
        }
        DraftManifest(**{**given, **fields}).write(folder)
        return folder

    return made


def on_a_gpu(served: ServeSettings, **draft: Any) -> Memory:
    """The first GPU of 8, which has the draft."""
    own = served.draft.model_copy(update={"backend": "tensorrt", **draft})
    budget = budget_of(served.model_copy(update={"draft": own}), World(8), H200)
    assert budget is not None
    assert budget.kv_tokens == budget.gpus[0].kv_tokens
    return budget.gpus[0]


def test_an_engine_with_look_ahead_takes_its_file_and_two_sets_of_its_own_keys_and_values(
    settings: Callable[..., ServeSettings], engine: Callable[..., Path]
) -> None:
    size, tokens, batch = 9_700_000_000, 20_480, 3
    folder = engine(size, "lookahead", max_tokens=tokens, max_batch=batch)
    found = on_a_gpu(settings("llama-3.1-70b", 8), path=str(folder))
    assert found.draft.weights == size  # more than a byte a weight: embedding and head are bf16
    assert found.draft.kv == 2 * (2 * 32 * 8 * 128 * 2) * tokens * batch
    assert found.draft.work > batch * tokens * 2 * 3 * 14_336  # three rows of the MLP
    taken = found.target + found.draft.weights + found.draft.kv + found.draft.work + found.kv
    assert taken == pytest.approx(0.9 * H200)


def test_an_engine_of_windows_takes_no_keys_and_values_and_room_for_its_longest(
    settings: Callable[..., ServeSettings], engine: Callable[..., Path]
) -> None:
    def taken(tokens: int) -> Guest:
        folder = engine(7_000_000_000, "window", max_tokens=tokens, max_batch=4)
        found = on_a_gpu(settings("llama-3.1-70b", 8), path=str(folder)).draft
        shutil.rmtree(folder)
        return found

    usual, longest = taken(1024), taken(8192)
    assert usual.kv == longest.kv == 0
    assert 4 * 1024 * 2 * 3 * 14_336 < usual.work < longest.work / 8
    squares = 2 * (8192**2 - 8 * 1024**2)  # of the one mask
    assert longest.work - 8 * usual.work == pytest.approx(squares, rel=1e-4)


def test_what_stands_in_the_place_of_an_engine_that_is_not_there_is_what_takes_memory(
    settings: Callable[..., ServeSettings], engine: Callable[..., Path]
) -> None:
    served = settings("llama-3.1-70b", 8)
    torch_draft = on_a_gpu(served, backend="torch").draft
    assert torch_draft.weights == pytest.approx(2 * 8.03e9, rel=2e-3)
    folder = engine(7_000_000_000, "window", max_tokens=1024, max_batch=4)
    (folder / ENGINE).unlink()
    for path in (folder, folder / "nowhere"):
        assert on_a_gpu(served, path=str(path), fallback="torch").draft == torch_draft
        assert on_a_gpu(served, path=str(path), fallback="dense").draft == NOBODY
        with pytest.raises(InputError, match=r"engine: got '.*window-engine"):
            on_a_gpu(served, path=str(path), fallback="none")


def test_a_draft_under_onnxruntime_takes_a_gpus_memory_where_it_is_put_on_one(
    settings: Callable[..., ServeSettings],
    engine: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = engine(7_000_000_000, "window", max_tokens=1024, max_batch=4, runtime="onnx")
    onnx = {"backend": "onnx", "path": str(folder)}
    for device in ("cpu", "auto"):
        assert on_a_gpu(settings("llama-3.1-70b", 8, draft=device), **onnx).draft == NOBODY
    found = on_a_gpu(settings("llama-3.1-70b", 8, draft="cuda:0"), **onnx).draft
    assert found.weights == 7_000_000_000
    # Torch, in the place of an engine that is not there, takes a GPU by its own rule.
    absent = {**onnx, "path": str(folder / "nowhere")}
    assert on_a_gpu(settings("llama-3.1-70b", 8, draft="auto"), **absent).draft.weights > 0
    runtime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(runtime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    assert on_a_gpu(settings("llama-3.1-70b", 8, draft="auto"), **onnx).draft == found


def test_of_a_draft_that_loads_its_first_layers_only_these_are_counted(
    settings: Callable[..., ServeSettings],
) -> None:
    served = settings("llama-3.1-70b", 8)
    whole, eight, none = (on_a_gpu(served, layers=n).draft for n in (None, 8, 9999))
    assert none == whole
    layers = whole.weights - eight.weights
    assert 0.7 * whole.weights * 24 / 32 < layers < whole.weights * 24 / 32
    assert eight.kv == whole.kv * 8 / 32


def test_the_parts_of_an_engine_are_told_and_what_is_an_estimate(
    settings: Callable[..., ServeSettings], engine: Callable[..., Path]
) -> None:
    served = settings("llama-3.1-70b", 8)
    folder = engine(7_000_000_000, "window", max_tokens=1024, max_batch=4)
    for device, where in (("cuda:0", "target"), ("cuda:8", "of which")):
        draft = served.draft.model_copy(
            update={"backend": "tensorrt", "path": str(folder), "device": device}
        )
        budget = budget_of(served.model_copy(update={"draft": draft}), World(8), H200)
        assert budget is not None
        said = "\n".join(budget.lines())
        assert re.search(rf"{where}.*7\.0 GB draft \+ about 0\.6 GB its workspace", said)
        assert "its KV" not in said


def test_a_head_that_several_gpus_hold_takes_memory_on_each(
    settings: Callable[..., ServeSettings],
) -> None:
    served = settings("llama-3.1-405b", 16)
    budget = budget_of(served, world_of(served), H200)
    assert budget is not None
    assert budget.gpus[0].kv_per_token == 2 * 126 * 128  # one head of eight, not a half


def test_models_that_do_not_fit_together_are_refused_at_start(
    settings: Callable[..., ServeSettings],
) -> None:
    """26: an engine at 0.9 of the GPU left no memory for the draft."""
    served = settings("llama-3.1-70b", 2)
    with pytest.raises(InputError, match=r"20480, which one request.*35\.3 GB target \+ 16\.1 GB"):
        budget_of(served, world_of(served), L40S)
    apart = settings("llama-3.1-70b", 2, draft="cuda:2")
    assert budget_of(apart, world_of(apart), L40S) is not None
    with pytest.raises(InputError, match=r"draft\.device.*'cuda:2'.*of its own with 33"):
        budget_of(apart, world_of(apart), 36e9)
    greedy = served.target.model_copy(update={"kv_cache_tokens": 10_000_000})
    asking = served.model_copy(update={"target": greedy})
    with pytest.raises(InputError, match="10000000"):
        budget_of(asking, world_of(asking), H200)


def test_a_world_that_the_target_has_not_is_named(settings: Callable[..., ServeSettings]) -> None:
    served = settings("llama-3.1-70b", 8)
    assert world_of(served) == World(8)
    assert world_of(served, 8, ("a", "b")).node(4) == "b"
    with pytest.raises(InputError, match=r"world_size.*4.*8, the ranks"):
        world_of(served, 4)
    with pytest.raises(InputError, match=r"nodes.*share 8 ranks"):
        world_of(served, None, ("a", "b", "c"))
    with pytest.raises(InputError, match="nodes"):
        world_of(served, None, ("a", "a"))
    with pytest.raises(InputError, match=r"launcher.*mpirun, srun"):
        world_of(served, None, (), "ssh")
    with pytest.raises(InputError, match=r"world_size.*2.*1, the ranks of target"):
        world_of(ServeSettings(), 2)
    assert budget_of(ServeSettings(), World(), H200) is None  # no engine, nothing to plan


def test_positions_that_the_target_has_not_are_an_error_at_start(
    settings: Callable[..., ServeSettings], tmp_path: Path
) -> None:
    """20: a combination that cannot work is no matter of every request anew."""
    engine = settings("qwen2.5-72b", 8, "trtllm_llm", original_positions=False)
    values = engine.model_dump(exclude_defaults=True) | {"settings": {"positions": "original"}}
    with pytest.raises(InputError, match=r"settings\.positions.*'original'.*takes no position"):
        ServeSettings.of(values).check_positions()
    config = tmp_path / "serve.yaml"
    target = {"backend": "endpoint", "url": "http://127.0.0.1:9/v1"}
    config.write_text(json.dumps({"settings": {"positions": "original"}, "target": target}))
    done = CliRunner().invoke(app, ["serve", "--config", str(config), "--dry-run"])
    assert isinstance(done.exception, InputError)
    assert "endpoint takes no position ids" in str(done.exception)
    ServeSettings.of({**values, "settings": {"positions": "auto"}}).check_positions()
    settings("qwen2.5-72b", 8, "trtllm_llm")
    ServeSettings.of(values).check_positions()


@pytest.mark.parametrize(
    ("target", "field"),
    [
        ({"block_reuse": True}, "block_reuse"),
        ({"backend": "endpoint", "url": "http://h/v1", "block_reuse": True}, "block_reuse"),
        ({"backend": "endpoint", "url": "http://h/v1", "dtype": "float32"}, "dtype"),
        ({"backend": "trtllm_executor", "device": "cuda:1"}, "device"),
        ({"backend": "trtllm_llm", "url": "http://h/v1"}, "url"),
        ({"url": "http://h/v1"}, "url"),  # the backend was forgotten
    ],
)
def test_a_setting_that_the_targets_backend_does_not_read_is_an_error_at_start(
    target: dict[str, Any], field: str
) -> None:
    """20: a flag that could have no effect was dropped without a word."""
    with pytest.raises(InputError, match=rf"target\.{field}.*does not read it"):
        ServeSettings.of({"target": target})
    ServeSettings.of({"target": target | {field: TargetSettings.model_fields[field].default}})


def test_a_target_on_several_ranks_that_dies_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / CONTROL).mkdir()
    listen(tmp_path / CONTROL, "draft", lambda message: {})  # alive; the target is not
    running = ("sleep", "600")
    ranks = (Rank(0, "", 0, MODELS, running), Rank(1, "", 1, ("target",), running))
    free = with_free_ports(ServeSettings.of({"ports": {"http": 0, "grpc": 0, "metrics": 0}}))
    with Server(Launch(running, {}, ranks), free.ports, tmp_path) as server:
        server._watch.start()
        assert server.wait() == -signal.SIGTERM


def test_a_drafts_device_says_which_gpu() -> None:
    assert [draft_gpu(d) for d in ("auto", "cuda", "cuda:3", "cpu")] == [0, 0, 3, None]
