"""A stand-in for TensorRT's native module, under the real Python layer of `tensorrt.plugin`.

The wheel `tensorrt-cu13-bindings` holds NVIDIA's Python sources and a native module that needs
libnvinfer. `install` loads those sources as the package `tensorrt` with this module in the native
one's place. Names, argument orders and types are those that the sources use; what TensorRT would
do with a plugin between `add_plugin` and a launch is done here by `Network`, in the same order,
with symbolic dimensions that are evaluated for concrete shapes afterwards.
"""

import enum
import importlib.util
import sys
import types
from pathlib import Path

import numpy as np


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9
    FP4 = 10


float32, float16, int8, int32 = DataType.FLOAT, DataType.HALF, DataType.INT8, DataType.INT32
uint8, fp8, bfloat16, int64 = DataType.UINT8, DataType.FP8, DataType.BF16, DataType.INT64
int4, fp4 = DataType.INT4, DataType.FP4

TensorFormat = enum.Enum("TensorFormat", "LINEAR CHW2 HWC8 CHW4 CHW16 CHW32 HWC")
PluginFieldType = enum.Enum(
    "PluginFieldType",
    "FLOAT16 FLOAT32 FLOAT64 INT8 INT16 INT32 CHAR DIMS UNKNOWN BF16 INT64 FP8 INT4 FP4",
)
TensorRTPhase = enum.Enum("TensorRTPhase", "BUILD RUNTIME")
QuickPluginCreationRequest = enum.Enum(
    "QuickPluginCreationRequest", "UNKNOWN PREFER_JIT PREFER_AOT STRICT_JIT STRICT_AOT"
)
DimensionOperation = enum.Enum(
    "DimensionOperation", "SUM PROD MAX MIN SUB EQUAL LESS FLOOR_DIV CEIL_DIV"
)
PluginArgType = enum.Enum("PluginArgType", "INT")
PluginArgDataType = enum.Enum("PluginArgDataType", "INT8 INT16 INT32")

_APPLY = {
    DimensionOperation.SUM: lambda a, b: a + b,
    DimensionOperation.PROD: lambda a, b: a * b,
    DimensionOperation.MAX: max,
    DimensionOperation.MIN: min,
    DimensionOperation.SUB: lambda a, b: a - b,
    DimensionOperation.EQUAL: lambda a, b: int(a == b),
    DimensionOperation.LESS: lambda a, b: int(a < b),
    DimensionOperation.FLOOR_DIV: lambda a, b: a // b,
    DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
}


class IDimensionExpr:
    """A number, the name of a dynamic dimension, or an operation on two expressions."""

    def __init__(self, value, *operands):
        self.value, self.operands = value, operands

    def evaluate(self, sizes):
        if self.operands:
            return _APPLY[self.value](*(operand.evaluate(sizes) for operand in self.operands))
        return sizes[self.value] if isinstance(self.value, str) else self.value

    def is_constant(self):
        if self.operands:
            return all(operand.is_constant() for operand in self.operands)
        return isinstance(self.value, int)

    def get_constant_value(self):
        assert self.is_constant()
        return self.evaluate({})


class IExprBuilder:
    def constant(self, value):
        if not isinstance(value, int):
            raise TypeError(f"constant(): {value!r} is not an int")
        return IDimensionExpr(value)

    def operation(self, op, first, second):
        for argument in (first, second):
            if not isinstance(argument, IDimensionExpr):
                raise TypeError(f"operation(): {argument!r} is not an IDimensionExpr")
        return IDimensionExpr(op, first, second)


class Dims(list):
    MAX_DIMS = 8

    def __init__(self, values=()):
        super().__init__([0] * values if isinstance(values, int) else values)


class DimsExprs(Dims):
    pass


class ISymExpr:
    def __init__(self):
        self.type = self.dtype = self.expr = None


def _check_scalar(value):
    if not isinstance(value, ISymExpr) or not isinstance(value.expr, IDimensionExpr):
        raise TypeError(f"{value!r} is not a symbolic scalar")
    if (value.type, value.dtype) != (PluginArgType.INT, PluginArgDataType.INT32):
        raise TypeError(f"{value!r} is not an int32")


class IKernelLaunchParams:
    NAMES = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_mem")

    def __setattr__(self, name, value):
        if name not in self.NAMES:
            raise AttributeError(name)
        _check_scalar(value)
        self.__dict__[name] = value


class ISymExprs:
    nbSymExprs = 0  # noqa: N815 (the native module's name)

    def __init__(self):
        self.expressions = {}

    def __setitem__(self, index, value):
        _check_scalar(value)
        assert 0 <= index < self.nbSymExprs
        self.expressions[index] = value


class PluginTensorDesc:
    def __init__(self, dims=(), type=None, format=TensorFormat.LINEAR):
        self.dims, self.type, self.format, self.scale = Dims(dims), type, format, -1.0


class DynamicPluginTensorDesc:
    def __init__(self, desc, low, best, high):
        self.desc, self.min, self.opt, self.max = desc, Dims(low), Dims(best), Dims(high)


class _Values(np.ndarray):
    """10.14 calls float() and int() on one-element arrays, which numpy refuses from 2.4 on."""

    def __float__(self):
        return float(self.item())

    def __int__(self):
        return int(self.item())


class PluginField:
    def __init__(self, name, data, type=PluginFieldType.UNKNOWN):
        self.name, self.type = name, type
        values = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.asarray(data)
        self.data = values.view(_Values)


class PluginFieldCollection(list):
    pass


class _Registry:
    def __init__(self):
        self.creators = {}

    def register_creator(self, creator, namespace):
        self.creators[creator.name, creator.plugin_version, namespace] = creator

    def get_creator(self, name, version, namespace):
        return self.creators[name, version, namespace]


_REGISTRY = _Registry()


def get_plugin_registry():
    return _REGISTRY


class ILogger:
    Severity = enum.Enum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE")


class Logger(ILogger):
    def log(self, severity, message):
        assert isinstance(severity, ILogger.Severity)


class ITensor:
    """A tensor of the network: dimensions are numbers or, where dynamic, names with bounds."""

    def __init__(self, name, dtype, dims, bounds):
        self.name, self.dtype, self.dims, self.bounds = name, dtype, dims, bounds

    @property
    def shape(self):
        return Dims(d.get_constant_value() if d.is_constant() else -1 for d in self.dims)

    def describe(self):
        sizes = [{name: bound[i] for name, bound in self.bounds.items()} for i in range(3)]
        return DynamicPluginTensorDesc(
            PluginTensorDesc(self.shape, self.dtype),
            *([d.evaluate(chosen) for d in self.dims] for chosen in sizes),
        )


class _Layer:
    def __init__(self, plugin, inputs, outputs):
        self.plugin, self.inputs, self.outputs = plugin, inputs, outputs
        self.combinations: list[tuple] = []
        self.params, self.scalars = IKernelLaunchParams(), ISymExprs()
        self.kernel = (None, None)

    def get_output(self, index):
        return self.outputs[index]


class INetworkDefinition:
    """A strongly typed network: calls a plugin as the builder does, in its order."""

    def __init__(self, bounds=None):
        self.bounds, self.layers = bounds or {}, []

    def add_input(self, name, dtype, shape):
        return ITensor(name, dtype, [IDimensionExpr(d) for d in shape], self.bounds)

    def add_plugin(self, func, aot):
        request = QuickPluginCreationRequest
        inputs, shape_inputs, plugin = func(request.STRICT_AOT if aot else request.STRICT_JIT)
        dtypes = plugin.get_output_data_types(
            [t.dtype for t in inputs], [len(t.dims) for t in inputs]
        )
        dims = plugin.get_output_shapes(
            [DimsExprs(t.dims) for t in inputs], shape_inputs, IExprBuilder()
        )
        outputs = [
            ITensor(f"out{i}", dtype, list(d), self.bounds)
            for i, (dtype, d) in enumerate(zip(dtypes, dims, strict=True))
        ]
        assert len(outputs) == plugin.get_num_outputs()
        self.layers.append(_Layer(plugin, inputs, outputs))
        return self.layers[-1]

    def build(self):
        """Take each layer through format selection, configuration, tactics and its kernel."""
        for layer in self.layers:
            tensors = layer.inputs + layer.outputs
            described = [t.describe() for t in tensors]
            count = len(layer.inputs)
            supported = layer.plugin.get_supported_format_combinations(described, count)
            assert len(supported) % len(tensors) == 0
            layer.combinations = [
                tuple((d.type, d.format) for d in supported[i : i + len(tensors)])
                for i in range(0, len(supported), len(tensors))
            ]
            wanted = tuple((t.dtype, TensorFormat.LINEAR) for t in tensors)
            if wanted not in layer.combinations:
                raise ValueError(f"no implementation for {wanted}")
            layer.plugin.configure_plugin(described[:count], described[count:])
            for tactic in layer.plugin.get_valid_tactics() or [0]:
                layer.plugin.set_tactic(tactic)
                layer.plugin.get_launch_params(
                    [DimsExprs(t.dims) for t in layer.inputs],
                    described,
                    count,
                    layer.params,
                    layer.scalars,
                    IExprBuilder(),
                )
                layer.kernel = layer.plugin.get_kernel(
                    [d.desc for d in described[:count]], [d.desc for d in described[count:]]
                )


def nptype(dtype):
    return {DataType.FLOAT: np.float32, DataType.HALF: np.float16, DataType.INT32: np.int32}[dtype]


# Interfaces that the Python layer inherits from or decorates, without methods of their own.
_INTERFACES = """IPluginV3 IPluginV3QuickCore IPluginV3QuickBuild IPluginV3QuickRuntime
    IPluginV3QuickAOTBuild IPluginCreatorV3Quick ICudaEngine IExecutionContext Runtime
    IHostMemory Builder OnnxParser IBuilderConfig"""
globals().update({name: type(name, (), {}) for name in _INTERFACES.split()})


def install(bindings: Path) -> types.ModuleType:
    """Load the unpacked wheel's `tensorrt_bindings` as `tensorrt`, over this module."""
    # `bool` is the name of a data type in the native module; here it would hide the builtin.
    native = types.ModuleType("tensorrt.tensorrt")
    names = {k: v for k, v in globals().items() if not k.startswith("_")}
    native.__dict__.update(names, bool=DataType.BOOL)
    spec = importlib.util.spec_from_file_location(
        "tensorrt", bindings / "__init__.py", submodule_search_locations=[str(bindings)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["tensorrt"], sys.modules["tensorrt.tensorrt"] = package, native
    spec.loader.exec_module(package)
    return package
