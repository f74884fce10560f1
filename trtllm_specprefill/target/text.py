"""Token ids -> text, step by step: whole characters, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"  # what a tokenizer decodes an incomplete character to


class TextStream:
    """Turns tokens into text as they come.

    Text is held back while it may be part of a character or of a stop text. Once a stop text
    has appeared, `stopped` is true and the text ends right before it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        # Decoding starts a few tokens back: some tokenizers drop a space at the very start.
        self._context = self._read = 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take one token; return the text that is now certain."""
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._read])
        after = self._decode(self._ids[self._context :])
        if after.endswith(_REPLACEMENT) or len(after) <= len(before):
            return ""
        fresh = self._fresh(before, after)
        self._context, self._read = self._read, len(self._ids)
        return self._release(fresh)

    def finish(self) -> str:
        """The text still held back, now that no token follows."""
        before = self._decode(self._ids[self._context : self._read])
        rest = self._fresh(before, self._decode(self._ids[self._context :]))
        self._read = len(self._ids)
        text = self._release(rest) if rest else ""
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _fresh(self, before: str, after: str) -> str:
        """What `after` has beyond `before`, which was given out already.

        A tokenizer of single bytes spells a whole run of them anew once one fits no character.
        """
        if after.startswith(before):
            return after[len(before) :]
        return self._decode(self._ids[self._read :])

    def _decode(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text, self._held = self._held + text, ""
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        hold = max((_overlap(text, stop) for stop in self._stop), default=0)
        cut = len(text) - hold
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
