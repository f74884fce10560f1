"""The clock of one request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds since the request came, and by stage.

    waited: seconds the request had already waited when the clock was made; they count as
    stage `queue`.
    """

    def __init__(self, waited: float | None = None) -> None:
        self._begin = time.perf_counter() - (waited or 0.0)
        self.stages: dict[str, float] = {} if waited is None else {"queue": waited}

    def elapsed(self) -> float:
        """Seconds since the request came."""
        return time.perf_counter() - self._begin

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to stage `name`, also when it fails."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - begin

    def split(self, name: str, parts: dict[str, float]) -> None:
        """Put a stage's own parts in its place; what they leave over stays under its name."""
        rest = self.stages.pop(name) - sum(parts.values())
        self.stages.update(parts)
        self.stages[name] = max(rest, 0.0)


def decode_rate(tokens: int, seconds: float) -> float | None:
    """Tokens after the first per second of decoding; None for an answer that came at once."""
    return (tokens - 1) / seconds if tokens > 1 and seconds > 0 else None
