"""A draft -> `engine.json` and what it describes: a graph for onnxruntime, or an engine.

Stages, each skipped while its inputs are what they were: calibration (for FP8), graph, engine,
probe. The manifest is written last and taken away before anything else changes, so a folder that
has one is whole.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import onnx
import torch

import engine_build
import plugins.importance
from engine_build.engine import Profile, build_engine, check_capabilities
from engine_build.graph import export_draft, save_model
from engine_build.probe import probe_of
from engine_build.quantise import (
    LENGTH,
    SEQUENCES,
    Calibration,
    calibrate,
    calibration_prompts,
    insert_fp8,
    text_digest,
)
from engine_build.scoring_model import Scoring, ScoringModel
from engine_build.stages import Product, Stages, opened
from plugins.importance.onnx_nodes import expand_for_tensorrt
from trtllm_specprefill.draft.heads import calibration_for
from trtllm_specprefill.draft.manifest import (
    GRAPH,
    MANIFEST,
    CacheGeometry,
    DraftManifest,
    Mode,
    Precision,
    Probe,
    Runtime,
    Scorer,
    tokenizer_hash,
)
from trtllm_specprefill.draft.reading import ReadingDraft
from trtllm_specprefill.draft.tensorrt import ENGINE, load_bindings
from trtllm_specprefill.errors import DraftFailed, InputError
from trtllm_specprefill.evaluation.haystack import haystack
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
CALIBRATION, PROBE = "calibration.json", "probe.json"
TIMING_CACHE = "timing.cache"
MOST_TOKENS = 8192  # unless asked for, or the model's positions end before
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
    max_tokens: longest sequence, look-ahead included. calibration: a text file for FP8; the
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
    max_batch: int = 4
    calibration: Path | None = None
    sm: tuple[int, ...] = ()


@dataclass(frozen=True)
class BuiltDraft:
    """What was built. seconds and made: by stage, made being false where it was known before."""

    manifest: DraftManifest
    seconds: dict[str, float] = field(default_factory=dict)
    made: dict[str, bool] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)


def build_draft(build: DraftBuild, progress: Progress) -> BuiltDraft:
    """Build what is asked, or what of it is not there yet.

    Raises `InputError` for options that do not go together or a model that cannot be read,
    `BuildFailed` for a stage that fails; neither leaves anything half-written.
    """
    work = _Work(build, progress)
    work.check()
    with opened(build.out, MANIFEST, progress) as stages:
        return work.run(stages)


class _Work:
    """One build: what its stages need, each loaded when the first asks for it."""

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
        if build.max_batch < 1:
            raise InputError("max_batch", build.max_batch, "a whole number >= 1")
        if not SHORTEST <= self.max_tokens <= self.positions:
            allowed = f"{SHORTEST} to {self.positions}, the positions of {build.model}"
            raise InputError("max_tokens", self.max_tokens, allowed)
        if not 1 <= self.layers <= self._config.num_hidden_layers:
            allowed = f"1 to {self._config.num_hidden_layers}, the layers of {build.model}"
            raise InputError("layers", build.layers, allowed)
        if build.runtime != "onnx":
            check_capabilities(self._bindings, build.runtime, build.sm)
        self.scoring, self.fingerprint, self.tokenizer  # noqa: B018  read now, or refused

    @cached_property
    def _config(self) -> Any:
        return load_config(self._build.model, self._progress)

    @cached_property
    def tokenizer(self) -> Any:
        """The draft's."""
        return load_tokenizer(self._build.model, self._progress)

    @cached_property
    def fingerprint(self) -> str:
        """Of config and weights."""
        known = local_fingerprint(self._build.model, self._progress)
        return known or self._loaded("float32").fingerprint

    @cached_property
    def _bindings(self) -> Any:
        assert self._build.runtime != "onnx"
        return load_bindings(self._build.runtime)

    def _loaded(self, dtype: str) -> Model:
        """The model, anew each time: quantizers stay in one, and two fill the memory."""
        return load_model(self._build.model, dtype, "cpu", self._progress)

    @property
    def positions(self) -> int:
        """Positions that the model was made for."""
        return int(self._config.max_position_embeddings)

    @property
    def max_tokens(self) -> int:
        """Longest sequence."""
        asked = self._build.max_tokens
        return min(MOST_TOKENS, self.positions) if asked is None else asked

    @cached_property
    def layers(self) -> int:
        """How many of the first layers are run; with look-ahead all, unless told."""
        if self._build.layers is not None:
            return self._build.layers
        if self._given_heads is not None:
            return len(self._given_heads)
        if self._build.mode == "lookahead":
            return int(self._config.num_hidden_layers)
        return _Reading(self._config, self.fingerprint).depth(Settings())

    @cached_property
    def _given_heads(self) -> Heads | None:
        return None if self._build.heads is None else read_heads(self._build.heads)

    @property
    def _heads(self) -> Heads | None:
        """Which heads score: those given, else in window mode those that the library found."""
        if self._given_heads is not None or self._build.mode == "lookahead":
            return self._given_heads
        settings = Settings(draft_layers=self.layers)
        return _Reading(self._config, self.fingerprint).scoring_heads(settings)

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

    def run(self, stages: Stages) -> BuiltDraft:
        """Make every stage and the manifest."""
        seconds: dict[str, float] = {}
        products: dict[str, Product] = {}

        def make(stage: str, inputs: dict[str, Any], build: Callable[[Path], None]) -> None:
            begin = time.perf_counter()
            products[stage] = stages.make(stage, inputs, build)
            seconds[stage] = round(time.perf_counter() - begin, 2)

        model = {"model": self.fingerprint, "scoring": asdict(self.scoring)}
        calibrated = None
        if self._build.precision == "fp8":
            text = haystack(self._build.calibration, self._progress)
            calibrated = text_digest(text)
            prompts = [SEQUENCES, LENGTH, _versions("nvidia-modelopt", "torch", "transformers")]
            inputs = {**model, "text": calibrated, "prompts": prompts, "code": _code(engine_build)}
            make("calibration", inputs, lambda folder: self._calibrate(folder, text))
        graph = {
            **model,
            "dtype": self.dtype,
            "ranges": products["calibration"].files if calibrated else None,
            "plugin": self.sm if self._build.scorer == "plugin" else None,
            "versions": _versions("torch", "transformers", "onnx", "onnxscript"),
            "code": _code(engine_build, plugins.importance),
        }
        make("graph", graph, self._graph)
        if self._build.runtime != "onnx":
            engine = {
                "graph": products["graph"].files,
                "runtime": [self._build.runtime, self._bindings.__version__],
                "profiles": [asdict(profile) for profile in self._profiles()],
                "sm": self.sm,
                "code": _code(engine_build),
            }
            make("engine", engine, self._engine)
        probe = {**model, "precision": self._build.precision, "code": _code(engine_build)}
        make("probe", {**probe, "max_tokens": self.max_tokens}, self._probe)
        served = products["graph" if self._build.runtime == "onnx" else "engine"].files
        manifest = self._manifest(served, calibrated)
        stages.finish(manifest.write)
        return BuiltDraft(
            manifest,
            seconds,
            {stage: product.made for stage, product in products.items()},
            {name: (self._build.out / name).stat().st_size for name in served},
        )

    def _calibrate(self, folder: Path, text: str) -> None:
        prompts = calibration_prompts(self.tokenizer, text)
        module = ScoringModel(self._loaded("float32"), self.scoring).eval()
        found = calibrate(module, prompts, text_digest(text), self._progress)
        worst = max(found.ranges.items(), key=lambda item: item[1].error)
        self._progress(f"largest relative error of a layer: {worst[1].error:.3f}, {worst[0]}")
        (folder / CALIBRATION).write_text(json.dumps(found.as_json(), indent=1) + "\n", "utf-8")

    def _graph(self, folder: Path) -> None:
        build = self._build
        self._progress(f"torch exports {self.layers} layers in {self.dtype}")
        made: onnx.ModelProto = export_draft(self._loaded(self.dtype), self.scoring).model_proto
        if build.precision == "fp8":
            text = (build.out / CALIBRATION).read_text(encoding="utf-8")
            names = insert_fp8(made, Calibration.of_json(json.loads(text)).ranges)
            self._progress(f"{len(names)} linear layers in FP8")
        if build.scorer == "plugin":
            expand_for_tensorrt(made, self.sm[0] if self.sm else 0)
        save_model(made, folder / GRAPH)

    def _engine(self, folder: Path) -> None:
        build = self._build
        assert build.runtime != "onnx"
        if build.scorer == "plugin":
            import plugins.importance.tensorrt_plugin  # noqa: F401  registers them

        made = build_engine(
            self._bindings,
            build.runtime,
            build.out / GRAPH,
            self._profiles(),
            sm=self.sm if build.runtime == "tensorrt-rtx" else (),
            timing_cache=build.out / TIMING_CACHE if build.runtime == "tensorrt" else None,
            progress=self._progress,
        )
        (folder / ENGINE).write_bytes(made)

    def _profiles(self) -> list[Profile]:
        """Sizes of a prefill and, with look-ahead, of a step."""
        defaults, most = Settings(), self.max_tokens
        batch = (1, 1, self._build.max_batch)
        if self._build.mode == "window":
            usual = defaults.draft_head + defaults.draft_window + defaults.draft_tail
            tokens = (1, min(usual, most), most)
            return [Profile("prefill", {"batch": batch, "tokens": tokens})]
        capacity = (1, min(LOOK_AHEAD_SHAPE, most), most)
        spans = {"batch": batch, "capacity": capacity}
        return [
            Profile("prefill", {**spans, "tokens": capacity}),
            Profile("step", {**spans, "tokens": (1, 1, 1)}),
        ]

    def _probe(self, folder: Path) -> None:
        self._progress("torch scores the probe")
        probe = probe_of(
            self._loaded("float32"), self.scoring, self._build.precision, self.max_tokens
        )
        (folder / PROBE).write_text(probe.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def _manifest(self, files: dict[str, str], calibrated: str | None) -> DraftManifest:
        build, config = self._build, self._config
        names = ["trtllm-specprefill", "torch", "transformers", "onnx"]
        versions = _versions(*names, *(["nvidia-modelopt"] if calibrated else []))
        if build.runtime != "onnx":
            versions[build.runtime] = self._bindings.__version__
        cache = None
        if build.mode == "lookahead":
            heads = int(config.num_attention_heads)
            cache = CacheGeometry(
                layers=self.layers,
                kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
                head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
                dtype="float32" if self.dtype == "float32" else "bfloat16",
            )
        scoring = self.scoring
        return DraftManifest(
            model=build.model,
            model_hash=self.fingerprint,
            tokenizer_hash=tokenizer_hash(self.tokenizer),
            versions=versions,
            runtime=build.runtime,
            precision=build.precision,
            scorer=build.scorer,
            mode=build.mode,
            layers=scoring.layers,
            heads=scoring.heads,
            pool=scoring.pool,
            queries=scoring.queries,
            votes=scoring.votes,
            max_tokens=self.max_tokens,
            max_batch=build.max_batch,
            sm=self.sm,
            calibration=calibrated,
            kernels=_code(plugins.importance) if build.scorer == "plugin" else None,
            cache=cache,
            files=files,
            probe=Probe.model_validate_json((build.out / PROBE).read_text(encoding="utf-8")),
        )


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


def _versions(*packages: str) -> dict[str, str]:
    """Of what is installed; nothing for what is not."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _code(*packages: Any) -> str:
    """SHA-256 of the source files of packages: what is built depends on them."""
    made = hashlib.sha256()
    for package in packages:
        for path in sorted(Path(package.__file__).parent.glob("*.py")):
            made.update(path.name.encode() + b"\0" + path.read_bytes())
    return made.hexdigest()[:16]
