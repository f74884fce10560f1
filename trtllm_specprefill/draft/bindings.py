"""TensorRT's Python modules, or those of TensorRT for RTX, which have the same API."""

from __future__ import annotations

import importlib
import re
from contextlib import suppress
from typing import Any, Literal

from trtllm_specprefill.errors import InputError

OLDEST = (10, 14)  # of TensorRT, the first with plugins compiled ahead and ONNX's Attention

EngineRuntime = Literal["tensorrt", "tensorrt-rtx"]
_MODULES = {
    "tensorrt": ("tensorrt",),
    "tensorrt-rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
_INSTALL = {
    "tensorrt": "an installed TensorRT: pip install tensorrt, from NVIDIA's index",
    "tensorrt-rtx": "an installed TensorRT for RTX:"
    " pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings",
}


def load_bindings(runtime: EngineRuntime) -> Any:
    """The module `tensorrt`, or that of TensorRT for RTX, which has the same API.

    Raises `InputError` where it is not installed, or too old.
    """
    for name in _MODULES[runtime]:
        if name == "tensorrt_rtx_bindings":
            with suppress(ImportError):  # brings the native libraries that the bindings need
                importlib.import_module("tensorrt_rtx_libs")
        try:
            bindings = importlib.import_module(name)
        except ImportError as error:
            said = str(error)
            continue
        if runtime == "tensorrt" and version_of(bindings) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise InputError("runtime", f"tensorrt {bindings.__version__}", f"{oldest} or later")
        return bindings
    raise InputError("runtime", runtime, f"{_INSTALL[runtime]} ({said})")


def version_of(bindings: Any) -> tuple[int, ...]:
    """Major and minor version."""
    return _numbers(bindings.__version__)[:2]


def same_version(one: str, other: str) -> bool:
    """Whether two versions are of one TensorRT: as many numbers as both have are the same.

    NVIDIA's images say 10.14.1.48 where PyPI's wheel says 10.14.1.48.post1.
    """
    pairs = list(zip(_numbers(one), _numbers(other), strict=False))
    return bool(pairs) and all(a == b for a, b in pairs)


def _numbers(version: str) -> tuple[int, ...]:
    """Major, minor, patch and build, as far as they are there; no suffix."""
    found = re.match(r"\d+(\.\d+){0,3}", version)
    return tuple(map(int, found[0].split("."))) if found else ()


class ErrorLog:
    """TensorRT's errors, kept for the messages of exceptions."""

    def __init__(self, trt: Any) -> None:
        errors: list[str] = []

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                    errors.append(" ".join(message.split()))

        self.logger, self._errors = Logger(), errors

    def told(self) -> str:
        """The last of them."""
        return "; ".join(self._errors[-3:]) or "TensorRT gave no reason"
