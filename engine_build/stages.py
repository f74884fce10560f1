"""The stages of a build: each makes files from known inputs, and is skipped while they are known.

A stage writes into a folder of its own inside the output folder. Only what is whole is moved to
its place, in one step a file, and only then is written down what it was made from. So a build that
was killed or ran out of space leaves finished stages, which the next run of the same command
takes over, and nothing that could be mistaken for one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from engine_build.commands import BuildFailed
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.fetch import Progress, sha256_of

RECORD = "build.json"
_WORK, _LOCK = ".unfinished", ".lock"


@dataclass(frozen=True)
class Product:
    """What a stage has made: SHA-256 of each file, by name. made: in this run, not before it."""

    files: dict[str, str]
    made: bool


class Stages:
    """The stages of one output folder, which this process alone writes; see `opened`."""

    def __init__(self, folder: Path, last: str, progress: Progress) -> None:
        self._folder, self._last, self._progress = folder, last, progress
        self._record = _read(folder / RECORD)

    def make(self, stage: str, inputs: Mapping[str, Any], build: Callable[[Path], None]) -> Product:
        """Let `build` fill an empty folder, unless the same inputs have made what is there.

        inputs: JSON values that determine the product. Raises `BuildFailed`, naming the stage,
        when it cannot be written.
        """
        key = digest(inputs)
        known = self._record.get(stage)
        if known is not None and known["inputs"] == key and self._intact(known["files"]):
            self._progress(f"{stage}: as it was built before")
            return Product(known["files"], made=False)
        self._progress(f"{stage}: begins")
        work = self._folder / _WORK
        try:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            build(work)
            (self._folder / self._last).unlink(missing_ok=True)
            files = self._settle(work, known["files"] if known else {})
            self._record[stage] = {"inputs": key, "files": files}
            self._write_record()
        except OSError as error:
            raise BuildFailed(
                f"{stage}: cannot be written to {self._folder}: {error.strerror or error}"
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return Product(files, made=True)

    def finish(self, write: Callable[[Path], None]) -> None:
        """Let `write` put the last file into the folder, now that everything else is there."""
        work = self._folder / _WORK
        try:
            work.mkdir(exist_ok=True)
            write(work)
            (work / self._last).replace(self._folder / self._last)
        except OSError as error:
            raise BuildFailed(
                f"{self._last}: cannot be written to {self._folder}: {error.strerror or error}"
            ) from error

    def _intact(self, files: Mapping[str, str]) -> bool:
        paths = {self._folder / name: expected for name, expected in files.items()}
        return all(path.is_file() and sha256_of(path) == sha for path, sha in paths.items())

    def _settle(self, work: Path, before: Mapping[str, str]) -> dict[str, str]:
        """Move what was built to its place and take away what it replaces."""
        made = sorted(path for path in work.iterdir() if path.is_file())
        files = {}
        for path in made:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files[path.name] = sha256_of(path)
        for path in made:
            path.replace(self._folder / path.name)
        for name in set(before) - set(files):
            (self._folder / name).unlink(missing_ok=True)
        return files

    def _write_record(self) -> None:
        part = self._folder / _WORK / RECORD
        part.write_text(json.dumps(self._record, indent=1) + "\n", encoding="utf-8")
        part.replace(self._folder / RECORD)


@contextmanager
def opened(folder: Path, last: str, progress: Progress) -> Iterator[Stages]:
    """The stages of `folder`, which is made if need be.

    last: the file that says that the build is whole; taken away before another is replaced.
    Raises `InputError` while another build has the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _LOCK, timeout=0)
        lock.acquire()
    except Timeout:
        raise InputError("out", str(folder), "a folder that no other build is writing") from None
    except OSError as error:
        raise InputError("out", str(folder), f"a folder to write to ({error.strerror})") from None
    try:
        yield Stages(folder, last, progress)
    finally:
        shutil.rmtree(folder / _WORK, ignore_errors=True)
        (folder / _LOCK).unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):  # of a build that has made nothing, nothing is left
            folder.rmdir()


def digest(values: Any) -> str:
    """SHA-256 of JSON values, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    """What is known of earlier runs: nothing, where the file is not there or not whole."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
