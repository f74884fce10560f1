"""An engine on several ranks under a real MPI: no step of a request is made without all of them.

As TensorRT-LLM's executor does it in leader mode, rank 0 takes the requests and tells the others
of every step; they answer it. When rank 0 shuts down, it tells them that too.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from mpi4py import MPI

from tests.contracts.engine import Job, Setup
from trtllm_specprefill.models import Model

_PAUSE = 0.001  # MPI itself waits with a core of its own


def setup_of(model: Model) -> Setup:
    """What a rank's engine starts from; see `engine.Setup`."""
    world = MPI.COMM_WORLD
    if world.rank:
        threading.Thread(target=_follow, args=(world,), daemon=True).start()
        return Setup(model, leader=False)
    followers = range(1, world.size)

    def step(job: Job, number: int) -> str:
        for rank in followers:
            world.send(number, dest=rank)
        answers = [_receive(world, rank) for rank in followers]
        return "" if answers == [number] * len(followers) else f"the ranks answered {answers}"

    def over() -> None:
        for rank in followers:
            world.send(None, dest=rank)

    return Setup(model, fail=step, over=over)


def _follow(world: MPI.Comm) -> None:
    while (step := _receive(world, 0)) is not None:
        world.send(step, dest=0)
    print(f"rank {world.rank}: rank 0 has shut the engine down", flush=True)


def _receive(world: MPI.Comm, rank: int) -> Any:
    while not world.iprobe(source=rank):
        time.sleep(_PAUSE)
    return world.recv(source=rank)
