"""TensorRT's Python API, as far as a draft's engine is built and run with it.

sources: NVIDIA/TensorRT, the bindings of 10.14 and 11.1, which agree in all of this
    python/src/infer/pyCore.cpp, python/src/infer/pyGraph.cpp, python/src/parsers/pyOnnx.cpp
    @ 3b4ddc1d45f11167f2ea53dc6046bba8df800e2d (release/10.14)
    @ 905361629f22836090d75ea77cba732a25107148 (release/11.1)
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from tests.contracts import onnx_engine as behind

__version__ = "10.14.1.48"


class ILogger:
    class Severity(enum.IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4

    INTERNAL_ERROR = Severity.INTERNAL_ERROR
    ERROR = Severity.ERROR
    WARNING = Severity.WARNING
    INFO = Severity.INFO
    VERBOSE = Severity.VERBOSE

    def __init__(self) -> None: ...

    def log(self, severity: ILogger.Severity, msg: str) -> None: ...


class IProgressMonitor:
    def __init__(self) -> None: ...

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None: ...

    def step_complete(self, phase_name: str, step: int) -> bool:
        raise NotImplementedError

    def phase_finish(self, phase_name: str) -> None: ...


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT32 = 3
    INT64 = 8
    BF16 = 7
    FP8 = 6


class LayerType(enum.Enum):
    CONSTANT = 0
    ATTENTION_INPUT = 1
    ATTENTION_OUTPUT = 2


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 1


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class IAttention:
    decomposable: bool = False


class ILayer:
    type: LayerType


class IAttentionInputLayer(ILayer):
    attention: IAttention


class ITensor:
    name: str
    dtype: DataType
    shape: tuple[int, ...]

    def get_dimension_name(self, index: int) -> str:
        return behind.dimension_name(self, index)


class INetworkDefinition:
    @property
    def num_inputs(self) -> int:
        return len(behind.inputs(self))

    @property
    def num_layers(self) -> int:
        return len(behind.layers(self))

    def get_input(self, index: int) -> ITensor:
        return behind.inputs(self)[index]

    def get_layer(self, index: int) -> ILayer:
        return behind.layers(self)[index]


class ParserError:
    def node(self) -> int:
        return behind.error(self).index

    def node_name(self) -> str:
        return behind.error(self).name

    def node_operator(self) -> str:
        return behind.error(self).operator

    def desc(self) -> str:
        return behind.error(self).words

    def local_function_stack(self) -> list[str]:
        return []


class OnnxParser:
    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        behind.new_parser(self, network, logger)

    @property
    def num_errors(self) -> int:
        return len(behind.errors(self))

    def get_error(self, index: int) -> ParserError:
        return behind.errors(self)[index]

    def parse_from_file(self, model: str) -> bool:
        return behind.parse(self, model)


class IOptimizationProfile:
    def set_shape(
        self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]
    ) -> None:
        behind.set_shape(self, input, min, opt, max)


class ITimingCache:
    def serialize(self) -> bytes:
        return behind.cache_bytes(self)


class IBuilderConfig:
    progress_monitor: IProgressMonitor

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        return behind.add_profile(self, profile)

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache:
        return behind.new_cache(serialized_timing_cache)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        return behind.set_cache(self, cache, ignore_mismatch)


class Builder:
    def __init__(self, logger: ILogger) -> None:
        behind.new_builder(self, logger)

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return behind.new_network(flags)

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(
        self, network: INetworkDefinition, config: IBuilderConfig
    ) -> bytes | None:
        return behind.build(self, network, config)


class IExecutionContext:
    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        return behind.context(self).set_input_shape(name, shape)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        return behind.context(self).set_tensor_address(name, memory)

    def set_device_memory(self, memory: int, size: int) -> None:
        behind.context(self).set_device_memory(memory, size)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        return behind.context(self).set_profile(profile_index, stream_handle)

    def infer_shapes(self) -> list[str]:
        return behind.context(self).infer_shapes()

    def execute_async_v3(self, stream_handle: int) -> bool:
        return behind.context(self).execute(stream_handle)


class ICudaEngine:
    @property
    def num_io_tensors(self) -> int:
        return len(behind.engine(self).names)

    @property
    def num_optimization_profiles(self) -> int:
        return len(behind.engine(self).profiles)

    def get_tensor_name(self, index: int) -> str:
        return behind.engine(self).names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return behind.engine(self).mode(name)

    def get_tensor_dtype(self, name: str) -> DataType:
        return behind.engine(self).dtype(name)

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return behind.engine(self).workspace(profile_index)

    def create_execution_context(
        self,
        strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC,
    ) -> IExecutionContext | None:
        return behind.new_context(self, strategy)


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        behind.new_runtime(self, logger)

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        return behind.deserialize(self, serialized_engine)
