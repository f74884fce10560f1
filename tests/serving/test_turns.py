"""Processes that share cores compute in turn. Locks are by opened file, so threads do as well."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.serving.test_steps import Client, CountingTarget, ScriptedDraft, scored
from trtllm_specprefill.forward import check_interrupted
from trtllm_specprefill.importance import Importance
from trtllm_specprefill.serving import turns
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.serving.turns import Turns
from trtllm_specprefill.serving.workers import AnsweringWorker, ScoringWorker


def together(*work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_each_is_alone_and_none_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 600.0)
    inside: list[int] = []
    order: list[int] = []
    left = [0, 1, 2]
    begun = threading.Barrier(3)
    line = os.open(tmp_path / "line", os.O_RDWR | os.O_CREAT)

    def somebody_waits() -> bool:
        try:
            fcntl.flock(line, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(line, fcntl.LOCK_UN)
        return False

    def work(name: int) -> None:
        mine = Turns(tmp_path)
        begun.wait(30)
        for _ in range(20):
            mine.take()
            inside.append(name)
            order.append(name)
            while len(left) > 1 and not somebody_waits():
                time.sleep(0.001)
            assert inside == [name]
            inside.remove(name)
            mine._until = 0.0  # this turn has lasted
            mine.give_way()
            inside.append(name)
            order.append(name)
            while len(left) > 1 and not somebody_waits():
                time.sleep(0.001)
            inside.remove(name)
            if order.count(name) == 40:
                left.remove(name)
            mine.leave()

    together(*(lambda name=name: work(name) for name in range(3)))  # type: ignore[misc]
    assert len(order) == 120
    # Somebody was in line at every end of a turn: whoever had it was not the next.
    first_over = min(len(order) - 1 - order[::-1].index(name) for name in range(3))
    assert all(one != other for one, other in pairwise(order[:first_over]))


def waiting(other: Turns, passed: threading.Event) -> threading.Thread:
    def wait_for_a_turn() -> None:
        other.take()
        passed.set()
        other.leave()

    thread = threading.Thread(target=wait_for_a_turn)
    thread.start()
    return thread


def test_a_turn_lasts_for_its_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SLICE", 60.0)
    first, second, passed = Turns(tmp_path), Turns(tmp_path), threading.Event()
    first.take()
    first.take()  # once is enough
    thread = waiting(second, passed)
    first.give_way()
    assert not passed.wait(0.1)
    while not passed.is_set():  # the other may not have come to the line yet
        first._until = 0.0
        first.give_way()
    first.leave()
    thread.join(30)


def test_a_turn_lasts_longer_where_a_prompt_is_read_and_where_it_was_long_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(turns.time, "monotonic", lambda: now)
    mine, other = Turns(tmp_path), Turns(tmp_path)
    mine.take()
    assert mine._until == now + turns.SLICE
    with mine.reading():
        assert mine._until == now + turns.READING
    assert mine._until <= now  # and no answer is decoded in what is left of it
    mine.leave()
    other.take()

    def passing(seconds: float) -> None:
        nonlocal now
        now += 2.0  # of the other's layer
        other.leave()

    monkeypatch.setattr(turns.time, "sleep", passing)
    mine.take()
    assert mine._until == now + turns.SHARE * 2.0
    assert mine._taken


def test_one_that_never_gives_way_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 0.05)
    hangs, mine, next_in_line = Turns(tmp_path), Turns(tmp_path), Turns(tmp_path)
    hangs.take()
    for other in (mine, next_in_line, mine):
        other.take()
        assert not other._taken
        assert other._patience == turns.SLICE
        with other.reading():  # it is asked for again between two layers
            assert other._until <= time.monotonic() + turns.SLICE
        other.leave()
    hangs.leave()
    mine.take()
    assert mine._taken
    assert mine._patience == turns.PATIENCE
    mine.leave()


def test_a_process_that_dies_gives_its_turn_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 600.0)
    code = (
        "import sys, time; from pathlib import Path\n"
        "from trtllm_specprefill.serving.turns import Turns\n"
        "Turns(Path(sys.argv[1])).take()\n"
        "print('taken', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"taken\n"
        mine, passed = Turns(tmp_path), threading.Event()
        thread = waiting(mine, passed)
        assert not passed.wait(0.05)
        child.kill()
    assert passed.wait(60)
    thread.join(30)


class Slow(CountingTarget):
    """Computes for a while in every step, and in every head it reads."""

    def __init__(self, compute: Callable[[str], None]) -> None:
        super().__init__()
        self.compute = compute

    def stream(self, plan: Any, sampling: Any) -> Any:
        for step in super().stream(plan, sampling):
            self.compute("target")
            yield step

    def read_ahead(self, head: Any) -> None:
        for _ in range(head.size):
            self.compute("head")
            check_interrupted()  # what a layer does


def test_draft_and_target_do_not_compute_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("SLICE", 0.0), ("READING", 0.0), ("SHARE", 0.0), ("PATIENCE", 60.0)):
        monkeypatch.setattr(turns, name, seconds)
    inside: list[str] = []
    seen: list[str] = []

    def compute(name: str) -> None:
        inside.append(name)
        time.sleep(0.002)
        assert inside == [name]
        inside.remove(name)
        seen.append(name)

    def script(ids: Any) -> Importance:
        for _ in range(20):
            compute("draft")
            check_interrupted()
        return Importance(np.ones(ids.size, np.float32), 1, 1, (0,))

    draft: Any = ScoringWorker(ScriptedDraft(script), Turns(tmp_path))  # type: ignore[arg-type]
    target = AnsweringWorker(Slow(compute), 2, Turns(tmp_path))  # type: ignore[arg-type]
    clients = [Client(1, 12), Client(2, 12)]
    target.read_ahead("another", np.ones(12, np.int32))
    for client in clients:
        target.submit(client.job)
    result = scored(draft)
    assert isinstance(result, Importance), result
    assert all(client.ended.wait(30) and client.error is None for client in clients)
    assert [seen.count(name) for name in ("draft", "target", "head")] == [20, 24, 12]
    assert seen[:20].count("draft") < 20  # nor one after the other
    # Both are over, and whoever comes next finds the cores free.
    monkeypatch.setattr(turns, "PATIENCE", 5.0)
    free = Turns(tmp_path)
    free.take()
    assert free._taken


def test_a_head_whose_client_has_gone_is_not_read(tmp_path: Path) -> None:
    seen: list[str] = []
    target = AnsweringWorker(Slow(seen.append), 1)  # type: ignore[arg-type]
    target.cancel("gone")
    target.read_ahead("gone", np.ones(5, np.int32))
    client = Client(1, 1)
    target.submit(client.job)
    assert client.ended.wait(30)
    assert seen == ["target"]


@pytest.mark.parametrize(
    ("draft", "target", "shared"),
    [
        ({}, {}, True),
        ({"backend": "onnx", "path": "engine"}, {}, True),
        ({"backend": "tensorrt", "path": "engine", "device": "auto"}, {}, False),
        ({}, {"backend": "endpoint", "url": "grpc://there:8001"}, False),
        ({"threads": 1}, {"threads": 1}, True),
        ({"threads": 2}, {"threads": 2}, False),
    ],
)
def test_cores_are_shared_where_both_compute_on_them(
    draft: dict[str, Any], target: dict[str, Any], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = 4 if draft.get("threads") == 2 else 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    own = target if target.get("backend") else {"device": "cpu", **target}
    settings = ServeSettings.of({"draft": {"device": "cpu", **draft}, "target": own})
    assert settings.shares_cores is shared


@pytest.mark.parametrize(("providers", "shared"), [(["CPU"], True), (["CUDA", "CPU"], False)])
def test_a_draft_under_onnxruntime_is_where_that_computes(
    providers: list[str], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    names = [f"{one}ExecutionProvider" for one in providers]
    monkeypatch.setattr(runtime, "get_available_providers", lambda: names)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    draft = {"backend": "onnx", "path": "engine", "device": "auto"}
    settings = ServeSettings.of({"draft": draft, "target": {"device": "cpu"}})
    assert settings.shares_cores is shared
    assert settings.reads_ahead is not shared


@pytest.mark.parametrize(
    ("gpus", "draft", "target", "ahead"),
    [
        (0, "auto", "cpu", False),
        (1, "auto", "cuda", False),
        (1, "cuda:0", "auto", False),
        (2, "cuda:1", "auto", True),
        (1, "cpu", "auto", True),
    ],
)
def test_heads_are_read_ahead_on_devices_of_their_own_however_these_are_named(
    gpus: int, draft: str, target: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    settings = ServeSettings.of({"draft": {"device": draft}, "target": {"device": target}})
    assert settings.reads_ahead is ahead
