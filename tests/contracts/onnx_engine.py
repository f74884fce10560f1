"""What runs behind the recorded TensorRT: onnxruntime, reading and writing where it is told to.

It holds to what TensorRT asks of its callers: a strongly typed network, shapes inside the chosen
profile, an address for every tensor, a workspace that is large enough, inputs and outputs that do
not overlap; and it notes the GPU that each call finds current. What a test wants to know or to go
wrong, it finds and says in `seen`.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto

WORKSPACE = 4096
_DTYPES = {
    TensorProto.FLOAT: ("FLOAT", np.float32),
    TensorProto.INT64: ("INT64", np.int64),
    TensorProto.INT32: ("INT32", np.int32),
    TensorProto.BFLOAT16: ("BF16", ml_dtypes.bfloat16),
}


@dataclass
class Seen:
    """What was done; refuse_cache and fail_execution: what is to go wrong.

    devices: of every call of a runtime, an engine, a context (their ends included) or the memory,
    which it was and the number of the GPU that was current then.
    """

    addresses: list[dict[str, int]] = field(default_factory=list)
    shapes: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    profiles: list[int] = field(default_factory=list)
    caches: list[bytes] = field(default_factory=list)
    decomposable: list[bool] = field(default_factory=list)
    devices: list[tuple[str, int]] = field(default_factory=list)
    refuse_cache: bool = False
    fail_execution: bool = False
    stopped: bool = False


class _Current(threading.local):
    """Number of the GPU that is current, which each thread has its own of."""

    device = 0


seen = Seen()
current = _Current()
_state: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def trt() -> Any:
    """The recorded package that is installed."""
    return sys.modules["tensorrt"]


# --- building


@dataclass
class _Error:
    index: int
    name: str
    operator: str
    words: str


@dataclass
class _Network:
    model: onnx.ModelProto | None = None
    inputs: list[Any] = field(default_factory=list)
    layers: list[Any] = field(default_factory=list)


@dataclass
class _Config:
    profiles: list[dict[str, list[list[int]]]] = field(default_factory=list)


def new_builder(builder: Any, logger: Any) -> None:
    assert isinstance(logger, trt().ILogger)
    _state[builder] = logger


def new_network(flags: int) -> Any:
    assert flags == 1 << trt().NetworkDefinitionCreationFlag.STRONGLY_TYPED
    network = trt().INetworkDefinition()
    _state[network] = _Network()
    return network


def new_parser(parser: Any, network: Any, logger: Any) -> None:
    assert isinstance(logger, trt().ILogger)
    _state[parser] = (network, [])


def errors(parser: Any) -> list[Any]:
    return _state[parser][1]


def error(one: Any) -> _Error:
    return _state[one]


def parse(parser: Any, path: str) -> bool:
    network, found = _state[parser]
    model = onnx.load(path)
    functions = {(f.domain, f.name) for f in model.functions}
    for index, node in enumerate(model.graph.node):
        plugin = any(a.name == "plugin_namespace" for a in node.attribute)
        if node.domain and not plugin and (node.domain, node.op_type) not in functions:
            one = trt().ParserError()
            _state[one] = _Error(index, node.name, node.op_type, "no importer for this operator")
            found.append(one)
    held = _state[network]
    held.model = model
    for value in model.graph.input:
        tensor = trt().ITensor()
        kind = value.type.tensor_type
        dims = [d.dim_param or d.dim_value for d in kind.shape.dim]
        tensor.name = value.name
        tensor.dtype = trt().DataType[_DTYPES[kind.elem_type][0]]
        tensor.shape = tuple(-1 if isinstance(d, str) else d for d in dims)
        _state[tensor] = dims
        held.inputs.append(tensor)
    for node in model.graph.node:
        layer = trt().ILayer()
        layer.type = trt().LayerType.CONSTANT
        if node.op_type == "Attention":
            layer.type = trt().LayerType.ATTENTION_INPUT
            layer.attention = trt().IAttention()
        held.layers.append(layer)
    return not found


def dimension_name(tensor: Any, index: int) -> str:
    return str(_state[tensor][index])


def inputs(network: Any) -> list[Any]:
    return _state[network].inputs


def layers(network: Any) -> list[Any]:
    return _state[network].layers


def set_shape(profile: Any, name: str, *sizes: Sequence[int]) -> None:
    for low, best, high in zip(*sizes, strict=True):
        if not low <= best <= high:
            raise ValueError(f"{name}: {low}, {best}, {high}")
    _state.setdefault(profile, {})[name] = [list(size) for size in sizes]


def add_profile(config: Any, profile: Any) -> int:
    held = _state.setdefault(config, _Config())
    held.profiles.append(_state[profile])
    return len(held.profiles) - 1


def new_cache(serialized: bytes) -> Any:
    cache = trt().ITimingCache()
    _state[cache] = bytes(serialized)
    seen.caches.append(bytes(serialized))
    return cache


def set_cache(config: Any, cache: Any, ignore_mismatch: bool) -> bool:
    return ignore_mismatch or not (seen.refuse_cache and _state[cache])


def cache_bytes(cache: Any) -> bytes:
    return _state[cache] + b"timed"


def build(builder: Any, network: Any, config: Any) -> bytes | None:
    held, profiles = _state[network], _state[config].profiles
    names = {tensor.name for tensor in held.inputs}
    if not profiles or any(set(profile) != names for profile in profiles):
        _state[builder].log(trt().ILogger.ERROR, "a profile does not name every input")
        return None
    monitor = config.progress_monitor
    monitor.phase_start("Building engine", None, 40)
    for step in range(40):
        if not monitor.step_complete("Building engine", step):
            seen.stopped = True
            return None
    monitor.phase_finish("Building engine")
    attention = [x for x in held.layers if x.type == trt().LayerType.ATTENTION_INPUT]
    seen.decomposable = [layer.attention.decomposable for layer in attention]
    head = json.dumps({"version": trt().__version__, "profiles": profiles}).encode()
    return len(head).to_bytes(8, "little") + head + held.model.SerializeToString()


# --- running


def note(call: str, here: Seen | None = None) -> None:
    """Note the GPU that a call finds. here: in the notes of another test than the running one."""
    (here or seen).devices.append((call, current.device))


def _noted(what: str, made: Any) -> Any:
    """`made`, whose beginning is noted, and whose end will be."""
    note(f"new {what}")
    weakref.finalize(made, note, f"end of {what}", seen)
    return made


class _Engine:
    def __init__(self, head: dict[str, Any], model: bytes) -> None:
        self.profiles: list[dict[str, list[list[int]]]] = head["profiles"]
        self.model = onnx.load_from_string(model)
        values = [*self.model.graph.input, *self.model.graph.output]
        self.names = [value.name for value in values]
        self._given = {value.name for value in self.model.graph.input}
        self.kinds = {v.name: _DTYPES[v.type.tensor_type.elem_type] for v in values}
        self.bytes = model

    def mode(self, name: str) -> Any:
        return trt().TensorIOMode.INPUT if name in self._given else trt().TensorIOMode.OUTPUT

    def dtype(self, name: str) -> Any:
        return trt().DataType[self.kinds[name][0]]

    def workspace(self, profile: int) -> int:
        return WORKSPACE * (1 + profile)


def new_runtime(runtime: Any, logger: Any) -> None:
    assert isinstance(logger, trt().ILogger)
    _state[_noted("runtime", runtime)] = logger


def deserialize(runtime: Any, serialized: Any) -> Any:
    data = bytes(serialized)
    size = int.from_bytes(data[:8], "little")
    logger = _state[runtime]
    try:
        head = json.loads(data[8 : 8 + size])
    except ValueError:
        logger.log(trt().ILogger.ERROR, "the stream is not an engine")
        return None
    if head["version"] != trt().__version__:
        logger.log(trt().ILogger.ERROR, f"an engine of version {head['version']}")
        return None
    made = _noted("engine", trt().ICudaEngine())
    _state[made] = _Engine(head, data[8 + size :])
    _state[_state[made]] = logger
    return made


def engine(one: Any) -> _Engine:
    note("engine")
    return _state[one]


class _Context:
    def __init__(self, owner: _Engine, logger: Any, managed: bool) -> None:
        self._owner, self._logger = owner, logger
        self._session = onnxruntime.InferenceSession(owner.bytes)
        self._memory = 0 if managed else sys.maxsize
        self._profile = -1
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 16 == 0
        self._memory = size

    def set_profile(self, index: int, stream: int) -> bool:
        self._profile = index
        return 0 <= index < len(self._owner.profiles)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        low, _, high = self._owner.profiles[self._profile][name]
        sizes = zip(low, shape, high, strict=True)
        if not all(least <= size <= most for least, size, most in sizes):
            self._logger.log(trt().ILogger.ERROR, f"{name} {tuple(shape)} is outside the profile")
            return False
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return name in self._owner.names

    def infer_shapes(self) -> list[str]:
        return [v.name for v in self._owner.model.graph.input if v.name not in self._shapes]

    def execute(self, stream: int) -> bool:
        if seen.fail_execution or self._memory < self._owner.workspace(self._profile):
            self._logger.log(trt().ILogger.ERROR, "the device ran out of memory")
            return False
        assert set(self._addresses) == set(self._owner.names)
        assert len(set(self._addresses.values())) == len(self._addresses)
        seen.addresses.append(dict(self._addresses))
        seen.shapes.append(dict(self._shapes))
        seen.profiles.append(self._profile)
        feeds = {name: self._view(name, shape).copy() for name, shape in self._shapes.items()}
        outputs = [value.name for value in self._owner.model.graph.output]
        for name, found in zip(outputs, self._session.run(outputs, feeds), strict=True):
            self._view(name, found.shape)[...] = found
        return True

    def _view(self, name: str, shape: tuple[int, ...]) -> Any:
        kind = np.dtype(self._owner.kinds[name][1])
        size = int(np.prod(shape)) * kind.itemsize
        raw = (ctypes.c_char * size).from_address(self._addresses[name])
        return np.frombuffer(raw, dtype=kind).reshape(shape)


def new_context(owner: Any, strategy: Any) -> Any:
    managed = strategy == trt().ExecutionContextAllocationStrategy.USER_MANAGED
    held = engine(owner)
    made = _noted("context", trt().IExecutionContext())
    _state[made] = _Context(held, _state[held], managed)
    return made


def context(one: Any) -> _Context:
    note("context")
    return _state[one]
