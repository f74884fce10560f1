"""Ask a running server over gRPC, with plain tritonclient: also the example of how to do it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np

from trtllm_specprefill.errors import InputError, SpecPrefillError
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.settings import Sampling

_KINDS = {
    "max_tokens": ("INT32", np.int32),
    "top_k": ("INT32", np.int32),
    "temperature": ("FP32", np.float32),
    "top_p": ("FP32", np.float32),
    "seed": ("UINT64", np.uint64),
    "stream": ("BOOL", np.bool_),
}
_INT32 = 2**31 - 1


class RequestFailed(SpecPrefillError):
    """The server answered with an error; its words name the step."""


class RequestRefused(RequestFailed):
    """The server found something wrong with the request itself."""

    exit_code = 2


def check_url(field: str, url: str) -> None:
    """Raise `InputError` unless `url` is host:port."""
    if not re.fullmatch(r"[^/\s]+:\d{1,5}", url):
        raise InputError(field, url, "host:port of the gRPC endpoint, such as 127.0.0.1:8001")


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


def _check(values: dict[str, Any]) -> None:
    """Raise `InputError` for what no request can carry, or no server takes."""
    if isinstance(values.get("stop"), str):
        raise InputError("stop", values["stop"], "a list of texts")
    for name, value in values.items():
        if name in Sampling.model_fields and value is not None:
            Sampling.of(**{name: value})
            if _KINDS.get(name, ("",))[0] == "INT32" and value > _INT32:
                raise InputError(name, value, f"at most {_INT32}")


def stream(url: str, values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Texts as they come, the last one with the report.

    url: host:port of the gRPC endpoint. Closing the iterator cancels the request. Raises
    `RequestFailed` with the server's words, of it `RequestRefused` for bad input, and
    `InputError` for what need not be sent.
    """
    grpc = _tritonclient()
    _check(values)
    inputs = inputs_of({**values, "stream": True})
    responses: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    client = grpc.InferenceServerClient(url)
    try:
        # Without the header an error comes as words alone, and not as a status.
        client.start_stream(
            lambda result, error: responses.put((result, error)),
            headers={"triton_grpc_error": "true"},
        )
        client.async_stream_infer("specprefill", inputs)
        report = None
        while report is None:
            result, error = responses.get()
            if error is not None:
                raise _failed(url, error)
            text = result.as_numpy("text_output")
            if text is None:  # the empty response that ends a request
                raise RequestFailed("the server ended the request without an answer")
            told = result.as_numpy("report")
            report = None if told is None else json.loads(told[0])
            yield text[0].decode(), report
    except grpc.InferenceServerException as error:
        # A stream that could not be opened says why to its callback only.
        told_why = None if responses.empty() else responses.get()[1]
        raise _failed(url, told_why or error) from None
    finally:
        client.stop_stream(cancel_requests=True)
        client.close()


def infer(url: str, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The whole answer and its report from one plain call.

    Raises what `stream` raises, but seldom `RequestRefused`: `specprefill_infer` passes on words
    and no status.
    """
    grpc = _tritonclient()
    _check(values)
    client = grpc.InferenceServerClient(url)
    try:
        result = client.infer("specprefill_infer", inputs_of(values))
    except grpc.InferenceServerException as error:
        raise _failed(url, error) from None
    finally:
        client.close()
    text, report = result.as_numpy("text_output"), result.as_numpy("report")
    if text is None or report is None:
        raise RequestFailed("the server ended the request without an answer")
    return text[0].decode(), json.loads(report[0])


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


def _failed(url: str, error: Any) -> RequestFailed:
    bad_input = error.status() == "StatusCode.INVALID_ARGUMENT"
    return (RequestRefused if bad_input else RequestFailed)(f"{url}: {error.message()}")


def _tritonclient() -> Any:
    try:
        import tritonclient.grpc as grpc
    except ImportError:
        raise SpecPrefillError(
            "tritonclient is not installed: pip install 'tritonclient[grpc]'"
        ) from None
    return grpc
