"""What runs behind the recorded API: a torch model, one token of each request in turn.

It does what an engine does with requests: batches them in flight, reads a long prompt in chunks,
keeps KV blocks by their tokens and their salt and not by their positions, and cancels between
steps. What a test wants to go wrong, it says in `Setup`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from trtllm_specprefill.forward import last_logits, new_cache
from trtllm_specprefill.models import Model
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.torch import _sampler

CHUNK, BLOCK = 16, 8
Finish = Literal["end_id", "stop_words", "length", "timeout", "cancelled"]


@dataclass(frozen=True)
class Job:
    """A request as the engine sees it. stops: tokens that end it, the end id last."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...] | None
    max_tokens: int
    stops: tuple[int, ...]
    sampling: Any
    salt: int | str | None


@dataclass(frozen=True)
class Event:
    """What one step gave."""

    tokens: tuple[int, ...] = ()
    finish: Finish | None = None
    error: str = ""
    number: int = 0


@dataclass
class Setup:
    """The engine that the recorded constructors start.

    fail: words of an error in a step of a request; none when it goes well. end: why a request is
    to end after a step. over: called when the engine shuts down.
    """

    model: Model
    honours_positions: bool = True
    leader: bool = True
    fail: Callable[[Job, int], str] = lambda job, step: ""
    end: Callable[[Job, int], Finish | None] = lambda job, step: None
    over: Callable[[], None] = lambda: None
    hold: threading.Event = field(default_factory=threading.Event)
    engines: list[Engine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hold.set()


setup: Setup | None = None
Function = TypeVar("Function", bound=Callable[..., Any])


def stand_in(function: Function) -> Function:
    """Marks a function beside the recorded ones: the API has none like it."""
    return function


def started(block_reuse: bool, kv_cache_tokens: int | None) -> Engine:
    """An engine as the test has set it up."""
    assert setup is not None
    engine = Engine(setup, block_reuse, kv_cache_tokens)
    setup.engines.append(engine)
    return engine


class _Run:
    def __init__(self, job: Job, positions: list[int], model: Model) -> None:
        self.job, self.cache = job, new_cache(model)
        self.positions = positions
        self.read = self.made = 0
        self.next = 0
        wanted = job.sampling
        cold = wanted.top_k == 1 or wanted.temperature is None
        self.draw = _sampler(
            Sampling(
                temperature=0.0 if cold else wanted.temperature,
                top_k=wanted.top_k or 0,
                top_p=wanted.top_p or 1.0,
                seed=wanted.seed,
            ),
            model.device,
        )


class Engine:
    """Requests in flight on one thread."""

    def __init__(self, made: Setup, block_reuse: bool, kv_cache_tokens: int | None) -> None:
        self.kv_cache_tokens = kv_cache_tokens
        self.leader, self.steps = made.leader, 0
        self.jobs: list[Job] = []
        self.cancelled: list[int] = []
        self._setup, self._reuse = made, block_reuse
        self._blocks: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
        self._runs: dict[int, _Run] = {}
        self._events: dict[int, queue.Queue[Event]] = {}
        self._lock, self._work = threading.Lock(), threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def enqueue(self, job: Job) -> int:
        """Take a request; its id."""
        if any(not 0 <= token < self._setup.model.config.vocab_size for token in job.tokens):
            raise RuntimeError("token id out of range")
        with self._lock:
            identity = len(self.jobs) + 1
            self.jobs.append(job)
            run = _Run(job, self._positions(job), self._setup.model)
            self._runs[identity], self._events[identity] = run, queue.Queue()
        self._work.set()
        return identity

    def _positions(self, job: Job) -> list[int]:
        """Where each token's key is rotated to: where a reused block was, else as asked."""
        given = job.positions if self._setup.honours_positions else None
        positions = list(given or range(len(job.tokens)))
        if not self._reuse:
            return positions
        for end in range(BLOCK, len(job.tokens), BLOCK):
            key = (job.salt, job.tokens[:end])
            if key in self._blocks:
                positions[:end] = self._blocks[key]
            else:
                self._blocks[key] = positions[:end]
        return positions

    def events(self, identity: int) -> queue.Queue[Event]:
        """Where the events of a request come."""
        return self._events[identity]

    def wait(self, identity: int, timeout: float | None) -> list[Event]:
        """The next events of a request; none when `timeout` seconds pass without."""
        try:
            return [self._events[identity].get(timeout=timeout)]
        except queue.Empty:
            return []

    def ready(self, identity: int | None) -> int:
        """Events that wait."""
        return sum(q.qsize() for i, q in self._events.items() if identity in (None, i))

    def cancel(self, identity: int) -> None:
        """End a request before its time."""
        with self._lock:
            self.cancelled.append(identity)
            if self._runs.pop(identity, None):
                self._events[identity].put(Event(finish="cancelled"))

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._setup.hold.set()
        self._work.set()
        self._thread.join()
        self._setup.over()

    @torch.inference_mode()
    def _loop(self) -> None:
        while not self._stopping:
            self._work.wait()
            for identity, run in list(self._runs.items()):
                self._setup.hold.wait()
                if identity not in self._runs:
                    continue
                try:
                    event = self._step(run)
                except Exception as error:
                    event = Event(error=str(error))
                with self._lock:
                    if event is None or identity not in self._runs:
                        continue
                    if event.finish or event.error:
                        del self._runs[identity]
                    self._events[identity].put(event)
            with self._lock:
                if not self._runs and not self._stopping:
                    self._work.clear()

    def _step(self, run: _Run) -> Event | None:
        """One chunk of the prompt, or one token; the event it gives."""
        self.steps += 1
        job, model = run.job, self._setup.model
        if words := self._setup.fail(job, run.made if run.read else -1):
            raise RuntimeError(words)
        left = job.tokens[run.read : run.read + CHUNK]
        ids = torch.tensor(left or (run.next,))
        if left:
            at = run.positions[run.read : run.read + CHUNK]
        else:  # an engine goes on from the last position of the prompt
            last = job.positions[-1] if job.positions and self._setup.honours_positions else None
            start = len(job.tokens) if last is None else last + 1
            at = [start + run.made - 1]
        logits = last_logits(model, ids, torch.tensor(at), run.cache)
        run.read += len(left)
        if run.read < len(job.tokens):
            return None
        run.next = run.draw(logits)
        run.made += 1
        if ended := self._setup.end(job, run.made):
            return Event(finish=ended, number=run.made)
        if job.stops and run.next == job.stops[-1]:  # the end id is not shown
            return Event(finish="end_id", number=run.made)
        if run.next in job.stops:
            return Event((run.next,), "stop_words", number=run.made)
        done = run.made == job.max_tokens
        return Event((run.next,), "length" if done else None, number=run.made)
