"""What runs inside the `draft` and the `target` model.

Both can be told, while they work, of a client that has gone: a pass over a long prompt looks up
before every layer.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.clock import decode_rate
from trtllm_specprefill.draft.base import Draft
from trtllm_specprefill.errors import Cancelled, DraftFailed, DraftTimeout, SpecPrefillError
from trtllm_specprefill.forward import interruptible
from trtllm_specprefill.importance import Importance
from trtllm_specprefill.plan import PrunePlan
from trtllm_specprefill.serving.turns import Turns
from trtllm_specprefill.settings import Sampling, Settings
from trtllm_specprefill.target.base import Step, Target

_REMEMBERED = 10_000  # requests that were cancelled or are over; more are not asked about


class _Recent:
    """Ids of requests; the oldest are forgotten."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, request_id: str) -> None:
        with self._lock:
            self._ids[request_id] = None
            while len(self._ids) > _REMEMBERED:
                self._ids.popitem(last=False)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids


def _reading(turns: Turns | None) -> AbstractContextManager[None]:
    return nullcontext() if turns is None else turns.reading()


class ScoringWorker:
    """Scores prompts one after the other: a long one fills the device by itself."""

    def __init__(self, draft: Draft, turns: Turns | None = None) -> None:
        """turns: at the cores, where the target computes on the same ones."""
        self._draft, self._turns, self._gone = draft, turns, _Recent()

    def cancel(self, request_id: str) -> None:
        """Stop scoring for this request, now or when its turn comes."""
        self._gone.add(request_id)

    def score(
        self,
        request_id: str,
        ids: NDArray[np.int32],
        question: NDArray[np.int64] | None,
        settings: Settings,
        timeout: float,
    ) -> Importance | SpecPrefillError:
        """The importance of `ids`, or why there is none.

        timeout: seconds it may take; `DraftTimeout` after that.
        """
        deadline = time.monotonic() + timeout

        def check() -> None:
            if self._turns is not None:
                self._turns.give_way()
            if request_id in self._gone:
                raise Cancelled
            if time.monotonic() > deadline:
                raise DraftTimeout(f"scoring took longer than {timeout:.1f} s")

        try:
            if self._turns is not None and request_id not in self._gone:
                self._turns.take()
            check()
            with _reading(self._turns), interruptible(check):
                return self._draft.score(ids, settings, question)
        except Cancelled:
            return DraftFailed("cancelled")
        except SpecPrefillError as error:
            return error
        except Exception as error:  # whatever it raises, the next request is untouched
            return DraftFailed(f"{type(error).__name__}: {error}")
        finally:
            if self._turns is not None:
                self._turns.leave()


@dataclass
class Answer:
    """One plan to answer.

    report: what the orchestrator decided. received, sent: wall-clock seconds at which the
    server got the request and the orchestrator handed it on. stream: every step is sent, else
    one response. send: a text, and with the last one the report. fail: the words of an error.
    drop: end it without a word, since its client has gone.
    """

    request_id: str
    plan: PrunePlan
    sampling: Sampling
    stream: bool
    report: dict[str, Any]
    received: float
    sent: float
    send: Callable[[str, dict[str, Any] | None], None]
    fail: Callable[[str], None]
    drop: Callable[[], None]
    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    first_token: float = 0.0
    steps: Generator[Step, None, None] | None = None


def loaded_apart(load: Callable[[], Target]) -> Target:
    """A target whose passes run in another thread than this, loaded in a thread that ends.

    OpenMP counts the team of every living thread that once computed, and where there are more
    of them than cores they do not spin but sleep at every barrier.
    """
    with ThreadPoolExecutor(1) as loading:
        return loading.submit(load).result()


class AnsweringWorker:
    """Answers several plans in turn, a decoding step of each at a time.

    A prompt's prefill is not divided: the answers under way wait for it. `answers` plans are
    decoded in turn; more wait in the order they came.
    """

    def __init__(self, target: Target, answers: int, turns: Turns | None = None) -> None:
        """turns: at the cores, where the draft computes on the same ones."""
        self._target, self._answers, self._turns = target, answers, turns
        self._waiting: deque[Answer] = deque()
        self._heads: deque[tuple[str, NDArray[np.int32]]] = deque()
        self._running: list[Answer] = []
        self._gone, self._over = _Recent(), _Recent()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="answering", daemon=True).start()

    def submit(self, job: Answer) -> None:
        """Take a job; `send`, `fail` and `drop` are called from the worker's thread."""
        with self._changed:
            self._waiting.append(job)
            self._changed.notify_all()

    def read_ahead(self, request_id: str, head: NDArray[np.int32]) -> None:
        """Let the target read the head of a request's prompt before the plan for it comes."""
        with self._changed:
            self._heads.append((request_id, head))
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """Stop the job of this id, running, waiting or still to come."""
        with self._changed:
            self._gone.add(request_id)
            self._changed.notify_all()

    def wait(self, request_id: str, seconds: float) -> str:
        """`done`, `gone` or, after at most `seconds`, `running`.

        A job that was handed on and has not come yet is `running`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: request_id in self._over or request_id in self._gone, seconds
            )
            if request_id in self._gone:
                return "gone"
            return "done" if request_id in self._over else "running"

    def _run(self) -> None:
        while True:
            self._turn()

    def _turn(self) -> None:
        """One step of every answer. Holds no job afterwards: Triton waits for what it was sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._heads or self._waiting or self._running)
            heads = [self._heads.popleft() for _ in range(len(self._heads))]
            # Those whose clients have gone wait for no room: others were admitted in their place.
            lost = [job for job in self._waiting if job.request_id in self._gone]
            for job in lost:
                self._waiting.remove(job)
            room = self._answers - len(self._running)
            fresh = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        for job in lost:
            self._end(job, job.drop)
        if self._turns is not None and (heads or fresh or self._running):
            self._turns.take()
        for request_id, head in heads:
            # What it raises, the answer that needs it meets again, and says so.
            with suppress(Exception, Cancelled), self._watching(request_id):
                self._target.read_ahead(head)
        for job in fresh:
            self._running.append(job)
            self._advance(job)
        for job in list(self._running):
            self._advance(job)
        if self._turns is not None and not self._running:
            self._turns.leave()

    @contextmanager
    def _watching(self, request_id: str) -> Iterator[None]:
        """Give way, and look up whether the client is still there, now and before every layer.

        Raises `Cancelled`.
        """

        def check() -> None:
            if self._turns is not None:
                self._turns.give_way()
            if request_id in self._gone:
                raise Cancelled

        check()
        with interruptible(check):
            yield

    def _advance(self, job: Answer) -> None:
        """One step of one answer; the job leaves when it is over, however it ended."""
        last: Callable[[], None] | None = None
        try:
            with self._watching(job.request_id):
                over = self._step(job)
        except Cancelled:
            over, last = True, job.drop
        except SpecPrefillError as error:
            over, last = True, partial(job.fail, str(error))
        except Exception as error:  # whatever it raises, the other answers are untouched
            over, last = True, partial(job.fail, f"{type(error).__name__}: {error}")
        if over:
            self._running.remove(job)
            self._end(job, last)

    def _end(self, job: Answer, last: Callable[[], None] | None) -> None:
        """Let go of a job that is over; `last` tells the server so, where no step did.

        Whatever that raises, the thread goes on: it has other answers.
        """
        if last is not None:
            with suppress(Exception):
                last()
        if job.steps is not None:
            with suppress(Exception):  # interrupted inside a pass, it is already over
                job.steps.close()
        with self._changed:
            self._over.add(job.request_id)
            self._changed.notify_all()

    def _step(self, job: Answer) -> bool:
        """Take and send the next step; whether it was the last."""
        if job.steps is None:
            begin = time.time()
            with _reading(self._turns):
                job.steps = self._target.stream(job.plan, job.sampling)
                step = next(job.steps)
            job.first_token = time.time()
            stages = job.report["stages"]
            stages["target_queue"] = max(begin - job.sent, 0.0)
            stages["target_prefill"] = job.first_token - begin
        else:
            step = next(job.steps)
        job.tokens += len(step.token_ids)
        job.texts.append(step.text)
        if step.finish_reason is None:
            if job.stream:
                job.send(step.text, None)
            return False
        decode = time.time() - job.first_token
        job.report["stages"]["decode"] = decode
        job.report |= {
            "finish_reason": step.finish_reason,
            "output_tokens": job.tokens,
            "ttft_s": job.first_token - job.received,
            "decode_tokens_per_s": decode_rate(job.tokens, decode),
        }
        job.send(step.text if job.stream else "".join(job.texts), job.report)
        return True
