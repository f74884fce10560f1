"""The one settings file of a server: models, limits, ports and the defaults of every knob."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from trtllm_specprefill.allowed import refusal
from trtllm_specprefill.draft.load import DraftFallback, DraftKind
from trtllm_specprefill.draft.onnx import chosen_device
from trtllm_specprefill.errors import InputError, SpecPrefillError
from trtllm_specprefill.hardware import choose_device
from trtllm_specprefill.prompt import read_text
from trtllm_specprefill.settings import Sampling, Settings
from trtllm_specprefill.target.load import TargetKind
from trtllm_specprefill.target.manifest import Manifest


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSettings(_Part):
    """A model under torch."""

    model: str = Field(
        default="smollm2-135m", description="directory, .gguf file, hub id or demo alias"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        json_schema_extra={"allowed": "auto, cpu, cuda or cuda:N"},
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads; all when absent")


class DraftSettings(ModelSettings):
    """The draft: what it is, and what runs it; see `draft.load.load_draft`."""

    backend: DraftKind = Field(default="torch", description="what runs it")
    path: str = Field(default="", description="folder of the engine; for onnx and tensorrt")
    fallback: DraftFallback = Field(
        default="torch",
        description="in the place of an engine that cannot be used: torch, the model itself;"
        " dense, prompts are read in full; none, the server does not start",
    )
    layers: int | None = Field(
        default=None,
        ge=1,
        description="of torch: first layers that are loaded, all when absent; a draft that stops"
        " there needs no more, and requests for more, or for look-ahead, are answered in full",
    )
    cache_mib: int = Field(
        default=256,
        ge=0,
        description="mebibytes of what is kept between prompts, so that a prompt that comes again"
        " is not scored again, and of a conversation only what is new is read; 0 keeps nothing",
    )

    @model_validator(mode="after")
    def _layers_are_read(self) -> Self:
        if self.layers is not None and "torch" not in (self.backend, self.fallback):
            allowed = f"none: {self.backend} with fallback {self.fallback} does not read it"
            raise InputError("draft.layers", self.layers, allowed)
        return self


_ENGINE = ("timeout_s", "block_reuse", "kv_cache_tokens")
_READ_BY: dict[TargetKind, tuple[str, ...]] = {
    "torch": ("dtype", "device", "cache_mib", "read_ahead"),
    "trtllm_executor": _ENGINE,
    "trtllm_llm": _ENGINE,
    "endpoint": ("url", "served_name", "as_text", "context_tokens", "timeout_s"),
}


class TargetSettings(ModelSettings):
    """The target: what it is, and what runs it; see `target.load.load_target`."""

    backend: TargetKind = Field(default="torch", description="what runs it")
    url: str = Field(default="", description="of an endpoint")
    served_name: str = Field(default="", description="what an endpoint calls the model")
    as_text: bool = Field(default=False, description="send an endpoint text instead of ids")
    context_tokens: int | None = Field(
        default=None, ge=1, description="positions of an endpoint, where fewer than its model has"
    )
    timeout_s: float = Field(
        default=600.0, gt=0, description="of an engine or an endpoint: longest wait for a token"
    )
    block_reuse: bool = Field(
        default=False, description="of an engine: keep KV blocks, prompts with gaps under their own"
    )
    kv_cache_tokens: int | None = Field(
        default=None, ge=1, description="of an engine's KV cache; all there is room for when absent"
    )
    cache_mib: int = Field(
        default=256,
        ge=0,
        description="of torch: mebibytes of keys and values kept of how prompts begin, tools and"
        " system prompt, so that they are not read again; 0 keeps nothing",
    )
    read_ahead: bool | None = Field(
        default=None,
        description="of torch: read that beginning while the draft scores; when absent, where the"
        " two have devices of their own",
    )

    @model_validator(mode="after")
    def _read_by_the_backend(self) -> Self:
        if self.backend == "endpoint" and not self.url:
            raise InputError(
                "target.url", self.url, "where the endpoint is: grpc://... or http://..."
            )
        read = {"backend", "model", "threads", *_READ_BY[self.backend]}
        for name in sorted(self.model_fields_set - read):
            value, field = getattr(self, name), type(self).model_fields[name]
            if value != field.default:
                allowed = f"{field.default!r}, since {self.backend} does not read it"
                raise InputError(f"target.{name}", value, allowed)
        return self


class Limits(_Part):
    """What one server takes on. Times are in seconds."""

    requests: int = Field(default=32, ge=1, description="requests in the server; more are refused")
    answers: int = Field(default=4, ge=1, description="answers the target decodes in turn")
    draft_timeout: float = Field(default=60.0, gt=0, description="of scoring a prompt of no length")
    draft_timeout_per_1000_tokens: float = Field(
        default=30.0, ge=0, description="added for every 1,000 draft tokens"
    )
    presence: float = Field(
        default=0.5,
        gt=0,
        description="how often a running request is asked whether its client is there",
    )

    def draft_seconds(self, tokens: int) -> float:
        """Seconds that scoring a prompt of `tokens` draft tokens may take."""
        return self.draft_timeout + self.draft_timeout_per_1000_tokens * tokens / 1000


class Ports(_Part):
    """Where the server listens."""

    host: str = "127.0.0.1"
    http: int = Field(default=8000, ge=0, le=65535)
    grpc: int = Field(default=8001, ge=0, le=65535)
    metrics: int = Field(default=8002, ge=0, le=65535)

    @model_validator(mode="after")
    def _differ(self) -> Self:
        taken: dict[int, str] = {0: ""}  # any free one
        for name in ("http", "grpc", "metrics"):
            port = getattr(self, name)
            if port and port in taken:
                raise InputError(f"ports.{name}", port, f"another port than {taken[port]} has")
            taken[port] = name
        return self


class ServeSettings(_Part):
    """Everything a server is started with.

    settings, sampling: what holds for a request that does not say otherwise.
    infer_instances: plain, non-streaming `infer` calls answered at a time.
    """

    draft: DraftSettings = DraftSettings()
    target: TargetSettings = TargetSettings()
    settings: Settings = Settings()
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    ports: Ports = Ports()
    infer_instances: int = Field(default=2, ge=1)

    @classmethod
    def of(cls, values: dict[str, Any]) -> ServeSettings:
        """Build from nested values; `InputError` for the first that cannot be used."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise refusal(cls, error) from None

    @property
    def reads_ahead(self) -> bool:
        """Whether the target reads the head of a prompt while the draft scores it."""
        if self.target.backend != "torch" or not self.target.cache_mib:
            return False
        asked = self.target.read_ahead
        return self._device(self.draft) != self._device(self.target) if asked is None else asked

    @property
    def shares_cores(self) -> bool:
        """Whether draft and target compute on the same cores of a CPU."""
        draft, target = self.draft, self.target
        if target.backend != "torch" or {self._device(draft), self._device(target)} != {"cpu"}:
            return False
        cores = len(os.sched_getaffinity(0))
        return (draft.threads or cores) + (target.threads or cores) > cores

    @staticmethod
    def _device(one: DraftSettings | TargetSettings) -> str:
        """Where a model computes: `cpu`, or `cuda:N`."""
        name = one.device
        if name == "auto" and one.backend == "tensorrt":
            name = "cuda"
        elif name == "auto" and one.backend == "onnx":
            with suppress(SpecPrefillError):  # not installed: torch in its place
                name = chosen_device(name)
        name = choose_device(name).type if name == "auto" else name
        return "cuda:0" if name == "cuda" else name

    def check_positions(self) -> None:
        """Raise `InputError` when all requests ask for positions that the target has not."""
        if self.settings.positions != "original":
            return
        kind, model = self.target.backend, self.target.model
        if kind == "endpoint" or (
            kind.startswith("trtllm") and not Manifest.read(model).original_positions
        ):
            allowed = f"auto or contiguous: target {model} on {kind} takes no position ids"
            raise InputError("settings.positions", "original", allowed)

    @classmethod
    def read(cls, path: Path) -> ServeSettings:
        """From a YAML file; `InputError` when it cannot be read or used."""
        try:
            values = yaml.safe_load(read_text("config", path))
        except yaml.YAMLError as error:
            raise InputError("config", str(path), f"a YAML file ({error})") from None
        if not isinstance(values, dict):
            raise InputError("config", str(path), "a YAML mapping")
        return cls.of(values)
