"""What can go wrong, each with the words a person needs to put it right.

`InputError` is the caller's: a command turns it into one line and exit code 2.
The others are ours or the model's: the pipeline turns them into a reason code, or
under the strict mode raises them.
"""

from __future__ import annotations


class SpecPrefillError(Exception):
    """Base of everything this package raises on purpose."""


class InputError(SpecPrefillError, ValueError):
    """A value that cannot be used: names the field, the value and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field}: {shown} cannot be used; allowed: {allowed}")


class UnsupportedModel(SpecPrefillError):
    """A model family whose attention cannot be captured or steered faithfully."""


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
