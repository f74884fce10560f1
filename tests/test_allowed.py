"""What pydantic refuses, said in the library's words: field, value, allowed."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtllm_specprefill.allowed import allowed, refusal
from trtllm_specprefill.errors import InputError


class _Leaf(BaseModel):
    model_config = ConfigDict(extra="forbid")

    count: int = Field(default=1, ge=1, le=9)
    share: float = Field(default=0.5, gt=0, lt=1)
    flag: bool = False
    kind: Literal["a", "b", "c"] = "a"
    title: str = Field(default="x", min_length=1)
    limit: int | None = Field(default=None, ge=0)
    ids: tuple[int, ...] = ()
    odd: int = Field(default=1, json_schema_extra={"allowed": "an odd number"})


class _Tree(BaseModel):
    model_config = ConfigDict(extra="forbid")

    leaf: _Leaf = _Leaf()
    leaves: tuple[_Leaf, ...] = ()
    needed: int = Field(ge=0)


WRONG: list[tuple[str, list[Any], str]] = [
    ("count", [0, 10, 1.5, "x", None], "a whole number >= 1 and <= 9"),
    ("share", [0, 1, "x", None], "a number > 0 and < 1"),
    ("flag", ["perhaps", None, 7], "true or false"),
    ("kind", ["d", None, 1], "a, b or c"),
    ("title", ["", 5, None], "a text that is not empty"),
    ("limit", [-1, "x"], "a whole number >= 0, or none"),
    ("ids", [5, ["x"], None], "a list, of each: a whole number"),
    ("odd", ["x"], "an odd number"),
]


def refused(values: Any) -> InputError:
    with pytest.raises(ValidationError) as caught:
        _Tree.model_validate(values)
    return refusal(_Tree, caught.value)


@pytest.mark.parametrize(("name", "values", "words"), WRONG, ids=[name for name, _, _ in WRONG])
def test_a_value_of_every_kind_is_refused_by_dotted_field_value_and_what_is_allowed(
    name: str, values: list[Any], words: str
) -> None:
    place = random.randrange(4)
    for value in values:
        wrong = value[0] if isinstance(value, list) else value
        inner = {"needed": 1, "leaf": {name: value}}
        assert str(refused(inner)) == f"leaf.{name}: got {wrong!r}, allowed: {words}"
        listed = {"needed": 1, "leaves": [{}] * place + [{name: value}]}
        assert refused(listed).field == f"leaves.{place}.{name}"
        assert refused(listed).allowed == words
    assert allowed(_Leaf.model_fields[name]) == words


def test_a_name_that_is_not_known_and_one_that_is_missing_are_told_apart() -> None:
    error = refused({"needed": 1, "leaf": {"cuont": 3}})
    assert (error.field, error.value) == ("leaf.cuont", 3)
    assert error.allowed == "only the names " + ", ".join(_Leaf.model_fields)
    error = refused({})
    assert str(error) == "needed: got None, allowed: a whole number >= 0"


@pytest.mark.parametrize("value", [5, "x", [], None])
def test_what_should_be_an_object_says_which(value: Any) -> None:
    error = refused({"needed": 1, "leaf": value})
    assert (error.field, error.value) == ("leaf", value)
    assert error.allowed == "an object with some of " + ", ".join(_Leaf.model_fields)
    assert refused(value).allowed == "an object with some of leaf, leaves, needed"


def test_text_that_is_not_json_is_told_as_that() -> None:
    with pytest.raises(ValidationError) as caught:
        _Tree.model_validate_json('{"needed": ')
    assert "JSON (EOF" in refusal(_Tree, caught.value).allowed
