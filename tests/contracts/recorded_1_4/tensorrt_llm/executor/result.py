"""What the LLM API gives back.

sources: tensorrt_llm/executor/result.py @ 1f064c467a211b4168555ca06bb9b801c64eae20
    (a step that has waited for its timeout raises `queue.Empty`; a request that failed is finished)
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from queue import Queue
from types import SimpleNamespace
from typing import Any, Literal

from tests.contracts import engine

FinishReason = Literal["stop", "length", "timeout", "cancelled"]


class CompletionOutput:
    token_ids: list[int]
    finish_reason: FinishReason | None
    request_perf_metrics: Any

    def __init__(self, index: int) -> None:
        self.token_ids, self.finish_reason, self.request_perf_metrics = [], None, None
        self._last_token_ids_len = 0

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]


class GenerationResult:
    @engine.stand_in
    def __init__(self, runs: engine.Engine, identity: int) -> None:
        self._engine, self._id, self._done = runs, identity, False
        self.queue: Queue[engine.Event] = runs.events(identity)
        self._outputs = [CompletionOutput(0)]
        self._background_error_handler: Callable[[str], None] | None = _raise
        self._error_msg: str | None = None

    @property
    def error(self) -> str | None:
        return self._error_msg

    @property
    def outputs(self) -> list[CompletionOutput]:
        return self._outputs

    def abort(self) -> None:
        self._engine.cancel(self._id)

    @property
    def finished(self) -> bool:
        return self._done

    def _result_step(self, timeout: float | None = None) -> None:
        self._handle_response(self.queue.get(timeout=timeout))

    def _handle_response(self, response: engine.Event) -> None:
        output = self.outputs[0]
        output._last_token_ids_len = len(output.token_ids)
        if response.error:
            self._error_msg, self._done = response.error, True
            if self._background_error_handler is not None:
                self._background_error_handler(response.error)
            return
        output.token_ids.extend(response.tokens)
        if response.finish is not None:
            self._done = True
            output.finish_reason = _REASONS[response.finish]
            timing = SimpleNamespace(
                arrival_time=timedelta(0), first_token_time=timedelta(seconds=response.number)
            )
            output.request_perf_metrics = SimpleNamespace(timing_metrics=timing)
            if response.finish == "stop_words":  # what stopped it is not shown
                del output.token_ids[-len(response.tokens) :]


def _raise(words: str) -> None:
    raise RuntimeError(words)


_REASONS: dict[str, FinishReason] = {
    "end_id": "stop",
    "stop_words": "stop",
    "length": "length",
    "timeout": "timeout",
    "cancelled": "cancelled",
}
