"""Two real tritonservers under a real mpirun, started as `specprefill serve` prints it."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.target.served import KNOBS, repository_of, settings_of, text_of_words, whole
from trtllm_specprefill import SpecPrefill
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.models import load_model
from trtllm_specprefill.serving.launch import Launch, Server, launch_of
from trtllm_specprefill.serving.ranks import world_of
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.target.torch import TorchTarget

pytest.importorskip("tritonclient.grpc")
pytest.importorskip("pytriton")
pytest.importorskip("mpi4py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Ranks:
    """The running ranks of one target: each a shell, its tritonserver and that one's processes."""

    def __init__(self, launch: Launch, server: Server, served: ServeSettings) -> None:
        self.launch, self.server = launch, server
        self.url = f"127.0.0.1:{served.ports.grpc}"
        mpirun = psutil.Process(server.pid)
        self.all = [mpirun, *mpirun.children(recursive=True)]
        servers = [p for p in self.all if "tritonserver" in Path(p.cmdline()[0]).name]
        self.servers = sorted(servers, key=lambda p: "--load-model=draft" not in p.cmdline())

    def all_end(self, seconds: float = 40) -> bool:
        """Whether every process ends by itself."""
        return not psutil.wait_procs(self.all, timeout=seconds)[1]


@pytest.fixture
def ranks(folder: Path, tmp_path: Path) -> Iterator[Ranks]:
    served = settings_of("trtllm_executor", folder, tmp_path, 2)
    work = Path(tempfile.mkdtemp(prefix="specprefill-"))  # short: it holds sockets
    repository = repository_of("trtllm_executor", served, folder, work, mpi=True)
    launch = launch_of(served, repository, (), print, world_of(served, 2))
    with Server(launch, served.ports, work) as server:
        server.wait_ready(print)
        running = Ranks(launch, server, served)
        yield running
    _, left = psutil.wait_procs(running.all, timeout=5)
    for process in left:
        process.kill()
    shutil.rmtree(work)
    assert not left


def loaded(server: psutil.Process) -> list[str]:
    words = server.cmdline()
    return [w.removeprefix("--load-model=") for w in words if w.startswith("--load-model=")]


def test_mpirun_starts_two_ranks_that_answer_together_and_end_together(
    ranks: Ranks,
    folder: Path,
) -> None:
    small = load_model(str(folder), "float32", "cpu")
    judge = SpecPrefill(TorchDraft(small), TorchTarget(small))
    assert ranks.launch.command[0] == "mpirun"
    text = text_of_words(300)
    answer, report = whole(ranks.url, text)
    assert answer == judge.generate(text, max_tokens=8, **KNOBS).text
    assert (report["reason"], report["positions"]) == ("pruned", "original")

    first, second = ranks.servers
    assert loaded(second) == ["target"]
    assert len(second.children()) == 1
    assert {"draft", "target", "orchestrator", "specprefill"} < set(loaded(first))
    cores = psutil.Process().cpu_affinity()
    for rank in (first, second):
        assert rank.cpu_affinity() == cores  # mpirun by itself binds each to one

    first.send_signal(signal.SIGTERM)
    assert ranks.all_end()
    assert "rank 1: rank 0 has shut the engine down" in ranks.server.log.read_text()


@pytest.mark.parametrize(
    "end",
    [
        lambda ranks: ranks.server.stop(),
        lambda ranks: ranks.servers[1].terminate(),
        lambda ranks: ranks.servers[1].children()[0].kill(),
    ],
    ids=["the server is stopped", "rank 1 is stopped", "rank 1's target is killed"],
)
def test_however_one_rank_ends_none_is_left(ranks: Ranks, end: Callable[[Ranks], None]) -> None:
    assert whole(ranks.url, text_of_words(100))[0]
    begin = time.monotonic()
    end(ranks)
    assert ranks.all_end(), time.monotonic() - begin
