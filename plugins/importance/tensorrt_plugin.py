"""The kernels as two quickly deployable TensorRT plugins with ahead-of-time implementations.

    specprefill::importance_lse    lse_kernel:  queries, keys, lengths, heads, key_scale -> parts
    specprefill::importance_pool   pool_kernel: the same, parts, running -> running

A compiled plugin is one kernel, so one layer of the draft takes two; `add_importance_layer` adds
both to a network and has the inputs of the torch op `specprefill::importance_layer`. TensorRT
embeds their PTX in the engine, which then needs neither Python nor a plugin library to run.
Tensors and degenerate input are described in `plugins.importance.kernels`. B, W and N may be
dynamic; heads and head size must be static, since the kernels are compiled for them.

Attributes: `scale` multiplies the logits, `pool` is the pooling width, `causal` is 1 when the
queries are the sequence's own last W tokens, `splits` is the last dimension of `parts`, and
`sm` is the compute capability to compile for (90 for Hopper), 0 for the GPU that builds.

Works with TensorRT 10.14 and later. Importing this module registers the plugins; it needs
`tensorrt` and `triton`. TensorRT reads the annotations below, so they must stay objects, not text.
"""

# TensorRT ships no types for its decorators.
# mypy: disallow-untyped-decorators=False

import functools
from typing import Any

import numpy.typing  # noqa: F401  TensorRT 11 uses it unimported, which numpy 1 does not forgive
import tensorrt as trt
import tensorrt.plugin as trtp

from plugins.importance import aot
from plugins.importance.launch import FP8, LSE, POOL, Kernel, Problem, default_splits

_TYPE_NAMES = {trt.DataType.HALF: "fp16", trt.DataType.BF16: "bf16", trt.DataType.FP8: FP8}
# One column for each combination: e4m3 keys go with queries of either 16-bit type.
_QUERIES = "FP16|BF16|FP16|BF16"
_KEYS = "FP16|BF16|FP8|FP8"


@trtp.register("specprefill::importance_lse")
def lse_description(
    queries: trtp.TensorDesc,
    keys: trtp.TensorDesc,
    lengths: trtp.TensorDesc,
    heads: trtp.TensorDesc,
    key_scale: trtp.TensorDesc,
    scale: float,
    causal: int,
    splits: int,
    sm: int,
) -> trtp.TensorDesc:
    """Shape of `parts`: fp32 `[B, R, G, W, splits]`."""
    b, _, w, _ = queries.shape_expr
    rows, row_width = heads.shape_expr
    return trtp.from_shape_expr((b, rows, row_width - 1, w, splits), dtype=trt.float32)


@trtp.autotune("specprefill::importance_lse")
def lse_types(
    queries: trtp.TensorDesc,
    keys: trtp.TensorDesc,
    lengths: trtp.TensorDesc,
    heads: trtp.TensorDesc,
    key_scale: trtp.TensorDesc,
    outputs: tuple[trtp.TensorDesc],
) -> list[trtp.AutoTuneCombination]:
    """Dtypes of inputs and output, all linear."""
    return [trtp.AutoTuneCombination(f"{_QUERIES}, {_KEYS}, INT32, INT32, FP32, FP32", "LINEAR")]


@trtp.aot_impl("specprefill::importance_lse")
def lse_kernel(
    queries: trtp.TensorDesc,
    keys: trtp.TensorDesc,
    lengths: trtp.TensorDesc,
    heads: trtp.TensorDesc,
    key_scale: trtp.TensorDesc,
    scale: float,
    causal: int,
    splits: int,
    sm: int,
    outputs: tuple[trtp.TensorDesc],
    tactic: int,
) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
    """The compiled first kernel, its grid, and its scalars N and W."""
    problem = _problem(queries, keys, heads, scale, 1, causal, splits)
    return _launch(problem, LSE, sm, queries, keys)


@trtp.register("specprefill::importance_pool")
def pool_description(
    queries: trtp.TensorDesc,
    keys: trtp.TensorDesc,
    lengths: trtp.TensorDesc,
    heads: trtp.TensorDesc,
    key_scale: trtp.TensorDesc,
    parts: trtp.TensorDesc,
    running: trtp.TensorDesc,
    scale: float,
    pool: int,
    causal: int,
    splits: int,
    sm: int,
) -> trtp.TensorDesc:
    """Shape of the new maximum: that of `running`, fp32 `[B, W, N]`."""
    return running.like()


@trtp.autotune("specprefill::importance_pool")
def pool_types(
    queries: trtp.TensorDesc,
    keys: trtp.TensorDesc,
    lengths: trtp.TensorDesc,
    heads: trtp.TensorDesc,
    key_scale: trtp.TensorDesc,
    parts: trtp.TensorDesc,
    running: trtp.TensorDesc,
    outputs: tuple[trtp.TensorDesc],
) -> list[trtp.AutoTuneCombination]:
    """Dtypes of inputs and output, all linear."""
    types = f"{_QUERIES}, {_KEYS}, INT32, INT32, FP32, FP32, FP32, FP32"
    return [trtp.AutoTuneCombination(types, "LINEAR")]


@trtp.aot_impl("specprefill::importance_pool")
def pool_kernel(
    queries: trtp.TensorDesc,
    keys: trtp.TensorDesc,
    lengths: trtp.TensorDesc,
    heads: trtp.TensorDesc,
    key_scale: trtp.TensorDesc,
    parts: trtp.TensorDesc,
    running: trtp.TensorDesc,
    scale: float,
    pool: int,
    causal: int,
    splits: int,
    sm: int,
    outputs: tuple[trtp.TensorDesc],
    tactic: int,
) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
    """The compiled second kernel, its grid, and its scalars N and W."""
    problem = _problem(queries, keys, heads, scale, pool, causal, splits)
    return _launch(problem, POOL, sm, queries, keys)


def add_importance_layer(
    network: trt.INetworkDefinition,
    queries: trt.ITensor,
    keys: trt.ITensor,
    lengths: trt.ITensor,
    heads: trt.ITensor,
    key_scale: trt.ITensor,
    running: trt.ITensor,
    *,
    scale: float,
    pool: int,
    causal: bool,
    splits: int | None = None,
    sm: int = 0,
) -> trt.ITensor:
    """Add both plugins for one layer of the draft; returns the new maximum, fp32 `[B, W, N]`.

    The inputs are those of the torch op `specprefill::importance_layer`. splits: see
    `default_splits`, which None takes. sm: the compute capability to compile for, 0 for this GPU.
    """
    inputs = (queries, keys, lengths, heads, key_scale)
    attributes: dict[str, Any] = {"splits": splits or default_splits(heads.shape[0]), "sm": sm}
    plugins = trtp.op.specprefill
    lse = plugins.importance_lse(*inputs, scale=scale, causal=int(causal), **attributes)
    parts = network.add_plugin(lse, aot=True).get_output(0)
    pooled = plugins.importance_pool(
        *inputs, parts, running, scale=scale, pool=pool, causal=int(causal), **attributes
    )
    return network.add_plugin(pooled, aot=True).get_output(0)


def _problem(
    queries: trtp.TensorDesc,
    keys: trtp.TensorDesc,
    heads: trtp.TensorDesc,
    scale: float,
    pool: int,
    causal: int,
    splits: int,
) -> Problem:
    """The compile-time side of the tensors. Raises `ValueError` for a dynamic head dimension."""
    sizes = {
        "Hq": queries.shape[1],
        "Hkv": keys.shape[1],
        "D": queries.shape[3],
        "R": heads.shape[0],
        "1 + G": heads.shape[1],
    }
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} is dynamic; the kernels are compiled for a fixed {name}")
    most = queries.shape[2] if queries.shape[2] >= 0 else queries.shape.max[2]
    return Problem(
        query_heads=sizes["Hq"],
        kv_heads=sizes["Hkv"],
        rows=sizes["R"],
        group=sizes["1 + G"] - 1,
        dim=sizes["D"],
        query_type=_TYPE_NAMES[queries.dtype],
        key_type=_TYPE_NAMES[keys.dtype],
        scale=scale,
        pool=pool,
        causal=bool(causal),
        max_queries=most,
        splits=splits,
    )


def _launch(
    problem: Problem, kernel: Kernel, sm: int, queries: trtp.TensorDesc, keys: trtp.TensorDesc
) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
    """What TensorRT needs to launch the kernel, with symbols for B, W and N."""
    compiled = _compile(problem, kernel, sm or _building_gpu())
    b, w = queries.shape_expr[0], queries.shape_expr[2]
    n = keys.shape_expr[2]
    launch = trtp.KernelLaunchParams()
    launch.grid_x, launch.grid_y, launch.grid_z = problem.grid(kernel, b, w, n, trtp.cdiv)
    launch.block_x = compiled.threads
    launch.shared_mem = compiled.shared_memory
    scalars = trtp.SymIntExprs(2)
    scalars[0], scalars[1] = trtp.SymInt32(n), trtp.SymInt32(w)
    return compiled.name, compiled.ptx, launch, scalars


# TensorRT asks again for each layer and each combination of types it times.
_compile = functools.cache(aot.compile_kernel)


def _building_gpu() -> int:
    """Compute capability of the GPU that builds the engine, as `10 * major + minor`."""
    from triton.runtime import driver

    return int(driver.active.get_current_target().arch)
