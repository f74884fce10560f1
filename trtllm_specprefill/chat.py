"""Chat messages -> one text by a chat template, and where each message's own words lie in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from trtllm_specprefill.errors import InputError


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    protect: bool = False


@dataclass(frozen=True)
class Content:
    """Where one message's own text lies in the rendered text: characters `[start, end)`."""

    start: int
    end: int
    role: str
    protect: bool


def render(
    source: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, tokenizer: Any
) -> tuple[str, list[Content]]:
    """Messages through the chat template, and where each message's text ended up.

    source, tools: as `prompt.prepare` takes them. Raises `InputError` for what is malformed, and
    for what the template refuses or drops.
    """
    messages = _check_messages(source)
    if tools is not None and not (
        isinstance(tools, Sequence) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise InputError("tools", tools, "a list of tool definitions, each an object")
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "messages",
            f"{len(messages)} messages",
            "a plain text: this model has no chat template",
        )
    shown = [_for_template(m, f"messages[{i}]") for i, m in enumerate(messages)]
    text = _apply(tokenizer, shown, tools)
    if tools and _renders(tokenizer, text, shown, None):
        raise InputError("tools", "tool definitions", "none: this chat template drops them")
    for i, message in enumerate(shown):
        if message.get("tool_calls"):
            without = {**message, "tool_calls": [], "content": message.get("content") or ""}
            if _renders(tokenizer, text, [*shown[:i], without, *shown[i + 1 :]], tools):
                allowed = "none: this chat template drops them"
                raise InputError(f"messages[{i}].tool_calls", "tool calls", allowed)
    spoken = [i for i, m in enumerate(shown) if str(m.get("content") or "").strip()]
    bodies = [str(shown[i]["content"]) for i in spoken]
    # The same template around markers shows which characters are the template's own. One that
    # looks into its messages may refuse the markers; then the bodies are searched for in order.
    marked = list(shown)
    for i in spoken:
        marked[i] = {**shown[i], "content": _MARKER}
    try:
        pieces = _apply(tokenizer, marked, tools).split(_MARKER)
    except InputError:
        pieces = []
    places = _walk(text, pieces, bodies) or _search(text, bodies)
    contents = [
        Content(start, end, messages[i].role, messages[i].protect)
        for i, (start, end) in zip(spoken, places, strict=True)
        if end > start
    ]
    return text, contents


_MARKER = "\ue000\ue001"


def _walk(text: str, pieces: list[str], bodies: list[str]) -> list[tuple[int, int]] | None:
    """Follow the template's pieces through `text`; None where it does not go that way.

    A body that the template rewrote ends where the template's next piece begins.
    """
    if len(pieces) != len(bodies) + 1 or not text.startswith(pieces[0]):
        return None
    places = []
    cursor = len(pieces[0])
    for i, (body, piece) in enumerate(zip(bodies, pieces[1:], strict=True)):
        for form in (body, body.strip()):  # templates keep or strip the white space around
            if text.startswith(form + piece, cursor):
                end = cursor + len(form)
                break
        else:
            last = i == len(bodies) - 1
            end = len(text) - len(piece) if last else text.find(piece, cursor)
            if not piece.strip() or end < cursor or not text.startswith(piece, end):
                return None
        places.append((cursor, end))
        cursor = end + len(piece)
    return places if cursor == len(text) else None


def _search(text: str, bodies: list[str]) -> list[tuple[int, int]]:
    """Find the bodies one after the other; an empty place for one the template rewrote.

    What is not found counts as the template's own and is therefore kept.
    """
    places = []
    cursor = 0
    for body in bodies:
        start = text.find(body.strip(), cursor)
        if start < 0:
            places.append((cursor, cursor))
            continue
        cursor = start + len(body.strip())
        places.append((start, cursor))
    return places


def _check_messages(source: Sequence[dict[str, Any]]) -> list[_Message]:
    if isinstance(source, (bytes, dict)) or not isinstance(source, Sequence):
        raise InputError("messages", source, "a text or a list of chat messages")
    if not source:
        raise InputError("messages", source, "at least one message")
    messages = []
    for i, item in enumerate(source):
        try:
            message = _Message.model_validate(item)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join([f"messages[{i}]", *(str(p) for p in first["loc"][:1])])
            allowed = {
                "role": "system, developer, user, assistant or tool",
                "content": "a text or a list of text parts",
                "tool_calls": "a list of tool calls",
                "protect": "true or false",
            }.get(str(first["loc"][0]) if first["loc"] else "", "an object with role and content")
            value = None if first["type"] == "missing" else first["input"]
            raise InputError(field, value, allowed) from None
        if message.content is None and not message.tool_calls:
            raise InputError(f"messages[{i}].content", None, "a text or a list of text parts")
        for j, part in enumerate(message.content if isinstance(message.content, list) else []):
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise InputError(
                    f"messages[{i}].content[{j}]",
                    part.get("type"),
                    'text parts: {"type": "text", "text": "..."}',
                )
        messages.append(message)
    return messages


def _for_template(message: _Message, where: str) -> dict[str, Any]:
    """The message as chat templates expect it: text content, tool arguments as objects."""
    out = message.model_dump(exclude={"protect"}, exclude_none=True)
    if isinstance(message.content, list):
        # As vLLM and TensorRT-LLM join them: a document and a question stay two lines.
        out["content"] = "\n".join(part["text"] for part in message.content)
    for j, call in enumerate(out.get("tool_calls", [])):
        function, field = call.get("function"), f"{where}.tool_calls[{j}].function"
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError(field, function, "an object with a name and arguments")
        if isinstance(function.get("arguments"), str):
            try:
                # A call without arguments has an empty text in some clients.
                function["arguments"] = json.loads(function["arguments"].strip() or "{}")
            except json.JSONDecodeError:
                raise InputError(f"{field}.arguments", function["arguments"], "JSON") from None
    return out


def _renders(
    tokenizer: Any,
    text: str,
    messages: list[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
) -> bool:
    """Whether these messages too become `text`; a template that refuses them looks at them."""
    try:
        return text == _apply(tokenizer, messages, tools)
    except InputError:
        return False


def _apply(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # templates raise whatever their authors chose
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            "messages", f"{len(messages)} messages", f"as the chat template: {reason}"
        ) from None
    return str(text)
