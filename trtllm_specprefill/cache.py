"""What is kept between requests: scores of whole prompts, and what a draft made of windows.

A prompt that comes again (a retry, several samples of one answer) is not scored again, and of a
conversation that has grown only the new windows are read. A hit gives what a miss gives: keys
name everything that the result depends on, and both go through the same operations.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.draft.base import Draft
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.importance import Importance
from trtllm_specprefill.settings import Settings

T = TypeVar("T")

CACHED = "draft_cached"  # the stage of a report that says the scores were known


class Recent(Generic[T]):
    """The values used last, within a number of bytes. Safe to use from several threads."""

    def __init__(self, most: int, size: Callable[[T], int]) -> None:
        """Make an empty one.

        most: bytes that all values may take together. size: bytes of one value. Raises
        `InputError` when `most` is negative.
        """
        if most < 0:
            raise InputError("cache", f"{most} bytes", "0 or more")
        self._most, self._size, self._used = most, size, 0
        self._values: OrderedDict[bytes, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> T | None:
        """The value last put under `key`, unless others have taken its place."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: bytes, value: T) -> bool:
        """Keep `value`; those not used for longest go until it fits. False: it is too large."""
        size = self._size(value)
        with self._lock:
            if size > self._most:
                return False
            if key in self._values:
                return True
            self._values[key] = value
            self._used += size
            while self._used > self._most:
                _, gone = self._values.popitem(last=False)
                self._used -= self._size(gone)
        return True


def key_of(*parts: bytes) -> bytes:
    """A key that names all of `parts`, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def remembering(draft: Draft, keep: int) -> Draft:
    """`draft`, its scores of the last prompts kept where `keep`, in bytes, is not 0.

    keep: what may be kept in all; scores, 4 bytes a token, get a sixteenth of it, and the rest is
    the draft's own for keys and values, thousands of bytes a token.
    """
    return RememberingDraft(draft, keep // 16) if keep else draft


class RememberingDraft(Draft):
    """A draft whose scores of the last prompts are kept."""

    def __init__(self, draft: Draft, most: int) -> None:
        """most: bytes of scores that are kept, 4 for each token of a prompt."""
        self.draft = draft
        self.name, self.tokenizer = draft.name, draft.tokenizer
        self.context_length = draft.context_length
        self._known: Recent[Importance] = Recent(most, lambda value: value.scores.nbytes)

    def score(
        self,
        ids: NDArray[np.int32],
        settings: Settings,
        question: NDArray[np.int64] | None = None,
    ) -> Importance:
        """See `Draft.score`. Known scores have the one stage `draft_cached`, of 0 seconds."""
        asked = b"" if question is None else question.tobytes()
        wanted = settings.in_force().model_dump_json().encode()
        key = key_of(ids.tobytes(), asked, wanted)
        known = self._known.get(key)
        if known is None:
            known = self.draft.score(ids, settings, question)
            known.scores.flags.writeable = False  # it is everybody's from here on
            self._known.put(key, known)
            return known
        return replace(known, seconds={CACHED: 0.0})

    def operations(self, tokens: int, settings: Settings) -> float:
        """See `Draft.operations`: those of a prompt that is not known."""
        return self.draft.operations(tokens, settings)
