"""`engine.json`: what a built draft is, written beside its graph or engine by `engine_build`.

Whoever loads an engine reads it first: which tokenizer it was built for, how it scores, how much
it takes at once, and the figures of a probe that it must reproduce before it is used.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from trtllm_specprefill.allowed import refusal
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.importance_op import MAX_QUERIES, check_pool_width
from trtllm_specprefill.settings import Votes

MANIFEST = "engine.json"
GRAPH = "draft.onnx"

Runtime = Literal["onnx", "tensorrt", "tensorrt-rtx"]
Precision = Literal["fp32", "bf16", "fp8"]
Scorer = Literal["plugin", "native"]
Mode = Literal["window", "lookahead"]

# In several scripts, with what tokenizers treat differently: spaces, digits, code, an accent.
_SPELLING = "The 42nd  naïve café,\n\tif (x != 0) { return 寿司; } Привет 🙂 العربية é"


class EngineRefused(InputError):
    """An engine that is not what is asked for: names the field, what it holds, and what fits."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class CacheGeometry(_Part):
    """Keys and values of the tokens read so far: per layer two `[B, kv_heads, P, head_dim]`."""

    layers: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    dtype: Literal["float32", "float16", "bfloat16", "float8_e4m3fn"]


class Probe(_Part):
    """What the engine must say of a prompt that every build knows.

    ids: the prompt's token ids. importance: one score a token, from the library's torch draft.
    tolerance: largest difference that is let through, in units of the largest score.
    next_tokens: greedy tokens, with look-ahead; none in window mode.
    """

    ids: tuple[int, ...] = Field(min_length=1)
    importance: tuple[float, ...] = Field(min_length=1)
    tolerance: float = Field(gt=0)
    next_tokens: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.ids) != len(self.importance):
            raise ValueError(f"{len(self.importance)} scores for {len(self.ids)} ids")
        return self


class DraftManifest(_Part):
    """A built draft. Lengths are in tokens."""

    model: str = Field(min_length=1, description="whose tokenizer and config, as for load_model")
    model_hash: str = Field(min_length=1, description="`Model.fingerprint`")
    tokenizer_hash: str = Field(min_length=1, description="`tokenizer_hash` of the tokenizer")
    versions: dict[str, str] = Field(description="of the packages that built it, by name")
    runtime: Runtime
    precision: Precision
    scorer: Scorer
    mode: Mode
    layers: int = Field(ge=1, description="first layers of the model, the only ones that are run")
    heads: tuple[tuple[int, ...], ...] | None = Field(
        default=None, description="per layer, the query heads that score; all when absent"
    )
    pool: int = Field(ge=1, description="width of the average pooling")
    queries: int = Field(
        ge=1,
        le=1 + MAX_QUERIES,
        description="window mode: most last tokens that vote; look-ahead: 1 + most tokens decoded",
    )
    votes: Votes = Field(description="how the queries are combined")
    max_tokens: int = Field(ge=1, description="most tokens of one sequence, look-ahead included")
    max_batch: int = Field(ge=1, description="most sequences at a time")
    sm: tuple[int, ...] = Field(
        default=(), description="compute capabilities, as 10 x major + minor"
    )
    calibration: str | None = Field(default=None, description="digest of the calibration ids")
    kernels: str | None = Field(default=None, description="digest of the plugin's kernels")
    cache: CacheGeometry | None = Field(default=None, description="look-ahead only")
    files: dict[str, str] = Field(
        default_factory=dict, description="sha256 of the files of the engine, by name"
    )
    probe: Probe

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_pool_width(self.pool)
        if self.heads is not None and len(self.heads) != self.layers:
            raise InputError("heads", len(self.heads), f"a list for each of {self.layers} layers")
        if (self.mode == "lookahead") != (self.cache is not None):
            raise InputError("cache", self.cache, "given with mode lookahead, and only then")
        if self.cache is not None and self.cache.layers != self.layers:
            raise InputError("cache.layers", self.cache.layers, f"layers, {self.layers}")
        if len(self.probe.ids) > self.max_tokens:
            raise InputError("probe.ids", len(self.probe.ids), f"at most {self.max_tokens} tokens")
        return self

    @classmethod
    def read(cls, folder: str | Path) -> DraftManifest:
        """Read it from an engine's folder; `InputError`, naming the field, when it is not one."""
        path = Path(folder) / MANIFEST
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            said = getattr(error, "strerror", None) or error
            allowed = f"a folder made by `python -m engine_build draft`, with {MANIFEST} ({said})"
            raise InputError("engine", str(folder), allowed) from None
        except ValidationError as error:
            wrong = refusal(cls, error)
            raise InputError("engine", str(path), f"a manifest ({wrong})") from None

    def write(self, folder: Path) -> None:
        """Write it into an engine's folder, whole or not at all."""
        unfinished = folder / f"{MANIFEST}.part"
        unfinished.write_text(json.dumps(self.model_dump(), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(folder / MANIFEST)

    def check_field(self, name: str, fits: object, why: str) -> None:
        """Raise `EngineRefused` unless field `name` holds what fits.

        name: of a field, `versions.X` for a package. why: words for what asks for it.
        """
        first, _, rest = name.partition(".")
        held = getattr(self, first)
        held = held.get(rest) if rest else held
        if held != fits:
            raise EngineRefused(name, held, f"{fits!r}, {why}")

    def check_tokenizer(self, tokenizer: Any, model: str) -> None:
        """Raise `EngineRefused` unless it was built for this tokenizer, that of `model`."""
        self.check_field("tokenizer_hash", tokenizer_hash(tokenizer), f"the tokenizer of {model}")


def tokenizer_hash(tokenizer: Any) -> str:
    """16 hexadecimal digits that change with what a tokenizer makes of texts.

    Of its vocabulary, special ids, and the ids of a text in several scripts, not of its files:
    those are written differently by every version of the libraries.
    """
    known = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "text": tokenizer(_SPELLING)["input_ids"],
    }
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
