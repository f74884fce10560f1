"""The real tritonserver with an engine of the recorded API in it, and with the stock models."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.target.served import KNOBS, repository_of, settings_of, text_of_words, whole
from tests.target.test_endpoint_triton import STOCK
from tests.target.wire import plan_of, text_of
from trtllm_specprefill import SpecPrefill
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.errors import TargetFailed
from trtllm_specprefill.models import Model, load_model
from trtllm_specprefill.serving.client import inputs_of, stream
from trtllm_specprefill.serving.launch import Launch, Server, launch_of
from trtllm_specprefill.serving.ranks import World
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.load import load_target
from trtllm_specprefill.target.torch import TorchTarget

tritonclient = pytest.importorskip("tritonclient.grpc")
pytest.importorskip("pytriton")
pytestmark = pytest.mark.timeout(1500)

HERE = Path(__file__).parent
# Where the stock ensemble's inputs go; its own steps before and after are left out.
STEP = {
    "text_input": "text_input",
    "max_tokens": "request_output_len",
    "stream": "streaming",
    "stop_words": "stop_words",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "temperature": "temperature",
    "seed": "seed",
}


def stock_configs() -> dict[str, str]:
    """What our requests need of the stock models' `config.pbtxt`: batched, optional, decoupled."""

    def tensor(label: str, kind: str, dims: str, more: str = "") -> str:
        kind = "STRING" if kind == "BYTES" else kind
        return f'{{ name: "{label}" data_type: TYPE_{kind} dims: [ {dims} ] {more} }}'

    def inputs(kinds: dict[str, str]) -> str:
        several = ("input_ids", "stop_words")
        made = [
            tensor(label, kind, "-1" if label in several else "1", "optional: true")
            for label, kind in kinds.items()
        ]
        return f"input [ {', '.join(made)} ]\n"

    head = "max_batch_size: 4\nmodel_transaction_policy { decoupled: true }\n"
    text = tensor("text_output", "STRING", "-1")
    ids = f"{tensor('output_ids', 'INT32', '-1, -1')}, {tensor('sequence_length', 'INT32', '-1')}"
    also = {"text_input": "BYTES", "stop_words": "BYTES"}
    maps = [f'input_map {{ key: "{to}" value: "{label}" }}' for label, to in STEP.items()]
    maps.append('output_map { key: "text_output" value: "text_output" }')
    step = f'{{ model_name: "tensorrt_llm" model_version: -1 {" ".join(maps)} }}'
    return {
        "tensorrt_llm": 'name: "tensorrt_llm"\nbackend: "python"\n'
        f"{head}{inputs(STOCK['tensorrt_llm'] | also)}output [ {ids}, {text} ]\n"
        "instance_group [ { kind: KIND_CPU count: 1 } ]\n",
        "ensemble": 'name: "ensemble"\nplatform: "ensemble"\n'
        f"{head}{inputs(STOCK['ensemble'])}output [ {text} ]\n"
        f"ensemble_scheduling {{ step [ {step} ] }}\n",
    }


ONE = pytest.mark.parametrize("kind", ["trtllm_executor"], indirect=True, scope="module")


@pytest.fixture(
    scope="module",
    params=[
        *("trtllm_executor", "trtllm_llm of 1.4"),
        pytest.param("trtllm_llm of 1.2", marks=pytest.mark.slow),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of engine in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def served(kind: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ServeSettings:
    ranks = 2 if kind == "trtllm_executor" else 1
    return settings_of(kind, folder, tmp_path_factory.mktemp("engine"), ranks)


@pytest.fixture(scope="module")
def launch(kind: str, served: ServeSettings, folder: Path) -> Iterator[Launch]:
    """Two ranks of the executor; a test starts each by itself here, without MPI."""
    work = Path(tempfile.mkdtemp(prefix="specprefill-"))  # short: it holds sockets
    repository = repository_of(kind, served, folder, work)
    for name, config in stock_configs().items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
    code = (HERE / "stock_model.py").read_text().replace('MODEL = ""', f"MODEL = {str(folder)!r}")
    (repository / "tensorrt_llm" / "1" / "model.py").write_text(code)
    world = World(2) if kind == "trtllm_executor" else World()
    yield launch_of(served, repository, (), print, world)
    shutil.rmtree(work)


@pytest.fixture(scope="module")
def server(kind: str, launch: Launch, served: ServeSettings) -> Iterator[Server]:
    work = Path(launch.ranks[0].command[1].removeprefix("--model-repository=")).parent
    stock = tuple(f"--load-model={name}" for name in STOCK) if kind == "trtllm_executor" else ()
    first = Launch((*launch.ranks[0].command, *stock), launch.environment, launch.ranks[:1])
    with Server(first, served.ports, work) as running:
        running.wait_ready(print)
        yield running


@pytest.fixture(scope="module")
def grpc(server: Server) -> str:
    return f"127.0.0.1:{server.ports.grpc}"


@pytest.fixture(scope="module")
def small(folder: Path) -> Model:
    return load_model(str(folder), "float32", "cpu")


def test_an_engine_behind_triton_answers_as_torch_does_at_original_positions(
    grpc: str, small: Model
) -> None:
    judge = SpecPrefill(TorchDraft(small), TorchTarget(small))
    text = text_of_words(300)
    got, report = whole(grpc, text)
    expected = judge.generate(text, max_tokens=8, **KNOBS)
    assert got == expected.text
    assert (report["reason"], report["positions"]) == ("pruned", "original")
    assert report["kept_tokens"] == expected.plan.input_ids.size
    dense, report = whole(grpc, text, specprefill="off")
    assert dense == SpecPrefill(None, TorchTarget(small)).generate(text, max_tokens=8).text
    assert report["reason"] == "disabled"


def test_stop_texts_and_a_client_that_leaves_end_an_engines_answer(grpc: str) -> None:
    text = text_of_words(120)
    alone, _ = whole(grpc, text)
    stop = alone.strip()[2:5]
    cut, report = whole(grpc, text, stop=[stop])
    assert report["finish_reason"] == "stop"
    assert cut == alone[: alone.index(stop)]
    answer = stream(grpc, {"text_input": text, "specprefill": KNOBS, "max_tokens": 900})
    next(answer)
    answer.close()
    assert whole(grpc, text)[0] == alone


def leave_within(seconds: float, url: str, request: dict[str, Any]) -> None:
    """Ask and go away, answer or no answer."""
    client = tritonclient.InferenceServerClient(url)
    client.start_stream(lambda result, error: None)
    client.async_stream_infer("specprefill", inputs_of({**request, "stream": True}))
    time.sleep(seconds)
    client.stop_stream(cancel_requests=True)
    client.close()


def test_many_requests_at_once_are_answered_each_and_some_are_left(
    grpc: str, small: Model, server: Server
) -> None:
    """32 of them, 8 at a time, pruned and dense, of 1 to 12 tokens; every fourth client leaves."""
    judge = SpecPrefill(TorchDraft(small), TorchTarget(small))
    texts = [text_of_words(random.randint(20, 400)) for _ in range(32)]
    knobs = [KNOBS | {"keep": random.choice((0.2, 0.5))} if i % 3 else {} for i in range(32)]
    lengths = [random.randint(1, 12) for _ in texts]
    processes = set(psutil.Process(server.pid).children())

    def ask(i: int) -> str | None:
        values = {"specprefill": knobs[i] or "off", "max_tokens": lengths[i]}
        if i % 4:
            return whole(grpc, texts[i], **values)[0]
        endless = {"text_input": texts[i], **values, "max_tokens": 900}
        if i % 8:
            answer = stream(grpc, endless)
            next(answer)
            answer.close()
        else:
            leave_within(0.3 * random.random(), grpc, endless)
        return None

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(ask, range(32)))
    for i, answer in enumerate(got):
        if answer is not None:
            wanted: dict[str, Any] = knobs[i] or {"enabled": False}
            assert answer == judge.generate(texts[i], max_tokens=lengths[i], **wanted).text
    # Nothing broke down and was loaded again.
    assert set(psutil.Process(server.pid).children()) == processes


@ONE
def test_very_short_streams_many_at_once_do_not_bring_the_server_down(grpc: str) -> None:
    """Two threads that change one of Triton's custom metrics at once do, within the first few."""

    def ask(words: int) -> str:
        return whole(grpc, text_of_words(words), max_tokens=1 + words % 2)[1]["finish_reason"]

    with ThreadPoolExecutor(24) as pool:
        assert set(pool.map(ask, random.choices(range(3, 12), k=60))) == {"length"}


@ONE
def test_a_rank_above_0_loads_the_target_alone_and_leaves_rank_0_its_place(
    launch: Launch, server: Server, grpc: str
) -> None:
    text = text_of_words(100)
    before, _ = whole(grpc, text)
    socket = server.log.parent / "control" / "target"
    owner = socket.stat().st_ino
    log = server.log.with_name("log-of-rank-1")
    with log.open("wb") as out:
        rank = subprocess.Popen(
            launch.ranks[1].command,
            env={**os.environ, **launch.environment, "RANK": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        end = time.monotonic() + 240
        while "successfully loaded 'target'" not in log.read_text():
            assert rank.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < end
            time.sleep(0.2)
        time.sleep(1)  # where it would now open its ports
        assert rank.poll() is None
        said = log.read_text()
        assert "Started" not in said  # ... HTTPService, GRPCInferenceService, Metrics Service
        assert said.count("successfully loaded") == 1
        assert socket.stat().st_ino == owner
        assert whole(grpc, text)[0] == before
    finally:
        rank.terminate()
        rank.wait()


# --- endpoint


def plan_for(small: Model) -> Any:
    return plan_of(small.tokenizer, text_of_words(12))


@ONE
@pytest.mark.parametrize("name", list(STOCK))
def test_an_endpoint_in_the_real_server_gives_the_answer_of_the_model_itself(
    grpc: str, folder: Path, small: Model, name: str
) -> None:
    target = load_target("endpoint", str(folder), url=f"grpc://{grpc}/{name}", timeout_s=60)
    plan = plan_for(small)
    for sampling in (Sampling(max_tokens=9), Sampling(max_tokens=9, temperature=1.5, seed=4)):
        got = list(target.stream(plan, sampling))
        direct = list(TorchTarget(small).stream(plan, sampling))
        assert text_of(got) == text_of(direct)
        assert len(got) >= 9  # streamed, not gathered
        assert got[-1].finish_reason == direct[-1].finish_reason
    answer = target.stream(plan, Sampling(max_tokens=2000))
    next(answer)
    answer.close()
    assert text_of(list(target.stream(plan, Sampling(max_tokens=3))))


@ONE
def test_an_error_inside_the_real_server_is_a_target_failure(
    grpc: str, folder: Path, small: Model
) -> None:
    target = load_target("endpoint", str(folder), url=f"grpc://{grpc}/tensorrt_llm", timeout_s=60)
    plan = plan_for(small)
    unknown = replace(plan, input_ids=plan.input_ids + small.config.vocab_size)
    with pytest.raises(TargetFailed, match=f"{grpc}/tensorrt_llm.*index out of range"):
        list(target.stream(unknown, Sampling(max_tokens=3)))
    assert text_of(list(target.stream(plan, Sampling(max_tokens=3))))
