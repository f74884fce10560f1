"""Targets behind a wire: real HTTP and gRPC on the loopback, a small model behind them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.target.conftest import never_ending
from tests.test_judges import random_model
from trtllm_specprefill.errors import InputError, TargetFailed
from trtllm_specprefill.models import Model
from trtllm_specprefill.plan import PrunePlan, Reason
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.base import Step
from trtllm_specprefill.target.endpoint import EndpointTarget, connect
from trtllm_specprefill.target.engine import EngineModel
from trtllm_specprefill.target.torch import TorchTarget

grpc = pytest.importorskip("grpc", reason="needs tritonclient[grpc]")
from tritonclient.grpc import service_pb2, service_pb2_grpc  # noqa: E402
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor  # noqa: E402


@pytest.fixture(scope="module")
def model(byte_level: PreTrainedTokenizerFast) -> Model:
    return never_ending(random_model("llama", byte_level, vocab_size=len(byte_level)))


@dataclass
class Behind:
    """What a server does, and what it was asked."""

    model: Model
    asked: list[dict[str, Any]] = field(default_factory=list)
    instead: Callable[[Any], bool] | None = None
    gone: threading.Event = field(default_factory=threading.Event)

    def answer(self, ids: list[int], sampling: Sampling) -> Iterator[Step]:
        n = len(ids)
        at = np.arange(n, dtype=np.int32)
        plan = PrunePlan(np.asarray(ids, np.int32), at, n, "original", n, Reason.DISABLED)
        return TorchTarget(self.model).stream(plan, sampling)


def plan_of(tokenizer: Any, text: str = "The key to the cellar lies under the third") -> PrunePlan:
    ids = np.asarray(tokenizer.encode(text), dtype=np.int32)
    at = np.arange(ids.size, dtype=np.int32)
    return PrunePlan(ids, at, ids.size, "contiguous", 4 * ids.size, Reason.PRUNED)


def target_of(url: str, model: Model, timeout_s: float = 20.0) -> EndpointTarget:
    described = EngineModel(model.name, model.tokenizer, model.config, model.eos_token_ids)
    return EndpointTarget(connect(url, "served", timeout_s), described)


def text_of(steps: list[Step]) -> str:
    return "".join(step.text for step in steps)


# --- OpenAI-compatible


class Handler(BaseHTTPRequestHandler):
    behind: Behind

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.behind.asked.append({"path": self.path, **body})
        if self.behind.instead and self.behind.instead(self):
            return
        self.send_response(200)
        self.end_headers()
        drawn = {k: body[k] for k in ("max_tokens", "temperature", "top_p")}
        drawn |= {k: body[k] for k in ("top_k", "seed", "stop") if k in body}
        drawn["stop"] = tuple(drawn.get("stop", ()))
        try:
            for step in self.behind.answer(body["prompt"], Sampling(**drawn)):
                choice = {"index": 0, "text": step.text, "finish_reason": step.finish_reason}
                self.event(json.dumps({"object": "text_completion", "choices": [choice]}))
            self.event("[DONE]")
        except OSError:
            self.behind.gone.set()

    def event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def openai(model: Model) -> Iterator[tuple[str, Behind]]:
    behind = Behind(model)
    handler = type("Bound", (Handler,), {"behind": behind})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", behind
    server.shutdown()
    server.server_close()


def test_an_openai_server_gives_the_answer_of_the_model_itself(
    openai: tuple[str, Behind], model: Model
) -> None:
    url, behind = openai
    plan = plan_of(model.tokenizer)
    for sampling in (
        Sampling(max_tokens=9),
        Sampling(max_tokens=9, temperature=1.3, top_k=20, top_p=0.9, seed=5),
    ):
        got = list(target_of(url, model).stream(plan, sampling))
        direct = list(TorchTarget(model).stream(plan, sampling))
        assert text_of(got) == text_of(direct)
        assert got[-1].finish_reason == direct[-1].finish_reason == "length"
    assert behind.asked[0]["path"] == "/v1/completions"
    assert behind.asked[0]["model"] == "served"
    assert behind.asked[0]["prompt"] == plan.input_ids.tolist()
    assert len(got) == 9  # streamed, not gathered


def test_stop_texts_are_the_servers_work(openai: tuple[str, Behind], model: Model) -> None:
    url, behind = openai
    plan = plan_of(model.tokenizer)
    words = text_of(list(TorchTarget(model).stream(plan, Sampling(max_tokens=12))))
    stop = words[4:7]
    got = list(target_of(url, model).stream(plan, Sampling(max_tokens=12, stop=(stop,))))
    assert text_of(got) == words[: words.index(stop)]
    assert got[-1].finish_reason == "stop"
    assert behind.asked[0]["stop"] == [stop]


def test_closing_the_stream_hangs_up(openai: tuple[str, Behind], model: Model) -> None:
    url, behind = openai
    stream = target_of(url, model).stream(plan_of(model.tokenizer), Sampling(max_tokens=3000))
    next(stream)
    stream.close()
    assert behind.gone.wait(30)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("not json", "not a completion: not json"),
        ('{"choices": []}', "not a completion"),
        ("[]", "not a completion"),
        ('{"error": {"message": "out of memory"}}', "out of memory"),
        ('{"choices": [{"text": "x", "finish_reason": "abort"}]}', "ended the request: abort"),
        ("[DONE]", "ended without a finish reason"),
    ],
)
def test_nonsense_from_a_server_is_a_target_failure(
    openai: tuple[str, Behind], model: Model, data: str, words: str
) -> None:
    url, behind = openai

    def instead(handler: Handler) -> bool:
        handler.send_response(200)
        handler.end_headers()
        handler.event(data)
        return True

    behind.instead = instead
    with pytest.raises(TargetFailed, match=words) as failure:
        list(target_of(url, model).stream(plan_of(model.tokenizer), Sampling()))
    assert url in str(failure.value)


def test_a_status_that_is_no_success_is_told_with_its_words(
    openai: tuple[str, Behind], model: Model
) -> None:
    url, behind = openai

    def instead(handler: Handler) -> bool:
        handler.send_response(503)
        handler.end_headers()
        handler.wfile.write(b"the model is loading")
        return True

    behind.instead = instead
    with pytest.raises(TargetFailed, match="503: the model is loading"):
        list(target_of(url, model).stream(plan_of(model.tokenizer), Sampling()))


def test_a_slow_server_and_one_that_is_gone_are_target_failures(
    openai: tuple[str, Behind], model: Model
) -> None:
    url, behind = openai
    waiting = threading.Event()
    behind.instead = lambda handler: waiting.wait(20)
    with pytest.raises(TargetFailed, match="timed out"):
        list(target_of(url, model, 0.2).stream(plan_of(model.tokenizer), Sampling()))
    waiting.set()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(TargetFailed, match="refused"):
            list(target_of(nobody, model).stream(plan_of(model.tokenizer), Sampling()))


# --- Triton

# Inputs of the stock models, from triton_backend/all_models/inflight_batcher_llm/
# {tensorrt_llm @ 0c8de69, ensemble @ 2a9abd9}/config.pbtxt in NVIDIA/TensorRT-LLM.
STOCK: dict[str, dict[str, str]] = {
    "tensorrt_llm": {
        "input_ids": "INT32",
        "input_lengths": "INT32",
        "request_output_len": "INT32",
        "end_id": "INT32",
        "pad_id": "INT32",
        "streaming": "BOOL",
        "exclude_input_in_output": "BOOL",
        "runtime_top_k": "INT32",
        "runtime_top_p": "FP32",
        "temperature": "FP32",
        "seed": "UINT64",
    },
    "ensemble": {
        "text_input": "BYTES",
        "max_tokens": "INT32",
        "stream": "BOOL",
        "stop_words": "BYTES",
        "top_k": "INT32",
        "top_p": "FP32",
        "temperature": "FP32",
        "seed": "UINT64",
    },
}
NUMPY = {"INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_}


class Stock(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, behind: Behind) -> None:
        self.behind = behind

    def ModelStreamInfer(  # noqa: N802  (gRPC's own name)
        self, requests: Any, context: Any
    ) -> Iterator[Any]:
        context.add_callback(self.behind.gone.set)
        for request in requests:
            values = {}
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
                assert STOCK[request.model_name][tensor.name] == tensor.datatype, tensor.name
                assert tensor.shape[0] == 1
                if tensor.datatype == "BYTES":
                    values[tensor.name] = deserialize_bytes_tensor(raw)
                else:
                    values[tensor.name] = np.frombuffer(raw, NUMPY[tensor.datatype])
            self.behind.asked.append({"model": request.model_name, **values})
            if self.behind.instead and self.behind.instead(context):
                yield service_pb2.ModelStreamInferResponse(error_message="the engine is down")
                continue
            yield from self.responses(request.model_name, values)

    def responses(self, name: str, values: dict[str, Any]) -> Iterator[Any]:
        text = name == "ensemble"
        tokenizer = self.behind.model.tokenizer
        ids = (
            tokenizer.encode(values["text_input"][0].decode())
            if text
            else values["input_ids"].tolist()
        )
        sampling = Sampling(
            max_tokens=int(values["max_tokens" if text else "request_output_len"][0]),
            temperature=float(values.get("temperature", [0.0])[0]),
            seed=int(values["seed"][0]) if "seed" in values else None,
            stop=tuple(w.decode() for w in values.get("stop_words", ())),
        )
        for step in self.behind.answer(ids, sampling):
            if text:
                body = [("text_output", "BYTES", [1], _bytes(step.text))]
            else:
                shown = np.array(step.token_ids, np.int32)
                body = [
                    ("output_ids", "INT32", [1, 1, shown.size], shown.tobytes()),
                    ("sequence_length", "INT32", [1, 1], np.int32(shown.size).tobytes()),
                ]
            yield self.response(name, body)
        yield self.response(name, [], final=True)

    def response(self, name: str, body: list[Any], final: bool = False) -> Any:
        answer = service_pb2.ModelInferResponse(model_name=name)
        answer.parameters["triton_final_response"].bool_param = final
        for output, kind, shape, raw in body:
            tensor = answer.outputs.add()
            tensor.name, tensor.datatype = output, kind
            tensor.shape.extend(shape)
            answer.raw_output_contents.append(raw)
        return service_pb2.ModelStreamInferResponse(infer_response=answer)


def _bytes(text: str) -> bytes:
    return bytes(serialize_byte_tensor(np.array([text.encode()], np.object_)).item())


@pytest.fixture
def triton(model: Model) -> Iterator[tuple[str, Behind]]:
    behind = Behind(model)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Stock(behind), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"grpc://127.0.0.1:{port}", behind
    server.stop(None)


@pytest.mark.parametrize("name", ["tensorrt_llm", "ensemble"])
def test_a_triton_server_gives_the_answer_of_the_model_itself(
    triton: tuple[str, Behind], model: Model, name: str
) -> None:
    url, behind = triton
    plan = plan_of(model.tokenizer)
    for sampling in (Sampling(max_tokens=9), Sampling(max_tokens=9, temperature=1.5, seed=4)):
        got = list(target_of(f"{url}/{name}", model).stream(plan, sampling))
        direct = list(TorchTarget(model).stream(plan, sampling))
        assert text_of(got) == text_of(direct)
        assert len(got) >= 9
    assert behind.asked[0]["model"] == name
    greedy = "runtime_top_k" if name == "tensorrt_llm" else "top_k"
    assert behind.asked[0][greedy].tolist() == [1]
    assert "temperature" not in behind.asked[0]


@pytest.mark.parametrize("name", ["tensorrt_llm", "ensemble"])
def test_stop_texts_end_a_triton_answer(
    triton: tuple[str, Behind], model: Model, name: str
) -> None:
    url, _ = triton
    plan = plan_of(model.tokenizer)
    words = text_of(list(TorchTarget(model).stream(plan, Sampling(max_tokens=12))))
    sampling = Sampling(max_tokens=500, stop=(words[4:7],))
    got = list(target_of(f"{url}/{name}", model).stream(plan, sampling))
    assert text_of(got) == words[: words.index(words[4:7])]
    assert got[-1].finish_reason == "stop"


def test_closing_a_triton_stream_cancels_the_request(
    triton: tuple[str, Behind], model: Model
) -> None:
    url, behind = triton
    target = target_of(f"{url}/tensorrt_llm", model)
    stream = target.stream(plan_of(model.tokenizer), Sampling(max_tokens=3000))
    next(stream)
    stream.close()
    assert behind.gone.wait(30)


def test_an_error_of_triton_and_a_server_that_is_gone_are_target_failures(
    triton: tuple[str, Behind], model: Model
) -> None:
    url, behind = triton
    behind.instead = lambda context: True
    target = target_of(f"{url}/tensorrt_llm", model)
    with pytest.raises(TargetFailed, match="the engine is down"):
        list(target.stream(plan_of(model.tokenizer), Sampling()))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"grpc://127.0.0.1:{free.getsockname()[1]}/tensorrt_llm"
        with pytest.raises(TargetFailed, match=nobody):
            list(target_of(nobody, model).stream(plan_of(model.tokenizer), Sampling()))


def test_a_silent_triton_server_is_a_target_failure(
    triton: tuple[str, Behind], model: Model
) -> None:
    url, behind = triton
    waiting = threading.Event()
    behind.instead = lambda context: waiting.wait(20)
    target = target_of(f"{url}/ensemble", model, 0.3)
    with pytest.raises(TargetFailed, match=url):
        list(target.stream(plan_of(model.tokenizer), Sampling()))
    waiting.set()


# --- both


def test_original_positions_are_not_for_an_endpoint(model: Model) -> None:
    target = target_of("http://127.0.0.1:9/v1", model)
    assert not target.position_support.honoured
    ids = np.arange(5, 9, dtype=np.int32)
    gappy = PrunePlan(ids, ids * 2, 30, "original", 30, Reason.PRUNED)
    with pytest.raises(TargetFailed, match="no position ids"):
        next(target.stream(gappy, Sampling()))


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://host/v1", "grpc://host:8001", "grpc://host:8001/other"]
)
def test_a_bad_url_says_which_are_allowed(url: str) -> None:
    with pytest.raises(InputError, match=r"grpc://HOST:PORT/tensorrt_llm"):
        connect(url, "served")
