"""ONNX -> a serialised engine, with the builder of TensorRT or of TensorRT for RTX.

Both have one Python API. They differ in what surrounds it: TensorRT builds for the GPU it runs
on, keeps a timing cache, and takes plugins; TensorRT for RTX builds for the compute capabilities
it is told, with no GPU at hand, finishes on the user's GPU, and ends the process when it is given
a plugin, so a graph that holds one is refused before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from engine_build.commands import BuildFailed
from trtllm_specprefill.draft.bindings import EngineRuntime
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.fetch import Progress

Span = tuple[int, int, int]
"""Smallest, usual and largest size of a dimension."""

PLUGIN_MARK = "plugin_namespace"  # the attribute by which NVIDIA's parser knows a plugin's node


@dataclass(frozen=True)
class Profile:
    """Sizes that an engine is tuned for, by the name of a dynamic dimension in the graph."""

    name: str
    spans: dict[str, Span]


def build_engine(
    bindings: Any,
    runtime: EngineRuntime,
    graph: Path,
    profiles: Sequence[Profile],
    *,
    sm: Sequence[int],
    timing_cache: Path | None,
    progress: Progress,
) -> Any:
    """The serialised engine of the ONNX file `graph`, as something with the buffer protocol.

    sm: compute capabilities, 10 x major + minor, for TensorRT for RTX; TensorRT takes none.
    timing_cache: a file that TensorRT reads and writes anew; none for TensorRT for RTX.
    Raises `InputError` for a capability that the builder does not know and a plugin that it does
    not take, `BuildFailed` with the builder's own words when the graph cannot be built.
    """
    trt = bindings
    if runtime == "tensorrt-rtx":
        _refuse_plugins(graph)
    log = _logger(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    progress(f"{runtime} {trt.__version__} reads {graph.name}")
    if not parser.parse_from_file(str(graph)):
        raise BuildFailed(f"{graph.name}: {_parser_errors(parser, log)}")
    _let_attention_decompose(trt, network)
    config = builder.create_builder_config()
    monitor = _monitor(trt, progress)
    config.progress_monitor = monitor
    for profile in profiles:
        config.add_optimization_profile(_profile(builder, network, profile))
    if sm:
        _set_capabilities(trt, config, sm)
    cache = None
    if runtime == "tensorrt":
        cache = _timing_cache(config, timing_cache)
    made = builder.build_serialized_network(network, config)
    if monitor.interrupted:
        raise KeyboardInterrupt
    if made is None:
        raise BuildFailed(f"{runtime} built nothing from {graph.name}: {log.told()}")
    if cache is not None and timing_cache is not None:
        _write_whole(timing_cache, cache.serialize())
    return made


def _write_whole(path: Path, content: Any) -> None:
    """Replace a file, or where the disk is full leave what was there and nothing else."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _refuse_plugins(graph: Path) -> None:
    model = onnx.load(graph, load_external_data=False)
    for node in model.graph.node:
        if any(attribute.name == PLUGIN_MARK for attribute in node.attribute):
            allowed = "native: TensorRT for RTX takes no plugins"
            raise InputError("scorer", f"plugin (node {node.name!r})", allowed)


def _let_attention_decompose(trt: Any, network: Any) -> None:
    """Where no fused kernel fits (float32, wide heads), attention may be built of its parts."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # TensorRT's way to a layer's own kind
            layer.attention.decomposable = True


def _parser_errors(parser: Any, log: Any) -> str:
    """What the parser says, a node a line."""
    lines = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        where = f"node {error.node()} {error.node_name()!r} ({error.node_operator()})"
        if functions := error.local_function_stack():
            where += f" in {' > '.join(functions)}"
        lines.append(f"{where}: {error.desc()}")
    return "\n".join(lines) or log.told()


def _profile(builder: Any, network: Any, profile: Profile) -> Any:
    """An optimisation profile: every dynamic dimension of an input is one that it names."""
    made = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        spans = []
        for place, size in enumerate(tensor.shape):
            if size >= 0:
                spans.append((size, size, size))
                continue
            name = tensor.get_dimension_name(place)
            if name not in profile.spans:
                raise BuildFailed(f"profile {profile.name} has no sizes for {name!r}")
            spans.append(profile.spans[name])
        smallest, usual, largest = zip(*spans, strict=True)
        made.set_shape(tensor.name, smallest, usual, largest)
    return made


def _set_capabilities(trt: Any, config: Any, sm: Sequence[int]) -> None:
    config.num_compute_capabilities = len(sm)
    for index, number in enumerate(sm):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{number}"), index)


def check_capabilities(bindings: Any, runtime: EngineRuntime, sm: Sequence[int]) -> None:
    """Raise `InputError` for compute capabilities that the builder does not build for."""
    if runtime == "tensorrt":
        return  # they are the plugin's; the engine is for the GPU that builds it
    known = [name[2:] for name in bindings.ComputeCapability.__members__ if name.startswith("SM")]
    if unknown := [number for number in sm if str(number) not in known]:
        raise InputError("sm", unknown[0], "one of " + ", ".join(known))


def _timing_cache(config: Any, file: Path | None) -> Any:
    """The cache as the file has it; an empty one when there is none or it is another GPU's."""
    stored = file.read_bytes() if file is not None and file.is_file() else b""
    cache = config.create_timing_cache(stored)
    if not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def _logger(trt: Any) -> Any:
    """A logger that keeps what went wrong; the rest is the progress monitor's."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.errors.append(message.strip())

        def told(self) -> str:
            return "; ".join(self.errors[-3:]) or "it gave no reason"

    return Log()


def _monitor(trt: Any, progress: Progress) -> Any:
    """Tells of the builder's phases; an interrupt ends the build at its next step."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.interrupted = False
            self._open: dict[str, int] = {}  # the phases that run, and their steps

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            depth = len(self._open)
            self._open[phase_name] = num_steps
            if depth < 2:
                self._say(phase_name)

        def phase_finish(self, phase_name: str) -> None:
            self._open.pop(phase_name, None)

        def step_complete(self, phase_name: str, step: int) -> bool:
            steps = self._open.get(phase_name, 0)
            if steps >= 20 and step and step % (steps // 10) == 0:
                self._say(f"{phase_name}: {step} of {steps}")
            return not self.interrupted

        def _say(self, line: str) -> None:
            try:
                progress(line)
            except KeyboardInterrupt:  # an exception would go through the builder's own frames
                self.interrupted = True

    return Monitor()
