"""What the LLM API gives back.

sources:
    tensorrt_llm/executor/result.py @ 005bc848893f575ec14b45d6b13139360d67c790
    tensorrt_llm/executor/result.py, stored version 2426014580 (CompletionOutput's
    request_perf_metrics, a `RequestPerfMetrics` of the bindings)
"""

from __future__ import annotations

from datetime import timedelta
from queue import Empty
from types import SimpleNamespace
from typing import Any, Literal

from tests.contracts import engine

FinishReason = Literal["stop", "length", "timeout", "cancelled"]


class CompletionOutput:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.request_perf_metrics: Any = None
        self._last_token_ids_len = 0

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]


class GenerationResult:
    def __init__(self, runs: engine.Engine, identity: int) -> None:
        self._engine, self._id, self._done = runs, identity, False
        self.outputs = [CompletionOutput()]

    def abort(self) -> None:
        self._engine.cancel(self._id)

    @property
    def finished(self) -> bool:
        return self._done

    def _result_step(self, timeout: float | None = None) -> None:
        events = self._engine.wait(self._id, timeout)
        if not events:
            raise Empty
        output = self.outputs[0]
        output._last_token_ids_len = len(output.token_ids)
        for event in events:
            if event.error:
                self._done = True
                raise RuntimeError(event.error)
            output.token_ids.extend(event.tokens)
            if event.finish is not None:
                self._done = True
                output.finish_reason = _REASONS[event.finish]
                timing = SimpleNamespace(
                    arrival_time=timedelta(0), first_token_time=timedelta(seconds=event.number)
                )
                output.request_perf_metrics = SimpleNamespace(timing_metrics=timing)
                if event.finish == "stop_words":  # what stopped it is not shown
                    del output.token_ids[-len(event.tokens) :]


_REASONS: dict[str, FinishReason] = {
    "end_id": "stop",
    "stop_words": "stop",
    "length": "length",
    "timeout": "timeout",
    "cancelled": "cancelled",
}
