"""perf_analyzer, Triton's own load generator: where it comes from, one load, what it saw."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_specprefill.errors import SpecPrefillError
from trtllm_specprefill.fetch import Part, Progress, append_part, build_once, cache_folder
from trtllm_specprefill.serving.launch import pytriton_folder

# Newer wheels carry no perf_analyzer, or one that needs a newer glibc. Installing this one would
# take protobuf back to a version that onnx cannot use, so only the program is taken out of it.
_WHEEL = Part(
    "tritonclient==2.51.0",
    "c485bb0123bdf310f90bc8b03d3489b28df2ffed55b30c7eee0b795b48113d52",
    "tritonclient-2.51.0.data/data/bin/perf_analyzer",
)
# What it is linked with, and how the libraries in `nvidia-pytriton` are called.
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}

_LOOK = 2.0  # seconds between two looks at whether the server is there


class AnalyzerFailed(SpecPrefillError):
    """perf_analyzer cannot be run, or ended without a result; says which of its words."""


@dataclass(frozen=True)
class Analyzer:
    """A perf_analyzer: its path, its version, and what its environment must add."""

    binary: str
    version: str
    environment: dict[str, str]


@dataclass(frozen=True)
class Seen:
    """One answered request as its client saw it.

    sent: wall-clock seconds. arrivals: seconds from then to each response that brought text.
    text: the whole answer. report: the server's. inputs: the values that were sent.
    """

    sent: float
    arrivals: tuple[float, ...]
    text: str
    report: dict[str, Any]
    inputs: dict[str, Any]

    @property
    def ttft_s(self) -> float:
        """Seconds to the first response."""
        return self.arrivals[0]

    @property
    def token_gap_s(self) -> float | None:
        """Mean seconds between two tokens; None for an answer of one token."""
        gaps = self.report["output_tokens"] - 1
        return (self.arrivals[-1] - self.arrivals[0]) / gaps if gaps else None


def find(progress: Progress) -> Analyzer:
    """The perf_analyzer in PATH, else one out of its wheel, kept in the cache folder.

    Raises `FetchFailed` when there is no wheel to be had, `ServerFailed` without the package
    `nvidia-pytriton`, whose libraries that one needs, `AnalyzerFailed` when it does not run.
    """
    installed = shutil.which("perf_analyzer")
    if installed is not None:
        return Analyzer(installed, _version(installed, {}), {})
    libraries = pytriton_folder().parent / "nvidia_pytriton.libs"

    def build(workspace: Path) -> Path:
        progress(f"fetching perf_analyzer (14 MB) from PyPI's {_WHEEL.requirement}")
        folder = workspace / "perf_analyzer"
        folder.mkdir()
        append_part(_WHEEL, workspace, folder / "perf_analyzer")
        for name, pattern in _LIBRARIES.items():
            found = next(libraries.glob(pattern), None)
            if found is None:
                raise AnalyzerFailed(f"nvidia-pytriton has no {name}")
            shutil.copy(found, folder / name)
        return folder

    release = _WHEEL.requirement.partition("==")[2]
    folder = build_once(cache_folder() / "triton" / f"perf_analyzer-{release}", build, progress)
    binary = folder / "perf_analyzer"
    if not os.access(binary, os.X_OK):
        binary.chmod(0o755)
    search = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, search))}
    return Analyzer(str(binary), _version(str(binary), environment), environment)


def load(
    analyzer: Analyzer, url: str, requests: list[dict[str, Any]], concurrency: int, count: int
) -> list[Seen]:
    """Send `count` streamed requests to the model `specprefill`, `concurrency` at a time.

    url: host:port of the gRPC endpoint. requests: input values by name, taken in turn.
    Returns them in the order they were sent. Raises `AnalyzerFailed`, with the server's words,
    when any of them fails.
    """
    data = [{name: [value] for name, value in values.items()} for values in requests]
    with tempfile.TemporaryDirectory() as name:
        given, export = Path(name) / "requests.json", Path(name) / "profile.json"
        given.write_text(json.dumps({"data": data}), "utf-8")
        command = [analyzer.binary, "-m", "specprefill", "-u", url, "-i", "grpc"]
        command += ["--streaming", "--async", "--input-data", str(given)]
        command += ["--concurrency-range", str(concurrency), "--request-count", str(count)]
        command += ["--profile-export-file", str(export)]
        said = _run(command, analyzer.environment, url)
        if not export.is_file():
            raise AnalyzerFailed(f"perf_analyzer exported nothing: {_last_words(said)}")
        return read_profile(export)


def read_profile(path: Path) -> list[Seen]:
    """The requests of a profile export, in the order they were sent.

    Raises `AnalyzerFailed` for a file that is none, or a request without an answer.
    """
    try:
        (experiment,) = json.loads(path.read_text("utf-8"))["experiments"]
        found = [_seen(request) for request in experiment["requests"]]
    except (ValueError, KeyError, TypeError) as error:
        raise AnalyzerFailed(f"{path}: not a profile export of one load ({error})") from None
    return sorted(found, key=lambda seen: seen.sent)


def _seen(request: dict[str, Any]) -> Seen:
    """Times are in nanoseconds; a last response may be empty, and only one has the report."""
    arrivals, texts, report = [], [], None
    for when, outputs in zip(
        request["response_timestamps"], request["response_outputs"], strict=True
    ):
        if outputs["report"]:
            report = json.loads(outputs["report"])
        elif not outputs["text_output"] and report is not None:
            continue
        arrivals.append((when - request["timestamp"]) / 1e9)
        texts.append(outputs["text_output"])
    if report is None:
        raise AnalyzerFailed("a request ended without a report")
    return Seen(
        request["timestamp"] / 1e9,
        tuple(arrivals),
        "".join(texts),
        report,
        request["request_inputs"],
    )


def _version(binary: str, environment: dict[str, str]) -> str:
    said = _run([binary, "--version"], environment)
    found = re.search(r"Version (\S+)", said)
    if found is None:
        raise AnalyzerFailed(f"{binary} states no version: {_last_words(said)}")
    return found[1]


def _run(command: list[str], environment: dict[str, str], url: str | None = None) -> str:
    """What the command said. perf_analyzer waits for ever for a server that went away."""
    with tempfile.TemporaryFile("w+") as said:
        try:
            process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=said, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise AnalyzerFailed(f"{command[0]} cannot be run ({error.strerror})") from None
        with process:
            try:
                while process.poll() is None:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_LOOK)
                        break
                    if url is not None and not _listens(url):
                        raise AnalyzerFailed(f"{url}: the server went away")
            finally:
                process.kill()
        said.seek(0)
        words = said.read()
    if process.returncode:
        raise AnalyzerFailed(f"perf_analyzer: {_last_words(words)}")
    return words


def _listens(url: str) -> bool:
    host, _, port = url.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError:
        return False
    return True


def _last_words(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line.lower()]
    return (wrong or lines or ["it said nothing"])[-1]
