"""Turns at cores that the draft's process and the target's share.

Each computes with a thread on every core. Both at once, a thread that waits for one that the
scheduler put aside spins for nothing, and short prompts are answered later pruned than in full.
So they compute in turn, and give way to each other between two layers.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Seconds of computing before giving way: a decoding step is not torn apart, and the caches that
# the other has filled are filled again seldom.
SLICE = 0.03


class Turns:
    """The turn of one process among those that were given the same folder.

    It is for one thread of a process. A process that dies loses its turn: the system drops its
    locks.
    """

    def __init__(self, folder: Path) -> None:
        # Two locks, that whoever comes second is next: having given way, one waits in line for
        # the second lock behind the process that waits in line for the first.
        self._turn, self._line = (_opened(folder / name) for name in ("turn", "line"))
        self._since = 0.0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Compute in this context and nowhere else."""
        self._take()
        try:
            yield
        finally:
            self._leave()

    def give_way(self) -> None:
        """Let the others compute, if they want to, and this turn has lasted `SLICE`."""
        if time.monotonic() - self._since >= SLICE:
            self._leave()
            self._take()

    def _take(self) -> None:
        fcntl.flock(self._line, fcntl.LOCK_EX)
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        fcntl.flock(self._line, fcntl.LOCK_UN)
        self._since = time.monotonic()

    def _leave(self) -> None:
        fcntl.flock(self._turn, fcntl.LOCK_UN)


def _opened(path: Path) -> int:
    """A file for locks, open as long as the process lives."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
