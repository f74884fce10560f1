"""What runs inside the `orchestrator` model: from a client's request to a plan for the target.

The pipeline decides as it does in one process. Only its draft is another model of the server,
asked with a deadline, and its target is known by its tokenizer and what it says of itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.draft.heads import calibration_for
from trtllm_specprefill.draft.reading import ReadingDraft
from trtllm_specprefill.errors import (
    Cancelled,
    ContextTooLong,
    DegenerateScores,
    DraftFailed,
    DraftTimeout,
    SpecPrefillError,
    TargetFailed,
)
from trtllm_specprefill.importance import Importance
from trtllm_specprefill.models import load_config, load_tokenizer, local_fingerprint
from trtllm_specprefill.operations import prefill_operations
from trtllm_specprefill.pipeline import Planned, SpecPrefill
from trtllm_specprefill.plan import PositionSupport, PrunePlan
from trtllm_specprefill.serving.settings import Limits, ServeSettings
from trtllm_specprefill.serving.wire import Request, json_tensor, read_json
from trtllm_specprefill.settings import Sampling, Settings
from trtllm_specprefill.target.base import Step, Target
from trtllm_specprefill.target.load import source_model

Score = Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]]
"""Calls the `draft` model: input tensors in, output tensors out; raises `DraftFailed` when it is
down or answers with an error. Blocks."""
Tell = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Sends a model a message past Triton; see `serving.control.tell`."""

_POLL = 0.02  # seconds between two looks at whether the client is still there
_FAILURES: dict[str, type[DraftFailed]] = {
    kind.__name__: kind for kind in (DraftFailed, DegenerateScores, DraftTimeout)
}


@dataclass(frozen=True)
class InFlight:
    """One request being planned: its id, and whether its client has gone."""

    request_id: str
    is_gone: Callable[[], bool]


_in_flight: ContextVar[InFlight] = ContextVar("specprefill_in_flight")


class RemoteDraft(ReadingDraft):
    """The `draft` model of the server.

    Scoring waits at most for its own time-out and for those of the requests before it in the
    draft's queue; the draft itself gives up after its own.
    """

    def __init__(self, model: str, score: Score, tell: Tell, limits: Limits) -> None:
        self.name, self._score, self._tell, self._limits = model, score, tell, limits
        self.tokenizer = load_tokenizer(model)
        self.config = load_config(model)
        self.calibration = calibration_for(local_fingerprint(model) or "")
        self.context_length = int(self.config.max_position_embeddings)
        self._calls = ThreadPoolExecutor(limits.requests, "draft-call")
        self._ahead: list[float] = []

    def score(
        self,
        ids: NDArray[np.int32],
        settings: Settings,
        question: NDArray[np.int64] | None = None,
    ) -> Importance:
        """See `Draft.score`. Raises `DraftTimeout` and, when the client has gone, `Cancelled`."""
        request = _in_flight.get()
        timeout = self._limits.draft_seconds(ids.size)
        self._ahead.append(timeout)
        wanted = {
            "id": request.request_id,
            "settings": settings.model_dump(),
            "question": None if question is None else question.tolist(),
            "timeout": timeout,
        }
        begin = time.perf_counter()
        try:
            call = self._calls.submit(
                self._score, {"input_ids": ids, "request": json_tensor(wanted)}
            )
            outputs = self._wait(call, request, sum(self._ahead))
        finally:
            self._ahead.remove(timeout)
        return read_importance(outputs, time.perf_counter() - begin)

    def _wait(
        self, call: Future[dict[str, NDArray[Any]]], request: InFlight, seconds: float
    ) -> dict[str, NDArray[Any]]:
        deadline = time.monotonic() + seconds
        while True:
            with suppress(FutureTimeout):
                return call.result(_POLL)
            gone = request.is_gone()
            if gone or time.monotonic() > deadline:
                with suppress(TargetFailed):
                    self._tell("draft", {"message": "cancel", "id": request.request_id})
                if gone:
                    raise Cancelled
                raise DraftTimeout(f"no answer within {seconds:.1f} s")


def importance_tensors(result: Importance | SpecPrefillError) -> dict[str, NDArray[Any]]:
    """The `draft` model's outputs: `importance` float32 `[N]` and `report`, or what went wrong."""
    if isinstance(result, SpecPrefillError):
        report: dict[str, Any] = {"failed": type(result).__name__, "message": str(result)}
        if isinstance(result, ContextTooLong):
            report["fields"] = [result.field, str(result.value), result.allowed]
        return {"importance": np.zeros(1, dtype=np.float32), "report": json_tensor(report)}
    report = {
        "queries": result.queries,
        "heads": result.heads,
        "layers": list(result.layers),
        "seconds": result.seconds,
        "detail": result.detail,
    }
    return {"importance": result.scores, "report": json_tensor(report)}


def read_importance(outputs: dict[str, NDArray[Any]], elapsed: float) -> Importance:
    """The `draft` model's outputs as a value, or the error they carry, raised.

    elapsed: seconds the call took; what the draft did not spend on it is its queue's.
    """
    report = read_json(outputs["report"])
    if "failed" in report:
        if "fields" in report:
            raise ContextTooLong(*report["fields"])
        raise _FAILURES.get(report["failed"], DraftFailed)(report["message"])
    seconds = report["seconds"]
    return Importance(
        outputs["importance"],
        report["queries"],
        report["heads"],
        tuple(report["layers"]),
        {"draft_queue": max(elapsed - sum(seconds.values()), 0.0), **seconds},
        report["detail"],
    )


class _KnownTarget(Target):
    """What must be known of the target to plan for it; the `target` model has the weights."""

    def __init__(self, model: str, tell: Tell, reads_ahead: bool) -> None:
        self.name, self._tell, self._reads_ahead = model, tell, reads_ahead
        self.tokenizer = load_tokenizer(model)
        self._config = load_config(model)
        self._support: PositionSupport | None = None

    @property
    def position_support(self) -> PositionSupport:  # type: ignore[override]
        """As the `target` model found it out of itself at load; asked for once."""
        if self._support is None:
            self._support = PositionSupport(**self._tell("target", {"message": "facts"}))
        return self._support

    def stream(self, plan: PrunePlan, sampling: Sampling) -> Generator[Step, None, None]:
        raise NotImplementedError("the `target` model answers")

    def read_ahead(self, head: NDArray[np.int32]) -> None:
        if self._reads_ahead and head.size:
            told = {"message": "head", "id": _in_flight.get().request_id, "ids": head.tolist()}
            with suppress(TargetFailed):  # down: the plan will find it so, or up again
                self._tell("target", told)

    def operations(self, tokens: int) -> float:
        return prefill_operations(self._config, tokens)


class Orchestrator:
    """Plans requests as `SpecPrefill` does, with draft and target in other processes."""

    def __init__(self, settings: ServeSettings, score: Score, tell: Tell) -> None:
        """Load the two tokenizers; the other models are not asked before the first request."""
        draft = RemoteDraft(settings.draft.model, score, tell, settings.limits)
        model = source_model(settings.target.backend, settings.target.model)
        self._pipeline = SpecPrefill(draft, _KnownTarget(model, tell, settings.reads_ahead))
        self._settings = settings

    def plan(self, request: Request, in_flight: InFlight, waited: float) -> Planned:
        """The plan for a request that has waited `waited` seconds already.

        Raises `InputError` for bad input, under strict whatever kept the prompt from being
        pruned, and `Cancelled` when the client has gone.
        """
        token = _in_flight.set(in_flight)
        try:
            return self._pipeline.plan(
                request.source,
                settings=self._settings.settings,
                sampling=self._settings.sampling,
                tools=request.tools,
                protect=request.protect,
                question=request.question,
                waited=waited,
                **request.knobs,
            )
        finally:
            _in_flight.reset(token)


def plan_tensors(
    planned: Planned, request: Request, request_id: str, received: float
) -> dict[str, NDArray[Any]]:
    """The `orchestrator` model's outputs for the `target` model.

    input_ids, position_ids: int32 `[M]`. next_position: int32 `[1]`, of the first generated
    token. request, report: JSON.
    """
    plan, report = planned.plan, planned.report()
    if not request.kept_spans:
        del report["kept_spans"]
    return {
        "input_ids": plan.input_ids,
        "position_ids": plan.position_ids,
        "next_position": np.array([plan.next_position], dtype=np.int32),
        "request": json_tensor(
            {
                "id": request_id,
                "sampling": planned.sampling.model_dump(),
                "stream": request.stream,
                "positions": plan.positions,
                "prompt_tokens": plan.prompt_tokens,
                "reason": plan.reason.value,
                "head": plan.head,
                "received": received,
                "sent": time.time(),
            }
        ),
        "report": json_tensor(report),
    }


def presence_tensors(request_id: str) -> dict[str, NDArray[Any]]:
    """The same outputs as a sign of life of a request: no plan, but its id."""
    nothing = np.zeros(1, dtype=np.int32)
    return {
        "input_ids": nothing,
        "position_ids": nothing,
        "next_position": nothing,
        "request": json_tensor({"id": request_id, "present": True}),
        "report": json_tensor({}),
    }
