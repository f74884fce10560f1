"""What the models of the server do, without a server."""

from __future__ import annotations

import gc
import json
import math
import re
import threading
import time
import weakref
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trtllm_specprefill.clock import decode_rate
from trtllm_specprefill.errors import (
    Cancelled,
    ContextTooLong,
    DegenerateScores,
    DraftFailed,
    DraftTimeout,
    InputError,
    SpecPrefillError,
    TargetFailed,
)
from trtllm_specprefill.forward import _check
from trtllm_specprefill.importance import Importance
from trtllm_specprefill.plan import PrunePlan, Reason
from trtllm_specprefill.serving import orchestrator
from trtllm_specprefill.serving.client import RequestFailed, infer, stream
from trtllm_specprefill.serving.commands import check_layers
from trtllm_specprefill.serving.control import check_folder, listen, tell
from trtllm_specprefill.serving.metrics import OrchestratorMetrics
from trtllm_specprefill.serving.orchestrator import (
    Orchestrator,
    importance_tensors,
    read_importance,
)
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.serving.wire import read_request, text_tensor
from trtllm_specprefill.serving.workers import Answer, AnsweringWorker, ScoringWorker
from trtllm_specprefill.settings import Sampling, Settings
from trtllm_specprefill.target.base import Step


class CountingTarget:
    """Answers with numbers; between two steps it looks up as a model does between layers."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.order: list[tuple[int, int]] = []
        self.closed = 0

    def stream(self, plan: PrunePlan, sampling: Sampling) -> Generator[Step, None, None]:
        try:
            for count in range(1, sampling.max_tokens + 1):
                while not self.gate.wait(0.01):
                    look_up()
                look_up()
                if int(plan.input_ids[0]) == 13:
                    raise TargetFailed("out of memory")
                if int(plan.input_ids[0]) == 14:
                    raise RuntimeError("a bug")
                self.order.append((int(plan.input_ids[0]), count))
                last = count == sampling.max_tokens
                yield Step(f"{count} ", (count,), "length" if last else None)
        finally:
            self.closed += 1


def look_up() -> None:
    check = _check.get()
    if check is not None:
        check()


class Client:
    """What one client saw."""

    def __init__(self, key: int, tokens: int, streamed: bool = True) -> None:
        ids = np.array([key, 5], dtype=np.int32)
        plan = PrunePlan(ids, np.arange(2, dtype=np.int32), 2, "original", 2, Reason.DISABLED)
        self.texts: list[str] = []
        self.report: dict[str, Any] | None = None
        self.error: str | None = None
        self.ended, self.dropped = threading.Event(), threading.Event()
        now = time.time()
        self.job = Answer(
            f"request {key}",
            plan,
            Sampling(max_tokens=tokens),
            streamed,
            {"stages": {"queue": 0.0}},
            now,
            now,
            self._took,
            self._failed,
            self.dropped.set,
        )

    def _took(self, text: str, report: dict[str, Any] | None) -> None:
        self.texts.append(text)
        if report is not None:
            self.report = report
            self.ended.set()

    def _failed(self, words: str) -> None:
        self.error = words
        self.ended.set()


def test_answers_take_turns_and_later_ones_wait_in_order() -> None:
    target = CountingTarget()
    worker = AnsweringWorker(target, answers=2)  # type: ignore[arg-type]
    target.gate.clear()
    clients = [Client(key, 4) for key in (1, 2, 3)]
    for client in clients:
        worker.submit(client.job)
    target.gate.set()
    assert all(client.ended.wait(30) for client in clients)
    assert [c.texts for c in clients] == [["1 ", "2 ", "3 ", "4 "]] * 3
    firsts = [key for key, count in target.order if count == 1]
    assert firsts == [1, 2, 3]
    assert target.order.index((3, 1)) > target.order.index((1, 4))
    assert target.order.index((2, 2)) < target.order.index((1, 4))
    assert target.closed == 3


def test_one_response_holds_the_whole_answer_and_its_report() -> None:
    worker = AnsweringWorker(CountingTarget(), answers=1)  # type: ignore[arg-type]
    client = Client(1, 3, streamed=False)
    worker.submit(client.job)
    assert client.ended.wait(30)
    assert client.texts == ["1 2 3 "]
    assert client.report is not None
    assert client.report["output_tokens"] == 3
    assert client.report["finish_reason"] == "length"
    assert {"queue", "target_queue", "target_prefill", "decode"} == {*client.report["stages"]}


@pytest.mark.parametrize("key", [13, 14])
def test_a_failing_answer_leaves_the_others_alone(key: int) -> None:
    worker = AnsweringWorker(CountingTarget(), answers=3)  # type: ignore[arg-type]
    clients = [Client(1, 3), Client(key, 3), Client(2, 3)]
    for client in clients:
        worker.submit(client.job)
    assert all(client.ended.wait(30) for client in clients)
    assert "out of memory" in (clients[1].error or "") or "a bug" in (clients[1].error or "")
    assert [clients[0].texts, clients[2].texts] == [["1 ", "2 ", "3 "]] * 2


def test_a_job_that_is_cancelled_while_it_waits_is_let_go_at_once() -> None:
    target = CountingTarget()
    worker = AnsweringWorker(target, answers=1)  # type: ignore[arg-type]
    running = Client(1, 10_000)
    worker.submit(running.job)
    gone = [Client(key, 2) for key in range(20, 30)]
    for client in gone:
        worker.submit(client.job)
        worker.cancel(client.job.request_id)
    assert all(client.dropped.wait(30) for client in gone)
    assert not running.ended.is_set()
    assert not worker._waiting
    worker.cancel(running.job.request_id)
    assert running.dropped.wait(30)


@pytest.mark.parametrize("key", [1, 13])
def test_a_server_that_takes_no_response_ends_one_answer_and_not_the_thread(key: int) -> None:
    worker = AnsweringWorker(CountingTarget(), answers=2)  # type: ignore[arg-type]

    def refuse(*args: Any) -> None:
        raise RuntimeError("no memory to share")

    broken, after = Client(key, 3), Client(2, 2)
    broken.job.send = broken.job.fail = refuse
    worker.submit(broken.job)
    assert worker.wait(broken.job.request_id, 30) == "done"
    worker.submit(after.job)
    assert after.ended.wait(30)
    assert after.error is None


@pytest.mark.parametrize("ask", [stream, infer])
def test_a_stop_that_is_one_text_is_not_taken_for_its_letters(ask: Any) -> None:
    pytest.importorskip("tritonclient.grpc")
    with pytest.raises(InputError, match=r"stop.*'END'.*list"):
        list(ask("127.0.0.1:1", {"text_input": "x", "stop": "END"}))


def test_an_answer_that_comes_at_once_has_no_rate_of_decoding() -> None:
    assert decode_rate(3, 0.5) == 4.0
    assert decode_rate(1, 0.5) is None
    assert decode_rate(2, 0.0) is None
    assert decode_rate(2, -0.001) is None  # the wall clock was put back


@pytest.mark.parametrize("moment", ["before", "waiting", "inside a pass"])
def test_a_cancelled_answer_ends_wherever_it_is(moment: str) -> None:
    target = CountingTarget()
    worker = AnsweringWorker(target, answers=1)  # type: ignore[arg-type]
    target.gate.clear()
    running, client = Client(1, 2), Client(2, 2)
    if moment == "before":
        worker.cancel(client.job.request_id)
    if moment != "inside a pass":
        worker.submit(running.job)
    worker.submit(client.job)
    assert worker.wait(client.job.request_id, 0) in ("running", "gone")
    worker.cancel(client.job.request_id)
    target.gate.set()
    while worker.wait(client.job.request_id, 0.05) == "running":
        pass
    assert worker.wait(client.job.request_id, 0) == "gone"
    after = Client(3, 2)
    worker.submit(after.job)
    assert after.ended.wait(30)
    assert client.texts == []
    assert client.dropped.wait(30)  # else Triton would hold the request for ever
    assert not after.dropped.is_set()
    assert worker.wait("request 3", 30) == "done"


@pytest.mark.parametrize("key", [1, 13, 14])
def test_nothing_of_an_answer_that_is_over_is_held(key: int) -> None:
    """Triton stops only when the last request's responses are let go of."""
    worker = AnsweringWorker(CountingTarget(), answers=1)  # type: ignore[arg-type]
    client, gone = Client(key, 2), threading.Event()
    weakref.finalize(client.job, gone.set)
    worker.submit(client.job)
    assert client.ended.wait(30)
    del client
    for _ in range(100):
        gc.collect()
        if gone.wait(0.05):
            break
    assert gone.is_set()


def test_an_answer_that_has_not_come_yet_is_not_over() -> None:
    """Whoever waits for it would else stop to, and never hear that its client went away."""
    worker = AnsweringWorker(CountingTarget(), answers=1)  # type: ignore[arg-type]
    client = Client(1, 2)
    assert worker.wait(client.job.request_id, 0) == "running"
    worker.submit(client.job)
    assert worker.wait(client.job.request_id, 30) == "done"


class ScriptedDraft:
    """Scores, fails or takes its time, as told."""

    def __init__(self, script: Any) -> None:
        self.script = script

    def score(self, ids: Any, settings: Any, question: Any) -> Importance:
        result: Importance = self.script(ids)
        return result


def scored(worker: ScoringWorker, timeout: float = 60.0) -> Any:
    return worker.score("one", np.arange(5, dtype=np.int32), None, Settings(), timeout)


def forever(ids: Any) -> Any:
    while True:
        look_up()
        time.sleep(0.005)


def raising(error: BaseException) -> Any:
    def script(ids: Any) -> Any:
        raise error

    return script


def test_scoring_ends_at_its_deadline_or_when_its_client_has_gone() -> None:
    worker = ScoringWorker(ScriptedDraft(forever))  # type: ignore[arg-type]
    assert isinstance(scored(worker, 0.05), DraftTimeout)
    threading.Timer(0.05, worker.cancel, ("one",)).start()
    result = scored(worker)
    assert isinstance(result, DraftFailed)
    assert "cancelled" in str(result)


ERRORS: list[SpecPrefillError] = [
    DraftFailed("no layer"),
    DegenerateScores("all zero"),
    DraftTimeout("too slow"),
    ContextTooLong("prompt", "9 tokens", "at most 8"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_what_went_wrong_crosses_the_wire_as_itself(error: SpecPrefillError) -> None:
    result = scored(ScoringWorker(ScriptedDraft(raising(error))))  # type: ignore[arg-type]
    with pytest.raises(type(error)) as caught:
        read_importance(importance_tensors(result), 0.0)
    assert type(caught.value) is type(error)


def test_a_bug_in_the_draft_is_a_failed_draft() -> None:
    result = scored(ScoringWorker(ScriptedDraft(raising(KeyError("x")))))  # type: ignore[arg-type]
    with pytest.raises(DraftFailed, match="KeyError"):
        read_importance(importance_tensors(result), 0.0)


def test_importance_crosses_the_wire_unchanged() -> None:
    scores = np.random.default_rng().random(37, np.float32) + 0.1
    given_ = Importance(scores, 3, 9, (0, 2, 5), {"draft_prefill": 1.25})
    came = read_importance(importance_tensors(given_), 2.0)
    np.testing.assert_array_equal(came.scores, scores)
    assert (came.queries, came.heads, came.layers) == (3, 9, (0, 2, 5))
    assert came.seconds == {"draft_queue": 0.75, "draft_prefill": 1.25}


def test_cancelled_is_no_failure_that_a_fallback_could_catch() -> None:
    assert not issubclass(Cancelled, Exception)


class LoneMetric:
    """A metric as Triton's: it lets other threads run while it changes, and bears none of them."""

    def __init__(self, changed: list[float], **settings: Any) -> None:
        self._changed, self._busy = changed, False

    def increment(self, value: float) -> None:
        assert not self._busy
        self._busy = True
        time.sleep(0.001)
        self._changed.append(value)
        self._busy = False

    set = observe = increment


def test_a_head_is_read_before_the_answers_that_come_after_it_and_may_fail() -> None:
    class Ahead(CountingTarget):
        def read_ahead(self, head: NDArray[np.int32]) -> None:
            self.order.append((int(head[0]), 0))
            if head[0] == 2:
                raise RuntimeError("a bug")

    target = Ahead()
    worker: Any = AnsweringWorker(target, 1)  # type: ignore[arg-type]
    for key in (1, 2, 3):
        worker.read_ahead(f"request {key}", np.array([key], dtype=np.int32))
        client = Client(key, 1)
        worker.submit(client.job)
        assert client.ended.wait(10)
    assert target.order == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]


@pytest.mark.model
@pytest.mark.parametrize(
    ("layers", "asked", "words"),
    [
        (9, {}, None),
        (30, {"scoring": "lookahead"}, None),
        (12, {"draft_layers": 12}, None),
        (8, {}, "9 to 30"),
        (31, {}, "9 to 30"),
        (11, {"draft_layers": 12}, "12 to 30"),
        (9, {"scoring": "lookahead"}, "30 to 30"),
    ],
)
def test_a_server_loads_the_layers_that_its_settings_run(
    layers: int, asked: dict[str, Any], words: str | None
) -> None:
    settings = ServeSettings.of({"draft": {"layers": layers}, "settings": asked})
    if words is None:
        check_layers(settings)
        return
    with pytest.raises(InputError, match=rf"draft.layers: got {layers}, allowed: {words}"):
        check_layers(settings)


def test_layers_to_load_are_refused_where_nothing_reads_them() -> None:
    engine = {"backend": "onnx", "path": "engine", "layers": 9}
    assert ServeSettings.of({"draft": engine}).draft.layers == 9  # of torch in its place
    with pytest.raises(InputError, match=r"draft.layers: got 9, allowed: none"):
        ServeSettings.of({"draft": {**engine, "fallback": "none"}})


def test_the_orchestrator_tells_the_target_of_a_head_where_the_two_have_their_own_devices(
    tmp_path: Path,
) -> None:
    told: list[dict[str, Any]] = []

    def tell_target(model: str, message: dict[str, Any]) -> dict[str, Any]:
        told.append(message)
        if message["message"] == "head":
            raise TargetFailed("down")  # which is nobody's affair yet
        return {"honoured": True, "window": None, "context": 8192}

    def head(**target: Any) -> list[list[int]]:
        told.clear()
        settings = ServeSettings.of({"target": target})
        pipeline = Orchestrator(settings, lambda _: {}, tell_target)._pipeline
        token = orchestrator._in_flight.set(orchestrator.InFlight("one", lambda: False))
        pipeline.target.read_ahead(np.array([5, 6], dtype=np.int32))
        orchestrator._in_flight.reset(token)
        assert {message["id"] for message in told} <= {"one"}
        return [message["ids"] for message in told]

    assert head() == []
    assert head(device="cuda:1") == [[5, 6]]
    assert head(read_ahead=True) == [[5, 6]]
    assert head(device="cuda:1", cache_mib=0) == []
    assert head(device="cuda:1", read_ahead=False) == []


def test_threads_take_turns_at_a_metric() -> None:
    changed: dict[str, list[float]] = {}

    class Family:
        COUNTER, GAUGE, HISTOGRAM = "COUNTER", "GAUGE", "HISTOGRAM"

        def __init__(self, name: str, description: str, kind: str) -> None:
            self._changed = changed.setdefault(name, [])

        def Metric(self, **settings: Any) -> LoneMetric:  # noqa: N802  Triton's name
            return LoneMetric(self._changed, **settings)

    metrics = OrchestratorMetrics(SimpleNamespace(MetricFamily=Family))
    plan = PrunePlan(
        np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), 9, "original", 9, Reason.PRUNED
    )
    planned: Any = SimpleNamespace(plan=plan, stages={"draft": 0.5, "draft_prefill": 1.0})

    def one(number: int) -> None:
        metrics.inside(number)
        metrics.planned(planned)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(40)))
    assert sorted(changed.pop("specprefill_requests_inside")) == list(range(40))
    assert changed.pop("specprefill_tokens_saved_total") == [6] * 40
    assert {name: len(values) for name, values in changed.items()} == {
        "specprefill_requests_total": 40,
        "specprefill_keep_rate": 40,
        "specprefill_draft_seconds": 40,
    }


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("c")
    listen(folder, "target", lambda told: {"got": told})
    return folder


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9), max_size=4))
def test_messages_reach_a_model_and_its_answer_comes_back(
    control: Path, message: dict[str, Any]
) -> None:
    assert tell(control, "target", message) == {"got": message}


def test_a_model_that_is_not_there_is_named(control: Path) -> None:
    with pytest.raises(TargetFailed, match="draft"):
        tell(control, "draft", {})


def test_a_folder_too_deep_for_a_socket_is_refused() -> None:
    with pytest.raises(InputError, match="repository"):
        check_folder(Path("/" + "deep/" * 30))


def read(**values: Any) -> Any:
    tensors = {
        k: text_tensor(v) if isinstance(v, str) else np.array([v]) for k, v in values.items()
    }
    return read_request(tensors)


def test_a_request_is_read_whole() -> None:
    own = {"keep": 0.2, "positions": "contiguous", "protect": ["a"], "kept_spans": True}
    got = read(
        messages=json.dumps([{"role": "user", "content": "hi"}]),
        max_tokens=7,
        temperature=0.5,
        stream=True,
        specprefill=json.dumps(own),
    )
    assert got.source == [{"role": "user", "content": "hi"}]
    assert got.knobs == {
        "keep": 0.2,
        "positions": "contiguous",
        "max_tokens": 7,
        "temperature": 0.5,
    }
    assert (got.protect, got.stream, got.kept_spans) == (("a",), True, True)
    assert read(text_input="x", specprefill="off").knobs == {"enabled": False}
    assert read(text_input="x", specprefill='{"off": true}').knobs == {"enabled": False}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "text_input and messages"),
        ({"text_input": "a", "messages": "[]"}, "text_input and messages"),
        ({"messages": "{"}, "messages"),
        ({"messages": "{}"}, "messages"),
        ({"messages": "[1]"}, "messages"),
        ({"text_input": "a", "tools": "1"}, "tools"),
        ({"text_input": "a", "specprefill": "[]"}, "specprefill"),
        ({"text_input": "a", "specprefill": '{"ratio": 1}'}, "specprefill.ratio"),
        ({"text_input": "a", "specprefill": '{"protect": "b"}'}, "specprefill.protect"),
        ({"text_input": "a", "specprefill": '{"kept_spans": 1}'}, "specprefill.kept_spans"),
    ],
)
def test_a_bad_request_names_its_input(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        read(**values)
    assert caught.value.field == field


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(InputError, match="text_input"):
        read_request({"text_input": np.array([b"\xff\xfe"], dtype=object)})


def test_a_settings_file_is_read_and_its_mistakes_are_named(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("target: {model: gemma3-270m}\nsettings: {keep_rate: 0.1}\n")
    settings = ServeSettings.read(file)
    assert settings.target.model == "gemma3-270m"
    assert settings.settings.keep_rate == 0.1
    for text, field in (
        ("settings: {keep_rate: 7}", "settings.keep_rate"),
        ("limits: {requests: 0}", "limits.requests"),
        ("drafts: {}", "drafts"),
        ("- 1", "config"),
        ("a: [", "config"),
    ):
        file.write_text(text)
        with pytest.raises(InputError) as caught:
            ServeSettings.read(file)
        assert caught.value.field == field


def test_a_server_that_is_not_there_is_named() -> None:
    pytest.importorskip("tritonclient.grpc")
    with pytest.raises(RequestFailed, match=r"^127\.0\.0\.1:1: "):
        list(stream("127.0.0.1:1", {"text_input": "two words"}))


@pytest.mark.parametrize(
    ("own", "field"),
    [
        ({"off": "no"}, "specprefill.off"),
        ({"off": 1}, "specprefill.off"),
        ({"keep": 0.1, "keep_rate": 0.3}, "specprefill.keep and keep_rate"),
        ({"question": 3}, "specprefill.question"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(own: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=re.escape(field)):
        read(text_input="a b", specprefill=json.dumps(own))


def test_a_marked_question_goes_over_the_wire() -> None:
    assert read(text_input="a b", specprefill='{"question": "a"}').question == "a"
    assert read(text_input="a b").question is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"target": {"backend": "endpoint"}}, "target.url"),
        (
            {"ports": {"http": 9000, "grpc": 9000}},
            "ports.grpc: got 9000, .* another port than http",
        ),
        ({"ports": {"grpc": 8002}}, "ports.metrics: got 8002, .* another port than grpc"),
        ({"drafft": {}}, "drafft: .* only the names draft, target"),
        ({"draft": {"modell": "x"}}, "draft.modell: got 'x', .* only the names model, dtype"),
        ({"draft": {"threads": 0}}, "draft.threads: got 0, .* a whole number >= 1, or none"),
        ({"limits": {"presence": "x"}}, "limits.presence: got 'x', .* a number > 0"),
        ({"limits": {"presence": math.inf}}, "limits.presence: got inf"),
        ({"ports": {"http": 65536}}, "ports.http: got 65536, .* >= 0 and <= 65535"),
        ({"target": {"backend": "tpu"}}, "target.backend: got 'tpu', .* torch, .* or endpoint"),
        ({"draft": {"dtype": "float8"}}, "draft.dtype: got 'float8', .* bfloat16 or float16"),
        ({"draft": {"device": "tpu"}}, "draft.device: got 'tpu', .* cuda or cuda:N"),
        ({"draft": 5}, "draft: got 5, .* an object with some of model, dtype"),
        ({"settings": {"pool": 4}}, "settings.pool: got 4, .* odd"),
        ({"sampling": {"stop": ["a", 5]}}, "sampling.stop: got 5, .* a list of texts"),
        ({1: 2}, "1: got 1, .* only the names draft"),
    ],
)
def test_settings_of_a_server_that_cannot_be_are_refused_by_name(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        ServeSettings.of(values)


def test_any_number_of_ports_may_be_free_ones() -> None:
    ports = ServeSettings.of({"ports": {"http": 0, "grpc": 0, "metrics": 0}}).ports
    assert (ports.http, ports.grpc, ports.metrics) == (0, 0, 0)
