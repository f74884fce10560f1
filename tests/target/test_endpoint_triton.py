"""Targets behind Triton's stock models: the real client over real gRPC, a small model behind it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import numpy as np
import pytest

from tests.target.wire import Behind, plan_of, target_of, text_of
from trtllm_specprefill.errors import TargetFailed
from trtllm_specprefill.models import Model
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.torch import TorchTarget

pytest.importorskip("tritonclient.grpc", reason="needs pip install tritonclient[grpc]")
import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

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
