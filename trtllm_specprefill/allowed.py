"""What a field of a pydantic model may hold, in words, and the error for what it may not."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from trtllm_specprefill.errors import InputError

_COMPARED = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def refusal(kind: type[BaseModel], error: ValidationError) -> InputError:
    """The first thing wrong with a value of `kind`; field: dotted, from the outermost model."""
    first = error.errors()[0]
    name, owner, field = _place(kind, first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        inner = not name or cause.field.startswith(f"{name}.")
        return cause if inner else InputError(f"{name}.{cause.field}", cause.value, cause.allowed)
    value = None if first["type"] == "missing" else first["input"]
    if isinstance(cause, ValueError):  # a rule between fields, in its own words
        words = str(cause)
    elif first["type"] == "json_invalid":
        words = f"JSON ({first['ctx']['error']})"
    elif field is not None:
        words = allowed(field)
    else:
        words = "only the names " + ", ".join(owner.model_fields) if name else _fields(owner)
    return InputError(name or "settings", value, words)


def allowed(field: FieldInfo) -> str:
    """What `field` may hold: as it says itself under `allowed`, else by its type and limits."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "allowed" in extra:
        return str(extra["allowed"])
    return _words(field.annotation, field.metadata)


def one_of(choices: Sequence[object]) -> str:
    """Choices as a person lists them: `a, b or c`."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def _words(annotation: Any, limits: Sequence[Any]) -> str:
    choices = get_args(annotation)
    if get_origin(annotation) is Literal:
        return one_of(choices)
    if get_origin(annotation) in (Union, types.UnionType):
        words = one_of([_words(one, limits) for one in choices if one is not type(None)])
        return f"{words}, or none" if type(None) in choices else words
    if get_origin(annotation) in (tuple, list):
        return f"a list, of each: {_words(choices[0], ())}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _fields(annotation)
    compared = [
        f"{sign} {getattr(limit, end)}"
        for limit in limits
        for end, sign in _COMPARED.items()
        if hasattr(limit, end)
    ]
    filled = " that is not empty" if any(hasattr(limit, "min_length") for limit in limits) else ""
    words = _SCALARS.get(annotation, "another value") + filled
    return f"{words} {' and '.join(compared)}" if compared else words


def _fields(kind: type[BaseModel]) -> str:
    return "an object with some of " + ", ".join(kind.model_fields)


def _place(
    kind: type[BaseModel], loc: Sequence[int | str]
) -> tuple[str, type[BaseModel], FieldInfo | None]:
    """Dotted name of the innermost field on the way, its model, and itself where there is one."""
    named = 0
    field: FieldInfo | None = None
    for end, part in enumerate(loc, 1):
        if isinstance(part, int) and field is not None:  # of a list
            continue
        if field is not None:
            inner = _model_in(field.annotation)
            if inner is None:
                break
            kind = inner
        field, named = kind.model_fields.get(str(part)), end
        if field is None:
            break
    return ".".join(map(str, loc[:named])), kind, field


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_in(one) for one in get_args(annotation))
    return next((one for one in inner if one is not None), None)
