"""What can go wrong, each with the words a person needs to put it right.

`InputError` is the caller's. The others are ours or the model's: the pipeline turns them into
a reason code, or under the strict mode raises them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SpecPrefillError(Exception):
    """Base of everything this package raises on purpose."""

    exit_code = 1
    """Of a command that it ends: 1 for a failure while working, 2 for what the caller can mend."""


class InputError(SpecPrefillError, ValueError):
    """A value that cannot be used: names the field, the value and what is allowed."""

    exit_code = 2

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field}: got {shown}, allowed: {allowed}")


@contextmanager
def given_as(**names: str) -> Iterator[None]:
    """What is refused within under a name is refused under the one by which the caller gave it.

    names: the caller's by ours, such as `model="draft"`.
    """
    try:
        yield
    except InputError as error:
        if error.field not in names:
            raise
        raise type(error)(names[error.field], error.value, error.allowed) from error


class UnsupportedModel(SpecPrefillError):
    """A model family whose attention cannot be captured or steered faithfully."""

    exit_code = 2


class DraftFailed(SpecPrefillError):
    """The draft gave no usable importance for this prompt."""


class DegenerateScores(DraftFailed):
    """Importance with NaN, infinity, negative values, or zero everywhere."""


class DraftTimeout(DraftFailed):
    """The draft did not answer within its deadline."""


class UnsupportedPositions(InputError):
    """Original positions asked of a target that cannot use them."""


class ContextTooLong(InputError):
    """More tokens than the model has positions for."""


class TokenizerMismatch(SpecPrefillError):
    """Two tokenizers whose encodings of one text cannot be aligned by characters."""


class TargetFailed(SpecPrefillError):
    """The target failed while answering."""


class Cancelled(BaseException):
    """Nobody waits for the answer any more.

    Not an `Exception`: no fallback may take it for a failure and start more work.
    """
