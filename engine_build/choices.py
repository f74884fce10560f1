"""What a draft's build is asked for, and what that comes to for the model it is asked of.

Nothing here is built: whatever can be known to fail before the first stage fails here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch

from engine_build.engine import Profile, check_capabilities
from engine_build.scoring_model import Scoring
from trtllm_specprefill.draft.bindings import load_bindings
from trtllm_specprefill.draft.heads import calibration_for
from trtllm_specprefill.draft.manifest import Mode, Precision, Runtime, Scorer
from trtllm_specprefill.draft.reading import ReadingDraft
from trtllm_specprefill.errors import DraftFailed, InputError
from trtllm_specprefill.fetch import Progress
from trtllm_specprefill.models import (
    Model,
    load_config,
    load_model,
    load_tokenizer,
    local_fingerprint,
)
from trtllm_specprefill.settings import VOTES, Settings

Heads = tuple[tuple[int, ...], ...]
# Longest sequence, unless asked for or the model's positions end before: of a window draft room for
# a usual window of 580 tokens, since TensorRT takes memory for the longest; of look-ahead a prompt.
MOST_TOKENS: dict[Mode, int] = {"window": 1024, "lookahead": 8192}
# Sequences at a time, unless asked for: a prompt's windows are read together, with look-ahead it is
# one sequence, and keys and values are held for as many as may be.
MOST_BATCH: dict[Mode, int] = {"window": 4, "lookahead": 1}
SHORTEST = 16  # of the longest prompt
LOOK_AHEAD_SHAPE = 2048  # usual length that the engine is tuned for
# What TensorRT for RTX builds for, unless told: every capability that has the types.
CAPABILITIES: dict[Precision, tuple[int, ...]] = {
    "fp8": (89, 120),
    "bf16": (80, 86, 89, 120),
    "fp32": (80, 86, 89, 120),
}
OLDEST_CAPABILITY = {"fp8": 89, "bf16": 80, "fp32": 75}


@dataclass(frozen=True)
class DraftBuild:
    """What to build. Lengths are in tokens.

    model: as for `load_model`. out: the folder of the engine. layers: how many of the first are
    run; None takes what the library's torch draft runs. heads: a JSON file, per layer the query
    heads that score; None takes, in window mode, those that the library found for the model.
    max_tokens: longest sequence, look-ahead included, and max_batch: most of them at a time; None
    takes those of the mode, `MOST_TOKENS` and `MOST_BATCH`. calibration: a text file for FP8; the
    Debian handbook when None. sm: compute capabilities, 10 x major + minor.
    """

    model: str
    out: Path
    runtime: Runtime = "onnx"
    precision: Precision = "fp8"
    scorer: Scorer = "native"
    mode: Mode = "window"
    layers: int | None = None
    heads: Path | None = None
    max_tokens: int | None = None
    max_batch: int | None = None
    calibration: Path | None = None
    sm: tuple[int, ...] = ()


class Choices:
    """The options of one build for its model, each found out when it is first asked for."""

    def __init__(self, build: DraftBuild, progress: Progress) -> None:
        self._build, self._progress = build, progress

    def check(self) -> None:
        """Raise `InputError` for whatever can be known to fail before anything is built."""
        build = self._build
        if build.scorer == "plugin" and build.runtime != "tensorrt":
            allowed = f"native: {build.runtime} takes no TensorRT plugins"
            raise InputError("scorer", build.scorer, allowed)
        if build.precision == "bf16" and build.runtime == "onnx":
            allowed = "fp32 or fp8: onnxruntime has no bfloat16 products on a CPU"
            raise InputError("precision", build.precision, allowed)
        if build.scorer == "plugin" and build.precision == "fp32":
            raise InputError("precision", build.precision, "fp8 or bf16, which the plugin takes")
        if build.runtime == "onnx" and build.sm:
            raise InputError("sm", build.sm, "none with runtime onnx")
        if build.runtime == "tensorrt" and len(build.sm) > 1:
            allowed = "at most one: TensorRT builds for the GPU it runs on"
            raise InputError("sm", build.sm, allowed)
        here = _this_gpu()
        if build.runtime == "tensorrt" and here is not None and build.sm not in ((), (here,)):
            raise InputError("sm", build.sm, f"{here}, this GPU's: TensorRT builds for no other")
        oldest = OLDEST_CAPABILITY[build.precision]
        if too_old := [number for number in build.sm if number < oldest]:
            raise InputError("sm", too_old[0], f"{oldest} or later for {build.precision}")
        if self.max_batch < 1:
            raise InputError("max_batch", self.max_batch, "a whole number >= 1")
        if not SHORTEST <= self.max_tokens <= self.positions:
            allowed = f"{SHORTEST} to {self.positions}, the positions of {build.model}"
            raise InputError("max_tokens", self.max_tokens, allowed)
        if not 1 <= self.layers <= self.config.num_hidden_layers:
            allowed = f"1 to {self.config.num_hidden_layers}, the layers of {build.model}"
            raise InputError("layers", build.layers, allowed)
        if build.runtime != "onnx":
            check_capabilities(self.bindings, build.runtime, build.sm)
        self.scoring, self.fingerprint, self.tokenizer  # noqa: B018  read now, or refused

    @cached_property
    def config(self) -> Any:
        """The model's."""
        return load_config(self._build.model, self._progress)

    @cached_property
    def tokenizer(self) -> Any:
        """The draft's."""
        return load_tokenizer(self._build.model, self._progress)

    @cached_property
    def fingerprint(self) -> str:
        """Of config and weights."""
        known = local_fingerprint(self._build.model, self._progress)
        return known or self.loaded("float32").fingerprint

    @cached_property
    def bindings(self) -> Any:
        """Of the TensorRT that builds; there is none for onnxruntime."""
        assert self._build.runtime != "onnx"
        return load_bindings(self._build.runtime)

    def loaded(self, dtype: str) -> Model:
        """The model, anew each time: quantizers stay in one, and two fill the memory."""
        return load_model(self._build.model, dtype, "cpu", self._progress)

    @property
    def positions(self) -> int:
        """Positions that the model was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def max_tokens(self) -> int:
        """Longest sequence."""
        asked = self._build.max_tokens
        return min(MOST_TOKENS[self._build.mode], self.positions) if asked is None else asked

    @property
    def max_batch(self) -> int:
        """Most sequences at a time."""
        asked = self._build.max_batch
        return MOST_BATCH[self._build.mode] if asked is None else asked

    @cached_property
    def layers(self) -> int:
        """How many of the first layers are run; with look-ahead all, unless told."""
        if self._build.layers is not None:
            return self._build.layers
        if self._given_heads is not None:
            return len(self._given_heads)
        if self._build.mode == "lookahead":
            return int(self.config.num_hidden_layers)
        return _Reading(self.config, self.fingerprint).depth(Settings())

    @cached_property
    def _given_heads(self) -> Heads | None:
        return None if self._build.heads is None else read_heads(self._build.heads)

    @property
    def _heads(self) -> Heads | None:
        """Which heads score: those given, else in window mode those that the library found."""
        if self._given_heads is not None or self._build.mode == "lookahead":
            return self._given_heads
        settings = Settings(draft_layers=self.layers)
        return _Reading(self.config, self.fingerprint).scoring_heads(settings)

    @cached_property
    def scoring(self) -> Scoring:
        """What is baked into the graph."""
        mode, defaults = self._build.mode, Settings()
        return Scoring(
            mode=mode,
            layers=self.layers,
            heads=self._heads,
            pool=defaults.pool,
            queries=1 + defaults.look_ahead if mode == "lookahead" else defaults.window,
            votes=VOTES[mode],
        )

    @property
    def dtype(self) -> str:
        """Of everything that is not FP8."""
        single = self._build.precision == "fp32" or self._build.runtime == "onnx"
        return "float32" if single else "bfloat16"

    @property
    def sm(self) -> tuple[int, ...]:
        """Compute capabilities that are built for; none where that is not known."""
        if self._build.sm or self._build.runtime == "onnx":
            return self._build.sm
        if self._build.runtime == "tensorrt-rtx":
            return CAPABILITIES[self._build.precision]
        here = _this_gpu()
        return () if here is None else (here,)

    def profiles(self) -> list[Profile]:
        """Sizes of a prefill and, with look-ahead, of a step.

        Tuned for what is fed: of a long prompt as many windows as a call takes, with look-ahead
        one prompt.
        """
        defaults, most, sequences = Settings(), self.max_tokens, self.max_batch
        if self._build.mode == "window":
            usual = defaults.draft_head + defaults.draft_window + defaults.draft_tail
            tokens = (1, min(usual, most), most)
            return [Profile("prefill", {"batch": (1, sequences, sequences), "tokens": tokens})]
        capacity = (1, min(LOOK_AHEAD_SHAPE, most), most)
        spans = {"batch": (1, 1, sequences), "capacity": capacity}
        return [
            Profile("prefill", {**spans, "tokens": capacity}),
            Profile("step", {**spans, "tokens": (1, 1, 1)}),
        ]


class _Reading(ReadingDraft):
    """How the library reads with a model, known without its weights."""

    def __init__(self, config: Any, fingerprint: str) -> None:
        self.config, self.calibration = config, calibration_for(fingerprint)

    def score(self, *_: Any) -> NoReturn:
        """Raise: there is nothing to score with."""
        raise DraftFailed("a model without its weights")


def read_heads(file: Path) -> Heads:
    """Per layer the query heads that score, from a JSON file: `[[0, 3], [], [5]]`."""
    allowed = "a JSON file with a list of heads for each layer, such as [[0, 3], [], [5]]"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not all(type(head) is int for layer in found for head in layer):
            raise InputError("heads", str(file), allowed)
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("heads", str(file), f"{allowed} ({error})") from None
    return tuple(tuple(layer) for layer in found)


def _this_gpu() -> int | None:
    """Compute capability of the GPU that torch sees, as 10 x major + minor."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
