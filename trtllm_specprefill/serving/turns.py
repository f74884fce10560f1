"""Turns at cores that the draft's process and the target's share.

Each computes with a thread on every core. Both at once, a thread that waits for one that the
scheduler put aside spins for nothing, and short prompts are answered later pruned than in full.
So they compute in turn, and give way to each other between two layers.

It is a courtesy, and nothing waits for it for ever: where the other does not give way, because it
hangs in one layer, both compute.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Seconds of computing before giving way: the caches that the other has filled are filled again
# seldom, and a decoding step of a small model is not torn apart.
SLICE = 0.03
# The same where a prompt begins to be read, scored or prefilled: most are by then, and their first
# token does not wait for the answers under way. What is longer takes turns from then on.
READING = 1.0
# Share of what a turn was waited for that it lasts at least: layers of one may take as long as many
# decoding steps of the other.
SHARE = 0.25
# Seconds to wait for a turn; and as many as `SLICE` once that was in vain.
PATIENCE = 3.0
_LOOK = 0.0005  # seconds between two looks at a lock


class Turns:
    """The turn of one process among those that were given the same folder.

    It is for one thread of a process. A process that dies loses its turn: the system drops its
    locks.
    """

    def __init__(self, folder: Path) -> None:
        # Two locks, that whoever comes second is next: having given way, one waits in line for
        # the second lock behind the process that waits in line for the first.
        self._turn, self._line = (
            os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("turn", "line")
        )
        self._taken, self._patience = False, PATIENCE
        self._until = 0.0

    def take(self) -> None:
        """Begin to compute, when the others have given way; nothing when this turn is on."""
        if self._taken:
            return
        asked = time.monotonic()
        deadline = asked + self._patience
        if _locked(self._line, deadline):
            self._taken = _locked(self._turn, deadline)
            fcntl.flock(self._line, fcntl.LOCK_UN)
        now = time.monotonic()
        self._until = now + max(SLICE, SHARE * (now - asked))
        self._patience = PATIENCE if self._taken else SLICE

    def leave(self) -> None:
        """Stop computing; nothing when it was stopped."""
        if self._taken:
            fcntl.flock(self._turn, fcntl.LOCK_UN)
            self._taken = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A prompt is read in this context: the turn may last for `READING`, and ends with it."""
        if self._taken:
            self._until = max(self._until, time.monotonic() + READING)
        try:
            yield
        finally:
            self._until = 0.0

    def give_way(self) -> None:
        """Let the others compute, if they want to and this turn has lasted."""
        if time.monotonic() >= self._until:
            self.leave()
            self.take()


def _locked(lock: int, deadline: float) -> bool:
    """Whether a lock was got by then."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK)
        else:
            return True
