"""Processes that share cores compute in turn. Locks are by opened file, so threads do as well."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
    monkeypatch.setattr(turns, "SLICE", 0.0)
    inside: list[int] = []
    order: list[int] = []
    begun = threading.Barrier(3)

    def work(name: int) -> None:
        mine = Turns(tmp_path)
        begun.wait(30)
        with mine.taken():
            for _ in range(40):
                inside.append(name)
                time.sleep(0.0005)
                assert inside == [name]
                inside.remove(name)
                order.append(name)
                mine.give_way()

    together(*(lambda name=name: work(name) for name in range(3)))  # type: ignore[misc]
    assert len(order) == 120
    # While all three want to, none goes twice in a row; who has just begun may once.
    all_there = order[: min(len(order) - 1 - order[::-1].index(name) for name in range(3))]
    repeats = [len(list(run)) for _, run in groupby(all_there)]
    assert max(repeats) <= 2
    assert sum(repeat == 2 for repeat in repeats) <= 3


def test_a_turn_lasts_until_its_slice_is_over(tmp_path: Path) -> None:
    first, second, passed = Turns(tmp_path), Turns(tmp_path), threading.Event()

    def wait_for_a_turn() -> None:
        with second.taken():
            passed.set()

    with first.taken():
        waiting = threading.Thread(target=wait_for_a_turn)
        waiting.start()
        first._since = time.monotonic() + 60
        first.give_way()
        assert not passed.wait(0.1)
        first._since = 0.0
        while not passed.is_set():  # the other may not have come to the line yet
            first.give_way()
    waiting.join(30)


def test_a_process_that_dies_gives_its_turn_back(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from trtllm_specprefill.serving.turns import Turns\n"
        "with Turns(Path(sys.argv[1])).taken():\n"
        "    print('taken', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"taken\n"
        child.kill()
    with Turns(tmp_path).taken():
        pass


def test_draft_and_target_do_not_compute_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "SLICE", 0.0)
    inside: list[str] = []
    seen: list[str] = []

    def computing(name: str) -> None:
        inside.append(name)
        time.sleep(0.002)
        assert inside == [name]
        inside.remove(name)
        seen.append(name)

    def script(ids: Any) -> Importance:
        for _ in range(20):
            computing("draft")
            check_interrupted()  # what a layer does
        return Importance(np.ones(ids.size, np.float32), 1, 1, (0,))

    class Target(CountingTarget):
        def stream(self, plan: Any, sampling: Any) -> Any:
            for step in super().stream(plan, sampling):
                computing("target")
                yield step

    draft: Any = ScoringWorker(ScriptedDraft(script), Turns(tmp_path))  # type: ignore[arg-type]
    target = AnsweringWorker(Target(), 2, Turns(tmp_path))  # type: ignore[arg-type]
    clients = [Client(1, 12), Client(2, 12)]
    for client in clients:
        target.submit(client.job)
    result = scored(draft)
    assert isinstance(result, Importance), result
    assert all(client.ended.wait(30) and client.error is None for client in clients)
    assert (seen.count("draft"), seen.count("target")) == (20, 24)


@pytest.mark.parametrize(
    ("draft", "target", "shared"),
    [
        ({}, {}, True),
        ({"backend": "onnx", "path": "engine"}, {}, True),
        ({"backend": "tensorrt", "path": "engine"}, {}, False),
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
    device = {"device": "cpu"}
    own = target if target.get("backend") else target | device
    assert ServeSettings.of({"draft": draft | device, "target": own}).shares_cores is shared
