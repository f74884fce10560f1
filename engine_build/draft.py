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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnx

import engine_build
import plugins.importance
from engine_build.choices import Choices, DraftBuild
from engine_build.engine import build_engine
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
from engine_build.scoring_model import ScoringModel
from engine_build.stages import Product, Stages, opened
from plugins.importance.onnx_nodes import expand_for_tensorrt
from trtllm_specprefill.draft.manifest import (
    GRAPH,
    MANIFEST,
    CacheGeometry,
    DraftManifest,
    Probe,
    tokenizer_hash,
)
from trtllm_specprefill.draft.tensorrt import ENGINE
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.evaluation.haystack import haystack
from trtllm_specprefill.fetch import FetchFailed, Progress
from trtllm_specprefill.prompt import read_text

CALIBRATION, PROBE = "calibration.json", "probe.json"
TIMING_CACHE = "timing.cache"


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
    choices = Choices(build, progress)
    choices.check()
    with opened(build.out, MANIFEST, progress) as stages:
        return _Work(build, choices, progress).run(stages)


class _Work:
    """The stages of one build."""

    def __init__(self, build: DraftBuild, choices: Choices, progress: Progress) -> None:
        self._build, self._choices, self._progress = build, choices, progress

    def run(self, stages: Stages) -> BuiltDraft:
        """Make every stage and the manifest."""
        build, choices = self._build, self._choices
        seconds: dict[str, float] = {}
        products: dict[str, Product] = {}

        def make(stage: str, inputs: dict[str, Any], fill: Callable[[Path], None]) -> None:
            begin = time.perf_counter()
            products[stage] = stages.make(stage, inputs, fill)
            seconds[stage] = round(time.perf_counter() - begin, 2)

        model = {"model": choices.fingerprint, "scoring": asdict(choices.scoring)}
        calibrated = None
        if build.precision == "fp8":
            text = self._text()
            calibrated = text_digest(text)
            prompts = [SEQUENCES, LENGTH, _versions("nvidia-modelopt", "torch", "transformers")]
            inputs = {**model, "text": calibrated, "prompts": prompts, "code": _code(engine_build)}
            make("calibration", inputs, lambda folder: self._calibrate(folder, text))
        graph = {
            **model,
            "dtype": choices.dtype,
            "ranges": products["calibration"].files if calibrated else None,
            "plugin": choices.sm if build.scorer == "plugin" else None,
            "versions": _versions("torch", "transformers", "onnx", "onnxscript"),
            "code": _code(engine_build, plugins.importance),
        }
        make("graph", graph, self._graph)
        if build.runtime != "onnx":
            engine = {
                "graph": products["graph"].files,
                "runtime": [build.runtime, choices.bindings.__version__],
                "profiles": [asdict(profile) for profile in choices.profiles()],
                "sm": choices.sm,
                "code": _code(engine_build),
            }
            make("engine", engine, self._engine)
        probe = {**model, "precision": build.precision, "code": _code(engine_build)}
        make("probe", {**probe, "max_tokens": choices.max_tokens}, self._probe)
        served = products["graph" if build.runtime == "onnx" else "engine"].files
        manifest = self._manifest(served, calibrated)
        stages.finish(manifest.write)
        return BuiltDraft(
            manifest,
            seconds,
            {stage: product.made for stage, product in products.items()},
            {name: (build.out / name).stat().st_size for name in served},
        )

    def _text(self) -> str:
        """What FP8 is calibrated on; `InputError` where it cannot be had."""
        if self._build.calibration is not None:
            return read_text("calibration", self._build.calibration)
        try:
            return haystack(progress=self._progress)
        except FetchFailed as error:
            allowed = (
                f"--calibration FILE, a UTF-8 text, since the Debian handbook is not here: {error}"
            )
            raise InputError("calibration", None, allowed) from error

    def _calibrate(self, folder: Path, text: str) -> None:
        choices = self._choices
        prompts = calibration_prompts(choices.tokenizer, text)
        module = ScoringModel(choices.loaded("float32"), choices.scoring).eval()
        found = calibrate(module, prompts, text_digest(text), self._progress)
        worst = max(found.ranges.items(), key=lambda item: item[1].error)
        self._progress(f"largest relative error of a layer: {worst[1].error:.3f}, {worst[0]}")
        (folder / CALIBRATION).write_text(json.dumps(found.as_json(), indent=1) + "\n", "utf-8")

    def _graph(self, folder: Path) -> None:
        build, choices = self._build, self._choices
        self._progress(f"torch exports {choices.layers} layers in {choices.dtype}")
        made: onnx.ModelProto = export_draft(
            choices.loaded(choices.dtype), choices.scoring
        ).model_proto
        if build.precision == "fp8":
            text = (build.out / CALIBRATION).read_text(encoding="utf-8")
            names = insert_fp8(made, Calibration.of_json(json.loads(text)).ranges)
            self._progress(f"{len(names)} linear layers in FP8")
        if build.scorer == "plugin":
            expand_for_tensorrt(made, choices.sm[0] if choices.sm else 0)
        save_model(made, folder / GRAPH)

    def _engine(self, folder: Path) -> None:
        build, choices = self._build, self._choices
        assert build.runtime != "onnx"
        if build.scorer == "plugin":
            import plugins.importance.tensorrt_plugin  # noqa: F401  registers them

        made = build_engine(
            choices.bindings,
            build.runtime,
            build.out / GRAPH,
            choices.profiles(),
            sm=choices.sm if build.runtime == "tensorrt-rtx" else (),
            timing_cache=build.out / TIMING_CACHE if build.runtime == "tensorrt" else None,
            progress=self._progress,
        )
        (folder / ENGINE).write_bytes(made)

    def _probe(self, folder: Path) -> None:
        build, choices = self._build, self._choices
        self._progress("torch scores the probe")
        probe = probe_of(
            choices.loaded("float32"), choices.scoring, build.precision, choices.max_tokens
        )
        (folder / PROBE).write_text(probe.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def _manifest(self, files: dict[str, str], calibrated: str | None) -> DraftManifest:
        build, choices, config = self._build, self._choices, self._choices.config
        names = ["trtllm-specprefill", "torch", "transformers", "onnx"]
        versions = _versions(*names, *(["nvidia-modelopt"] if calibrated else []))
        if build.runtime != "onnx":
            versions[build.runtime] = choices.bindings.__version__
        cache = None
        if build.mode == "lookahead":
            heads = int(config.num_attention_heads)
            cache = CacheGeometry(
                layers=choices.layers,
                kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
                head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
                dtype="float32" if choices.dtype == "float32" else "bfloat16",
            )
        scoring = choices.scoring
        return DraftManifest(
            model=build.model,
            model_hash=choices.fingerprint,
            tokenizer_hash=tokenizer_hash(choices.tokenizer),
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
            max_tokens=choices.max_tokens,
            max_batch=choices.max_batch,
            sm=choices.sm,
            calibration=calibrated,
            kernels=_code(plugins.importance) if build.scorer == "plugin" else None,
            cache=cache,
            files=files,
            probe=Probe.model_validate_json((build.out / PROBE).read_text(encoding="utf-8")),
        )


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
