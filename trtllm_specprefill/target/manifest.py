"""`specprefill.json`: what was built into a target, written beside the engine by `engine_build`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtllm_specprefill.allowed import refusal
from trtllm_specprefill.errors import InputError

MANIFEST = "specprefill.json"
DESCRIPTION = "model_files"  # folder beside it: config and tokenizer of the model

LAST = "1.4"  # version of TensorRT-LLM whose LLM API is known

Backend = Literal["tensorrt", "pytorch"]
Precision = Literal["fp8", "bf16"]


class ProbeTokens(BaseModel):
    """Greedy tokens that torch answered to `positions.probe_plans`, one a probe."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    scattered: tuple[int, ...]
    contiguous: tuple[int, ...]


class Manifest(BaseModel):
    """A built target. Lengths are in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str = Field(min_length=1, description="what it was built from, as for load_model")
    fingerprint: str | None = Field(
        default=None, description="of that model's weights; none where they were not on the disk"
    )
    backend: Backend
    precision: Precision
    tensorrt_llm: str = Field(
        pattern=r"^\d+\.\d+",
        description="of an engine the version that builds it, of a checkpoint the first to run it",
        json_schema_extra={"allowed": "a version such as 1.2.1"},
    )
    tensor_parallel: int = Field(ge=1)
    pipeline_parallel: int = Field(ge=1)
    original_positions: bool = Field(description="built to rotate by the position ids it is given")
    kv_tokens: int = Field(ge=1, description="longest kept prompt and answer together: M + output")
    positions: int = Field(ge=1, description="positions there are: N + output")
    batch_size: int = Field(ge=1)
    probes: ProbeTokens | None = None

    @property
    def ranks(self) -> int:
        """GPUs that it is built for, each with a part of it."""
        return self.tensor_parallel * self.pipeline_parallel

    def described_in(self, folder: str | Path) -> str:
        """Where the model's config and tokenizer are: in the engine's `folder`, else its name."""
        beside = Path(folder) / DESCRIPTION
        return str(beside) if (beside / "config.json").is_file() else self.model

    def check_version(self, installed: str) -> None:
        """Raise `InputError` where TensorRT-LLM of version `installed` does not run what was built.

        An engine runs in the version that built it, by its three numbers. A checkpoint runs in the
        one it was made for and in later ones, by the first two.
        """
        built, here = _numbers(self.tensorrt_llm), _numbers(installed)
        if self.backend == "tensorrt" and here != built:
            allowed = (
                f"{self.tensorrt_llm}, which built the engine, and no other (install it, or build"
                " the engine again)"
            )
            raise InputError("tensorrt_llm", installed, allowed)
        if self.backend == "pytorch" and not built[:2] <= here[:2] <= _numbers(LAST):
            allowed = f"{self.tensorrt_llm} to {LAST} for this checkpoint"
            raise InputError("tensorrt_llm", installed, allowed)

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """Read it from an engine's folder; `InputError` when it is not there or not one."""
        path = Path(folder) / MANIFEST
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            allowed = f"a folder made by engine_build, with {MANIFEST} ({error.strerror})"
            raise InputError("engine", str(folder), allowed) from None
        except ValidationError as error:
            wrong = refusal(cls, error)
            raise InputError("engine", str(path), f"a manifest ({wrong})") from None

    def write(self, folder: Path) -> None:
        """Write it into an engine's folder."""
        text = json.dumps(self.model_dump(), indent=2) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")


def _numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version: `1.3.0rc12` has 1, 3 and 0."""
    found = re.match(r"\d+(\.\d+){0,2}", version)
    return tuple(map(int, found[0].split("."))) if found else ()
