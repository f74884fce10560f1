"""Ask a running server over gRPC, with plain tritonclient: also the example of how to do it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np

from trtllm_specprefill.errors import SpecPrefillError
from trtllm_specprefill.serving.settings import ServeSettings

_KINDS = {
    "max_tokens": ("INT32", np.int32),
    "top_k": ("INT32", np.int32),
    "temperature": ("FP32", np.float32),
    "top_p": ("FP32", np.float32),
    "seed": ("UINT64", np.uint64),
    "stream": ("BOOL", np.bool_),
}


class RequestFailed(SpecPrefillError):
    """The server answered with an error; its words name the step."""


def inputs_of(values: dict[str, Any]) -> list[Any]:
    """tritonclient inputs from values by name.

    Numbers as they are; `messages`, `tools` and `specprefill` as JSON values; None is left out.
    Raises `SpecPrefillError` when tritonclient is not installed.
    """
    grpc = _tritonclient()
    inputs = []
    for name, value in values.items():
        if value is None:
            continue
        if name in _KINDS:
            kind, dtype = _KINDS[name]
            tensor = np.array([value], dtype=dtype)
        else:
            kind = "BYTES"
            texts = value if name == "stop" else [value]
            spelt = [t if isinstance(t, str) else json.dumps(t) for t in texts]
            tensor = np.array([t.encode() for t in spelt], dtype=np.object_)
        one = grpc.InferInput(name, list(tensor.shape), kind)
        one.set_data_from_numpy(tensor)
        inputs.append(one)
    return inputs


def stream(url: str, values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Texts as they come, the last one with the report.

    url: host:port of the gRPC endpoint. Closing the iterator cancels the request. Raises
    `RequestFailed` with the server's words.
    """
    grpc = _tritonclient()
    responses: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    client = grpc.InferenceServerClient(url)
    try:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer("specprefill", inputs_of({**values, "stream": True}))
        report = None
        while report is None:
            result, error = responses.get()
            if error is not None:
                raise RequestFailed(f"{url}: {error.message()}")
            text = result.as_numpy("text_output")
            if text is None:  # the empty response that ends a request
                raise RequestFailed("the server ended the request without an answer")
            told = result.as_numpy("report")
            report = None if told is None else json.loads(told[0])
            yield text[0].decode(), report
    except grpc.InferenceServerException as error:
        # A stream that could not be opened says why to its callback only.
        told_why = None if responses.empty() else responses.get()[1]
        raise RequestFailed(f"{url}: {(told_why or error).message()}") from None
    finally:
        client.stop_stream(cancel_requests=True)
        client.close()


def infer(url: str, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The whole answer and its report from one plain call. Raises `RequestFailed`."""
    grpc = _tritonclient()
    client = grpc.InferenceServerClient(url)
    try:
        result = client.infer("specprefill_infer", inputs_of(values))
    except grpc.InferenceServerException as error:
        raise RequestFailed(f"{url}: {error.message()}") from None
    finally:
        client.close()
    return result.as_numpy("text_output")[0].decode(), json.loads(result.as_numpy("report")[0])


def server_facts(url: str) -> tuple[ServeSettings, str]:
    """What a running server was started with, and the version of its tritonserver.

    Raises `RequestFailed` when it cannot be asked.
    """
    grpc = _tritonclient()
    client = grpc.InferenceServerClient(url)
    try:
        config = client.get_model_config("orchestrator", as_json=True)["config"]
        triton = str(client.get_server_metadata().version)
    except grpc.InferenceServerException as error:
        raise RequestFailed(f"{url}: {error.message()}") from None
    finally:
        client.close()
    settings = json.loads(config["parameters"]["settings"]["string_value"])
    return ServeSettings.of(settings), triton


def _tritonclient() -> Any:
    try:
        import tritonclient.grpc as grpc
    except ImportError:
        raise SpecPrefillError(
            "tritonclient is not installed: pip install 'tritonclient[grpc]'"
        ) from None
    return grpc
