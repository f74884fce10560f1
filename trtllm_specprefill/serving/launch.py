"""Find tritonserver, start it on a rendered repository, keep its models up, stop it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from trtllm_specprefill.errors import InputError, SpecPrefillError
from trtllm_specprefill.fetch import Progress, build_once, cache_folder
from trtllm_specprefill.serving.control import listeners, tell
from trtllm_specprefill.serving.ranks import Rank, World, ranks_of, started_by
from trtllm_specprefill.serving.repository import CONTROL, MODELS
from trtllm_specprefill.serving.settings import Ports, ServeSettings

_INSTALLED = Path("/opt/tritonserver/bin/tritonserver")  # where NVIDIA's images have it
_EXIT_SECONDS = 10
_WATCHED = ("draft", "target", "orchestrator", "specprefill_infer")  # have processes
_LOOK = 1.0  # seconds between two looks at whether the models are up


class ServerFailed(SpecPrefillError):
    """tritonserver is missing, did not become ready, or stopped."""


@dataclass(frozen=True)
class Launch:
    """How tritonserver is called: its command line and what the environment must add.

    ranks: what that starts, and where.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    ranks: tuple[Rank, ...]

    def line(self) -> str:
        """The same as a shell line."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        line = " ".join([*settings, shlex.join(self.command)])
        return line.replace(" : -n 1 ", " : \\\n    -n 1 ")  # one line a rank


def launch_of(
    settings: ServeSettings,
    repository: Path,
    options: Sequence[str],
    progress: Progress,
    world: World = World(),  # noqa: B008  (frozen)
) -> Launch:
    """The call that serves `repository`; `options` are handed to tritonserver as they are.

    Takes an installed tritonserver, else the one in the package `nvidia-pytriton`, whose Python
    backend is completed in the cache folder, once. Raises `ServerFailed` when there is neither.
    """
    ports = settings.ports
    binary = shutil.which("tritonserver") or (str(_INSTALLED) if _INSTALLED.is_file() else None)
    environment: dict[str, str] = {}
    extra: list[str] = []
    if binary is None:
        package = pytriton_folder()
        binary = str(package / "tritonserver" / "bin" / "tritonserver")
        extra = [f"--backend-directory={_backends(package, progress)}"]
        environment = _environment(package)
    server = (
        binary,
        f"--model-repository={repository}",
        *extra,
        "--disable-auto-complete-config",
        # Named one by one, so that a model whose process died can be loaded again.
        "--model-control-mode=explicit",
        f"--exit-timeout-secs={_EXIT_SECONDS}",
        *options,
    )
    leader = (
        *(f"--load-model={model}" for model in MODELS),
        f"--http-address={ports.host}",
        f"--http-port={ports.http}",
        f"--grpc-address={ports.host}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-address={ports.host}",
        f"--metrics-port={ports.metrics}",
    )
    ranks = ranks_of(world, settings, server, leader)
    command = started_by(world, ranks, repository.parent, environment)
    return Launch(command, environment, ranks)


def with_free_ports(settings: ServeSettings) -> ServeSettings:
    """The same settings with a free port in the place of every port 0."""
    held = []
    numbers = settings.ports.model_dump()
    for name in ("http", "grpc", "metrics"):
        if numbers[name] == 0:
            one = socket.socket()
            one.bind((settings.ports.host, 0))
            numbers[name] = one.getsockname()[1]
            held.append(one)
    for one in held:
        one.close()
    return settings.model_copy(update={"ports": Ports(**numbers)})


def pytriton_folder() -> Path:
    """Where the package `nvidia-pytriton` is installed; `ServerFailed` when it is not."""
    found = importlib.util.find_spec("pytriton")
    if found is None or not found.submodule_search_locations:
        raise ServerFailed(
            "tritonserver is not installed; pip install 'trtllm-specprefill[serve]' brings one,"
            " NVIDIA's Triton images have one"
        )
    return Path(next(iter(found.submodule_search_locations)))


def _backends(package: Path, progress: Progress) -> Path:
    """A backend folder whose Python backend runs the Python that runs us."""
    version = "{}.{}".format(*sys.version_info[:2])
    name = "triton_python_backend_stub"
    stub = package / "tritonserver" / "python_backend_stubs" / version / name
    if not stub.is_file():
        raise ServerFailed(f"nvidia-pytriton has no Python backend for Python {version}")
    release = importlib.metadata.version("nvidia-pytriton")

    def build(workspace: Path) -> Path:
        progress("completing Triton's Python backend")
        folder = workspace / "backends"
        shutil.copytree(package / "tritonserver" / "backends" / "python", folder / "python")
        shutil.copy(stub, folder / "python" / name)
        # It finds its libraries beside the package it came from, and may run.
        return folder

    target = cache_folder() / "triton" / f"pytriton-{release}-python-{version}"
    folder = build_once(target, build, progress)
    (folder / "python" / name).chmod(0o755)
    return folder


def _environment(package: Path) -> dict[str, str]:
    """What the server needs to find its libraries, and its Python backend our Python.

    The backend's Python ignores PYTHONPATH; it belongs to the `python3` that PATH finds first.
    """
    libraries = [str(package.parent / "nvidia_pytriton.libs")]
    own = Path(sysconfig.get_config_var("LIBDIR") or "")
    if list(own.glob("libpython3*.so*")):
        libraries.append(str(own))
    if os.environ.get("LD_LIBRARY_PATH"):
        libraries.append(os.environ["LD_LIBRARY_PATH"])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PATH": path,
        # Draft and target share the cores. At a barrier threads spin for some 0.2 ms: they outlast
        # the gaps inside a pass (waking a sleeping core of a virtual machine costs as much), and
        # cost the other process little. OpenMP's default is thirty times as long.
        "GOMP_SPINCOUNT": "10000",
        # The memory of one pass serves the next; given back, it is faulted in again page by page.
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
        "TOKENIZERS_PARALLELISM": "false",
    }


class Server:
    """A running tritonserver, as a context manager.

    Its models run in processes of their own; one that dies is loaded again.
    """

    def __init__(self, launch: Launch, ports: Ports, folder: Path) -> None:
        """Start it.

        folder: where the repository was rendered to; tritonserver's own words go to its `log`.
        """
        self.ports, self.log, self._folder = ports, folder / "log", folder
        self._alone = not any(rank.command for rank in launch.ranks[1:])
        for name, port in ports.model_dump(exclude={"host"}).items():
            with socket.socket() as probe:
                if probe.connect_ex((ports.host, port)) == 0:
                    raise InputError(f"ports.{name}", port, "a port that nothing listens on")
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                launch.command,
                env={**os.environ, **launch.environment},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._stopping = threading.Event()
        self._watch = threading.Thread(target=self._keep_up, daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_ready(self, progress: Progress, seconds: float = 600.0) -> None:
        """Return when every model is ready; `ServerFailed`, with the log's last words, if not."""
        begin = time.monotonic()
        told: list[str] = []
        while True:
            if self._process.poll() is not None:
                raise ServerFailed(f"tritonserver ended: {self._last_words()}")
            missing = [model for model in MODELS if not self.model_ready(model)]
            if not missing:
                break
            if missing != told:
                progress(f"waiting for {', '.join(missing)}")
                told = missing
            if time.monotonic() - begin > seconds:
                raise ServerFailed(f"not ready after {seconds:.0f} s: {self._last_words()}")
            time.sleep(0.2)
        self._watch.start()

    def wait(self) -> int:
        """Wait until the server ends; its exit status."""
        return self._process.wait()

    def stop(self) -> None:
        """Stop the server and all its processes."""
        self._stopping.set()
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_SECONDS + 5)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # whatever did not go by itself
        self._process.wait()

    @property
    def pid(self) -> int:
        """The server's process; those of its models are its children."""
        return self._process.pid

    def model_ready(self, model: str) -> bool:
        """Whether a model takes requests."""
        return self._call(f"v2/models/{model}/ready") is not None

    def _keep_up(self) -> None:
        """Load again what has died. Triton leaves a model alone whose process was killed."""
        while not self._stopping.wait(_LOOK):
            for model in _WATCHED:
                if self._alive(model) or self._process.poll() is not None:
                    continue
                if model == "target" and not self._alone:
                    self._process.terminate()  # the other ranks cannot be joined anew
                    return
                # Loading is a no-op while the model still counts as loaded.
                self._call(f"v2/repository/models/{model}/unload", b"{}")
                while not self._stopping.wait(_LOOK) and self._process.poll() is None:
                    if self._call(f"v2/repository/models/{model}/load", b"{}") is not None:
                        break

    def _alive(self, model: str) -> bool:
        """Whether a model's processes listen: Triton calls a model ready whose process died."""
        control = self._folder / CONTROL
        found = listeners(control, model)
        try:
            for name in found:
                tell(control, name, {"message": "ping"})
        except SpecPrefillError:
            return False
        return bool(found)

    def _call(self, path: str, body: bytes | None = None) -> bytes | None:
        url = f"http://{self.ports.host}:{self.ports.http}/{path}"
        try:
            with urllib.request.urlopen(url, data=body, timeout=120) as reply:
                return bytes(reply.read())
        except (urllib.error.URLError, OSError):
            return None

    def _last_words(self) -> str:
        lines = self.log.read_text("utf-8", errors="replace").splitlines()
        said = [line.strip() for line in lines if " UNAVAILABLE" in line or "rror" in line]
        return (said or [line for line in lines if line.strip()] or ["it said nothing"])[-1]
