"""`specprefill.json`: what was built into a target, written beside the engine by `engine_build`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtllm_specprefill.allowed import refusal
from trtllm_specprefill.errors import InputError

MANIFEST = "specprefill.json"

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
    model: str = Field(min_length=1, description="whose tokenizer and config, as for load_model")
    backend: Backend
    precision: Precision
    tensorrt_llm: str = Field(description="the version it is built for")
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
