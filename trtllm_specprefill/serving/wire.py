"""What goes over the wire: a client's request, and the values handed from step to step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.errors import InputError
from trtllm_specprefill.settings import Sampling, Settings

# Inputs a client may send, by name: Triton's type, and whether the value is a list.
INPUTS: dict[str, tuple[str, bool]] = {
    "text_input": ("TYPE_STRING", False),
    "messages": ("TYPE_STRING", False),
    "tools": ("TYPE_STRING", False),
    "max_tokens": ("TYPE_INT32", False),
    "temperature": ("TYPE_FP32", False),
    "top_p": ("TYPE_FP32", False),
    "top_k": ("TYPE_INT32", False),
    "seed": ("TYPE_UINT64", False),
    "stop": ("TYPE_STRING", True),
    "stream": ("TYPE_BOOL", False),
    "specprefill": ("TYPE_STRING", False),
}


@dataclass(frozen=True)
class Request:
    """What one client asks for.

    source: a text, or chat messages. protect, question: see `prompt.prepare`. knobs: fields of
    `Settings` and `Sampling` by name.
    stream: one response per step, else one in all. kept_spans: put them in the report.
    """

    source: str | list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    protect: tuple[str, ...]
    question: str | None
    knobs: dict[str, Any]
    stream: bool
    kept_spans: bool


def read_request(tensors: dict[str, NDArray[Any] | None]) -> Request:
    """A request from its input tensors by name; those not sent are None or absent.

    Raises `InputError` naming the input, the value and what is allowed.
    """
    values = {n: _value(n, t) for n, t in tensors.items() if t is not None}
    text, messages = values.pop("text_input", None), values.pop("messages", None)
    if (text is None) == (messages is None):
        given = "both" if text is not None else "neither"
        raise InputError("text_input and messages", given, "exactly one of them")
    source: Any = text
    if messages is not None:
        source = _json("messages", messages, list, "a JSON list of chat messages")
        if not all(isinstance(message, dict) for message in source):
            raise InputError("messages", messages, "a JSON list of objects")
    tools = values.pop("tools", None)
    if tools is not None:
        tools = _json("tools", tools, list, "a JSON list of tool definitions")
    stream = bool(values.pop("stream", False))
    knobs = {name: values.pop(name) for name in list(values) if name in Sampling.model_fields}
    wanted = values.pop("specprefill", None)
    own: dict[str, Any] = {}
    if wanted is not None:
        allowed = 'a JSON object of settings such as {"keep": 0.1}, or "off"'
        own = {} if wanted == "off" else _json("specprefill", wanted, dict, allowed)
        own = {"enabled": False} if wanted == "off" else own
    if _flag(own, "off"):
        own["enabled"] = False
    if {"keep", "keep_rate"} <= set(own):
        both = (own["keep"], own["keep_rate"])
        raise InputError("specprefill.keep and keep_rate", both, "one of them: they are the same")
    protect = own.pop("protect", [])
    if not isinstance(protect, list) or not all(isinstance(p, str) for p in protect):
        raise InputError("specprefill.protect", protect, "a list of texts")
    question = own.pop("question", None)
    if not isinstance(question, str | None):
        raise InputError("specprefill.question", question, "a text of the prompt")
    kept_spans = _flag(own, "kept_spans")
    for name in own:
        if name != "keep" and name not in Settings.model_fields:
            ours = ("keep", "off", "protect", "question", "kept_spans")
            known = ", ".join((*ours, *Settings.model_fields))
            raise InputError(f"specprefill.{name}", own[name], f"only the names {known}")
    return Request(source, tools, tuple(protect), question, {**own, **knobs}, stream, kept_spans)


def _flag(own: dict[str, Any], name: str) -> bool:
    value = own.pop(name, False)
    if not isinstance(value, bool):
        raise InputError(f"specprefill.{name}", value, "true or false")
    return value


def _value(name: str, tensor: NDArray[Any]) -> Any:
    flat = tensor.reshape(-1).tolist()
    kind, many = INPUTS[name]
    if kind == "TYPE_STRING":
        flat = [_text(name, item) for item in flat]
    if many:
        return tuple(flat)
    if len(flat) != 1:
        raise InputError(name, f"{len(flat)} values", "one value")
    return flat[0]


def _text(name: str, raw: Any) -> str:
    if isinstance(raw, str):
        return raw
    try:
        return bytes(raw).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(name, raw, f"UTF-8 text ({error.reason})") from None


def _json(name: str, text: str, kind: type, allowed: str) -> Any:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise InputError(name, text, allowed) from None
    if not isinstance(value, kind):
        raise InputError(name, text, allowed)
    return value


def text_tensor(text: str) -> NDArray[np.object_]:
    """A string as Triton carries it: `[1]`, UTF-8 bytes."""
    return np.array([text.encode("utf-8", errors="replace")], dtype=np.object_)


def json_tensor(value: Any) -> NDArray[np.object_]:
    """A JSON value as Triton carries it."""
    return text_tensor(json.dumps(value, ensure_ascii=False))


def read_json(tensor: NDArray[Any]) -> Any:
    """The JSON value of a `[1]` string tensor."""
    return json.loads(bytes(tensor.reshape(-1)[0]).decode())
