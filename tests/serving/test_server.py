"""The real tritonserver, serving the rendered repository, asked over gRPC and HTTP."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perf import analyzer
from trtllm_specprefill import Settings, SpecPrefill
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.serving.client import (
    RequestFailed,
    RequestRefused,
    infer,
    inputs_of,
    stream,
)
from trtllm_specprefill.serving.launch import Server, launch_of, with_free_ports
from trtllm_specprefill.serving.repository import CONTROL, render
from trtllm_specprefill.serving.settings import Limits, ServeSettings
from trtllm_specprefill.target.torch import TorchTarget

pytest.importorskip("tritonclient.grpc")
pytest.importorskip("pytriton")
pytestmark = [pytest.mark.model, pytest.mark.timeout(1500)]

FACT = "The secret number of the lighthouse is 7391846."
LIMITS = Limits(requests=12, answers=2, presence=0.25)
ENDLESS = {"max_tokens": 7000, "temperature": 10.0, "seed": 7}  # any token but the last one's
KNOBS = {"threshold": 64, "positions": "contiguous", "min_keep_tokens": 0}


@pytest.fixture(scope="module")
def served() -> ServeSettings:
    ports = {"http": 0, "grpc": 0, "metrics": 0}
    model = {"dtype": "float32"}  # as the fixtures that its answers are compared with
    return with_free_ports(
        ServeSettings.of(
            {
                "limits": LIMITS.model_dump(),
                "ports": ports,
                "draft": {**model, "cache_mib": 0},  # every request is scored, also the same one
                "target": {**model, "read_ahead": True},
            }
        )
    )


@pytest.fixture(scope="module")
def server(served: ServeSettings) -> Any:
    folder = Path(tempfile.mkdtemp(prefix="specprefill-"))  # short: it holds sockets
    trace = (f"--trace-config=triton,file={folder}/trace", "--trace-config=level=OFF")
    launch = launch_of(served, render(served, folder), trace, print)
    with Server(launch, served.ports, folder) as running:
        running.wait_ready(print)
        yield running
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def grpc(server: Server) -> str:
    return f"127.0.0.1:{server.ports.grpc}"


@pytest.fixture(scope="module")
def http(server: Server) -> str:
    return f"http://127.0.0.1:{server.ports.http}/v2/models"


def question(prose: str, tokens: int, at: int = 0) -> list[dict[str, str]]:
    body = prose[at : at + 4 * tokens]
    middle = len(body) // 2
    text = f"{body[:middle]} {FACT} {body[middle:]}"
    return [{"role": "user", "content": f"{text}\n\nWhat is the secret number of the lighthouse?"}]


def asked(prose: str, tokens: int, at: int = 0, **knobs: Any) -> dict[str, Any]:
    """A request for the fact in that many tokens of prose."""
    return {
        "messages": json.dumps(question(prose, tokens, at)),
        "specprefill": {**KNOBS, "keep": 0.3, **knobs},
        "max_tokens": 16,
    }


def whole(url: str, values: dict[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
    """A streamed answer joined, its report, and its pieces."""
    pieces, report = [], None
    for text, report in stream(url, values):  # noqa: B007
        pieces.append(text)
    assert report is not None
    return "".join(pieces), report, pieces


def metric(server: Server, name: str) -> float:
    url = f"http://127.0.0.1:{server.ports.metrics}/metrics"
    text = urllib.request.urlopen(url).read().decode()
    found = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.M)
    return float(found[0]) if found else 0.0


def until(true: Any, seconds: float = 240.0) -> None:
    """Wait for something that must become true; how long it takes is not the question."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_streamed_answer_holds_the_fact_and_is_the_librarys_own(
    grpc: str, prose: str, smollm2: Any
) -> None:
    values = asked(prose, 900)
    whole(grpc, {**values, "max_tokens": 2})  # the first request finds things to load
    unexplained = []
    for _ in range(3):  # a busy machine may keep one client waiting for its turn
        begin = time.perf_counter()
        ttft, pieces, report = 0.0, [], None
        for text, report in stream(grpc, values):  # noqa: B007
            ttft = ttft or time.perf_counter() - begin
            pieces.append(text)
        assert report is not None
        stages = {k: v for k, v in report["stages"].items() if k != "decode"}
        unexplained.append(ttft - sum(stages.values()))
    own = SpecPrefill(TorchDraft(smollm2), TorchTarget(smollm2)).generate(
        question(prose, 900), max_tokens=16, keep=0.3, **KNOBS
    )
    assert "7391846" in "".join(pieces)
    assert "".join(pieces) == own.text
    assert report["reason"] == "pruned"
    assert report["kept_tokens"] == own.plan.input_ids.size
    assert len(pieces) > 4
    # 23: the TTFT that is reported is the client's, draft and all, and the stages explain it.
    assert {"queue", "draft_queue", "draft_prefill", "target_queue", "target_prefill"} <= {*stages}
    assert sum(stages.values()) == pytest.approx(report["ttft_s"], rel=0.05)
    assert report["ttft_s"] <= ttft
    assert min(map(abs, unexplained)) < 0.05 * ttft


def test_a_long_system_prompt_is_read_ahead_and_kept_and_the_answer_stays_the_librarys(
    grpc: str, prose: str, smollm2: Any
) -> None:
    system = {"role": "system", "content": prose[-1500:]}
    target = TorchTarget(smollm2, 1 << 28)
    for at in (0, 3000, 0):
        messages = [system, *question(prose, 600, at)]
        values = {**asked(prose, 600, at, keep=0.6), "messages": json.dumps(messages)}
        text, report, _ = whole(grpc, values)
        own = SpecPrefill(TorchDraft(smollm2), target).generate(
            messages, max_tokens=16, keep=0.6, **KNOBS
        )
        assert (report["reason"], own.plan.head > 256) == ("pruned", True)
        assert (text, report["kept_tokens"]) == (own.text, own.plan.input_ids.size)


def test_every_way_to_ask_gives_the_same_answer_and_selection(
    grpc: str, http: str, prose: str
) -> None:
    """12, 13: streamed or not, the same settings hold, and the response says which."""
    values = asked(prose, 500, kept_spans=True)
    text, streamed, _ = whole(grpc, values)
    plain, report = infer(grpc, values)
    assert plain == text
    body = {**values, "specprefill": json.dumps(values["specprefill"])}
    generated = json.loads(post(f"{http}/specprefill/generate", body))
    assert generated["text_output"] == text
    told = json.loads(generated["report"])
    events = post(f"{http}/specprefill/generate_stream", {**body, "stream": True}).split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in events if event.strip()]
    assert "".join(part["text_output"] for part in parts) == text
    for one in (report, told):
        for name in ("settings", "kept_spans", "kept_tokens", "reason", "keep_rate"):
            assert one[name] == streamed[name]
    assert streamed["settings"]["keep_rate"] == 0.3
    assert streamed["settings"]["max_tokens"] == 16


def post(url: str, body: dict[str, Any]) -> str:
    return urllib.request.urlopen(url, json.dumps(body).encode()).read().decode()


def test_a_seed_and_stop_texts_hold_over_the_wire(grpc: str, prose: str) -> None:
    drawn = {**asked(prose, 200), "temperature": 1.5, "seed": 2**63 - 1, "top_k": 50, "top_p": 0.9}
    assert whole(grpc, drawn)[0] == whole(grpc, drawn)[0]
    text, _, _ = whole(grpc, asked(prose, 200))
    stop = text.strip()[4:8]
    cut, report, _ = whole(grpc, {**asked(prose, 200), "stop": [stop, "never said"]})
    assert report["finish_reason"] == "stop"
    assert cut == text[: text.index(stop)]


def test_pruning_can_be_switched_off_and_short_prompts_are_left_alone(
    grpc: str, prose: str
) -> None:
    off = {**asked(prose, 200), "specprefill": "off"}
    assert whole(grpc, off)[1]["reason"] == "disabled"
    short = {**asked(prose, 200), "specprefill": {"keep": 0.1}}
    assert whole(grpc, short)[1]["reason"] == "below_threshold"


WORDS = st.text(max_size=40) | st.just("\ud800") | st.just("x" * 1_000_000)
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
FIELDS = [*Settings.model_fields, "keep", "off", "protect", "kept_spans", "unknown"]
MALFORMED = st.one_of(
    st.fixed_dictionaries({"messages": NESTED.map(json.dumps) | WORDS}),
    st.fixed_dictionaries({"text_input": WORDS, "messages": WORDS}),
    st.fixed_dictionaries(
        {
            "text_input": st.just("two words"),
            "specprefill": st.dictionaries(st.sampled_from(FIELDS), NESTED, min_size=1).map(
                json.dumps
            )
            | WORDS,
        }
    ),
    st.fixed_dictionaries(
        {
            "text_input": st.just("two words"),
            "max_tokens": st.integers(-(2**31), 0) | st.just(2**31 - 1),
        }
    ),
    st.fixed_dictionaries({"text_input": st.just("two words"), "temperature": st.floats(width=32)}),
    st.fixed_dictionaries({"text_input": st.just("two words"), "top_p": st.floats(width=32)}),
    st.fixed_dictionaries({"text_input": st.just("two words"), "stop": st.just([""])}),
    st.just({}),
)


@given(values=MALFORMED)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_malformed_request_is_an_error_to_its_client_alone(
    grpc: str, server: Server, values: dict[str, Any]
) -> None:
    """20: nothing asked for is dropped without a word: it is done, or refused by name."""
    raw = {
        k: v.encode("utf-8", "surrogatepass") if isinstance(v, str) else v
        for k, v in values.items()
    }
    try:
        _, report = raw_infer(grpc, {"max_tokens": 1, **raw})
    except RequestFailed as error:
        assert re.search("orchestrator: |expected", str(error))  # noqa: PT017  either may happen
    else:
        assert report["reason"]  # what came was fine after all
    assert all(server.model_ready(m) for m in ("draft", "orchestrator", "target", "specprefill"))


def raw_infer(url: str, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    import tritonclient.grpc as client

    known = inputs_of({k: v for k, v in values.items() if not isinstance(v, (bytes, list))})
    for name, value in values.items():
        if isinstance(value, (bytes, list)):
            texts = value if isinstance(value, list) else [value]
            one = client.InferInput(name, [len(texts)], "BYTES")
            as_bytes = [t if isinstance(t, bytes) else t.encode() for t in texts]
            one.set_data_from_numpy(np.array(as_bytes, dtype=np.object_))
            known.append(one)
    connection = client.InferenceServerClient(url)
    try:
        result = connection.infer("specprefill_infer", known)
    except client.InferenceServerException as error:
        raise RequestFailed(str(error.message())) from None
    return result.as_numpy("text_output")[0].decode(), json.loads(result.as_numpy("report")[0])


def test_wrong_types_and_names_of_tensors_are_refused(http: str, server: Server) -> None:
    for body in (
        {"text_input": "two words", "max_tokens": "many"},
        {"text_input": 5},
        {"text_input": ["two", "texts"]},
        {"prompt": "two words"},
    ):
        with pytest.raises(urllib.error.HTTPError):
            post(f"{http}/specprefill/generate", body)
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(f"{http}/specprefill/generate", {"text_input": "two words", "max_tokens": 0})
    assert caught.value.code == 400
    assert server.model_ready("specprefill")


def test_requests_under_load_are_answered_as_if_alone(
    grpc: str, server: Server, prose: str
) -> None:
    """64 at a time of 8: mixed lengths and settings, one in eight cancelled, one in eight bad."""
    kinds = [
        asked(prose, n, at, keep=k) | {"max_tokens": m}
        for n, at, k, m in ((400, 0, 0.5, 6), (300, 5000, 0.6, 4), (500, 9000, 0.4, 8))
    ]
    kinds.append({**asked(prose, 120, 2000), "specprefill": "off", "max_tokens": 5})
    alone, reasons = [], []
    for values in kinds:
        text, report, _ = whole(grpc, values)
        alone.append(text)
        reasons.append(report["reason"])
    assert reasons == ["pruned"] * 3 + ["disabled"]

    def one(number: int) -> str:
        values = kinds[number % 4]
        if number % 8 == 3:
            with pytest.raises(RequestRefused, match=r"orchestrator: keep_rate: got 1\.5"):
                whole(grpc, {**values, "specprefill": {"keep": 1.5}})
            return alone[number % 4]
        if number % 8 == 6:
            answer = stream(grpc, {**values, "max_tokens": 500})
            next(answer)
            answer.close()
            return alone[number % 4]
        return whole(grpc, values)[0]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(16)))  # buffers and threads come with the first load
        before, memory = processes(server), resident(server)
        answers = list(pool.map(one, range(64)))
    assert answers == alone * 16
    until(lambda: metric(server, "specprefill_requests_inside") == 0)
    assert processes(server) == before
    assert resident(server) < 1.05 * memory


def processes(server: Server) -> set[int]:
    """The server and the processes of its models."""
    root = psutil.Process(server.pid)
    return {process.pid for process in [root, *root.children(recursive=True)]}


def resident(server: Server) -> int:
    """Bytes of memory that these hold, memory that they share counted for each."""
    return sum(psutil.Process(pid).memory_info().rss for pid in processes(server))


def test_a_client_that_goes_away_frees_its_place_and_stops_the_work(
    grpc: str, server: Server, prose: str
) -> None:
    """21: and the same request sent again is answered."""
    values = {**asked(prose, 150), **ENDLESS}
    answer = stream(grpc, values)
    next(answer)
    assert metric(server, "specprefill_requests_inside") == 1
    answer.close()  # thousands of tokens before its end
    until(lambda: metric(server, "specprefill_requests_inside") == 0)
    again, _, _ = whole(grpc, {**values, "max_tokens": 6})
    assert again


def test_every_one_of_many_clients_that_go_away_is_noticed(
    grpc: str, server: Server, prose: str
) -> None:
    """Those whose answer has begun and those that wait; none runs on to its 7,000 tokens."""
    import tritonclient.grpc as client

    values = {**asked(prose, 150), **ENDLESS, "stream": True}
    clients = [client.InferenceServerClient(grpc) for _ in range(LIMITS.requests)]
    for one in clients:
        one.start_stream(lambda result, error: None)
        one.async_stream_infer("specprefill", inputs_of(values))
    until(lambda: metric(server, "specprefill_requests_inside") == LIMITS.requests)
    with pytest.raises(RequestFailed, match="overloaded"):
        whole(grpc, values)
    for one in clients:
        one.stop_stream(cancel_requests=True)
        one.close()
    until(lambda: metric(server, "specprefill_requests_inside") == 0)
    assert whole(grpc, {**asked(prose, 150), "max_tokens": 2})[0]


def test_more_requests_than_fit_are_refused_at_once(grpc: str, server: Server, prose: str) -> None:
    values = asked(prose, 150)
    endless = [stream(grpc, {**values, **ENDLESS}) for _ in range(LIMITS.answers)]
    for answer in endless:
        next(answer)  # from here on whoever comes waits behind them
    with ThreadPoolExecutor(LIMITS.requests) as pool:
        waiting = LIMITS.requests - LIMITS.answers
        answers = [pool.submit(whole, grpc, {**values, "max_tokens": 6}) for _ in range(waiting)]
        until(lambda: metric(server, "specprefill_requests_inside") == LIMITS.requests)
        with pytest.raises(RequestFailed, match=f"overloaded: {LIMITS.requests} req") as caught:
            whole(grpc, values)
        assert not isinstance(caught.value, RequestRefused)  # the same request may be sent again
        for answer in endless:
            answer.close()
        texts = {answer.result()[0] for answer in answers}
    assert len(texts) == 1
    until(lambda: metric(server, "specprefill_requests_inside") == 0)


def test_without_its_draft_the_server_answers_in_full_and_prunes_again_later(
    grpc: str, server: Server, prose: str
) -> None:
    values = asked(prose, 900)
    expected, report, _ = whole(grpc, values)
    assert report["reason"] == "pruned"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(whole, grpc, asked(prose, 3000))
        time.sleep(0.5)  # somewhere in the middle; wherever it is, the outcome is one of two
        os.kill(process_of(server, "draft"), signal.SIGKILL)
        _, report, _ = answer.result()
    assert report["reason"] in ("draft_failed", "pruned")
    try:
        _, report, _ = whole(grpc, {**values, "specprefill": {**KNOBS, "strict": True}})
        assert report["reason"] == "pruned"  # it was back already
    except RequestFailed as error:
        assert "draft" in str(error)  # noqa: PT017  either may happen
    until(lambda: whole(grpc, values)[1]["reason"] == "pruned")
    assert whole(grpc, values)[0] == expected


def test_whoever_never_gives_way_at_the_cores_does_not_stop_the_others(
    grpc: str, server: Server, prose: str
) -> None:
    """As a draft would that hangs in one layer; draft and target take turns on this machine."""
    values = asked(prose, 900)
    expected, _, _ = whole(grpc, values)
    with (server.log.parent / CONTROL / "turn").open("rb") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        text, report, _ = whole(grpc, values)
    assert (text, report["reason"]) == (expected, "pruned")


def process_of(server: Server, model: str) -> int:
    """A process of a Python model: Triton names its model folder on the command line."""
    children = psutil.Process(server.pid).children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):  # one that was killed before, and not yet buried
            if f"models/{model}/1" in " ".join(child.cmdline()):
                return int(child.pid)
    raise AssertionError(f"no process of {model}")


def test_the_time_a_draft_may_take_grows_with_the_prompt() -> None:
    """24: a fixed time-out gives up on just the prompts that need pruning most."""
    limits = Limits(draft_timeout=10, draft_timeout_per_1000_tokens=5)
    assert limits.draft_seconds(0) == 10
    assert limits.draft_seconds(64_000) == 330


def test_the_server_counts_what_it_does(grpc: str, server: Server, prose: str) -> None:
    name = 'specprefill_requests_total{reason="pruned"}'
    before = metric(server, name), metric(server, "specprefill_tokens_saved_total")
    _, report, _ = whole(grpc, asked(prose, 900))
    assert metric(server, name) == before[0] + 1
    saved = report["prompt_tokens"] - report["kept_tokens"]
    assert metric(server, "specprefill_tokens_saved_total") == before[1] + saved
    for family in ("keep_rate", "draft_seconds", "ttft_seconds", "target_prefill_seconds"):
        assert metric(server, f"specprefill_{family}_count") > 0


def test_perf_analyzer_measures_a_cell_of_the_sweep(grpc: str, prose: str, tmp_path: Path) -> None:
    """The real one: every request answered, streamed, its report read and its times in order."""
    values = asked(prose, 300, keep=0.6)
    requests = [
        {
            "messages": json.dumps(question(prose, 300, at)),
            "specprefill": json.dumps(values["specprefill"]),
            "max_tokens": 4,
            "stream": True,
        }
        for at in (0, 4000)
    ]
    seen = analyzer.load(analyzer.find(print), grpc, requests, 2, 4)
    assert len(seen) == 4
    assert {one.inputs["messages"] for one in seen} == {own["messages"] for own in requests}
    for one in seen:
        assert one.report["reason"] == "pruned"
        assert len(one.arrivals) == one.report["output_tokens"] == 4
        assert list(one.arrivals) == sorted(one.arrivals)
        assert 0 < one.report["ttft_s"] <= one.ttft_s
        assert one.text
    bad = [{**requests[0], "max_tokens": -1}]
    with pytest.raises(analyzer.AnalyzerFailed, match="max_tokens: got -1"):
        analyzer.load(analyzer.find(print), grpc, bad, 1, 1)


def traced(server: Server) -> list[dict[str, Any]]:
    """What the server has written of its traces; nothing while a file is being written."""
    try:
        files = server.log.parent.glob("trace*")
        return [entry for file in files for entry in json.loads(file.read_text())]
    except ValueError:
        return []


def test_a_trace_holds_every_step_of_a_request(
    grpc: str, server: Server, prose: str, tmp_path: Path
) -> None:
    import tritonclient.grpc as client

    def shown() -> bool:
        # The last response leaves before a trace is written, and Triton loses some of them.
        whole(grpc, {**asked(prose, 100), "max_tokens": 2})
        return "specprefill" in {entry.get("model_name") for entry in traced(server)}

    with client.InferenceServerClient(grpc) as connection:
        wanted = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "log_frequency": "1"}
        connection.update_trace_settings("specprefill", wanted)
        until(shown)
        connection.update_trace_settings("specprefill", {"trace_level": ["OFF"]})
    told = traced(server)
    named = {entry["id"]: entry["model_name"] for entry in told if "model_name" in entry}
    parents = {entry["id"]: entry.get("parent_id") for entry in told if "model_name" in entry}
    roots = [one for one, model in named.items() if model == "specprefill"]
    for root in roots:
        steps = {model for one, model in named.items() if parents[one] == root}
        assert steps >= {"orchestrator", "target"}


def test_many_plain_calls_at_once_are_answered_each(grpc: str, prose: str) -> None:
    values = [{**asked(prose, 100, at), "max_tokens": 2} for at in (0, 3000, 6000, 9000)]
    alone = [whole(grpc, own)[0] for own in values]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: infer(grpc, values[n % 4])[0], range(24)))
    assert answers == alone * 6


def test_plain_calls_are_answered_again_when_their_processes_died(
    grpc: str, server: Server, prose: str
) -> None:
    values = {**asked(prose, 100), "max_tokens": 2}
    expected, _ = infer(grpc, values)
    os.kill(process_of(server, "specprefill_infer"), signal.SIGKILL)

    def answered() -> bool:
        try:
            return infer(grpc, values)[0] == expected
        except RequestFailed as error:
            assert str(error).startswith(grpc)  # noqa: PT017  either may happen
            return False

    until(lambda: all(answered() for _ in range(4)))


def test_a_port_in_use_is_named(served: ServeSettings, server: Server, tmp_path: Path) -> None:
    launch = launch_of(served, render(served, tmp_path), (), print)
    with pytest.raises(InputError, match=r"ports\.http"):
        Server(launch, served.ports, tmp_path)


def test_serve_prints_its_endpoints_and_stops_on_a_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trtllm_specprefill.cli", "serve", "--repository"]
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    with subprocess.Popen(
        [*command, str(tmp_path), *ports], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        line = ""
        while "metrics" not in line:
            line = running.stdout.readline()
            assert line
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
    assert (tmp_path / "models" / "specprefill" / "config.pbtxt").is_file()
