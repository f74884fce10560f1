"""The kernels under torch: the CUDA form of the op `specprefill::importance_layer`.

The op itself, its plain form and its fake form are the library's
(`trtllm_specprefill.importance_op`). Here the two kernels of `plugins.importance.kernels` are
launched on torch tensors. What they do not take (a head size that is none of theirs, a pooling too
wide for their tiles, float64) the plain form does instead, and a log line says so once.
"""

import functools
import importlib.util
import logging

import torch

from plugins.importance.launch import LSE, POOL, Problem, default_splits
from trtllm_specprefill.importance_op import check_inputs, plain_layer

_TYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "u8",
}
_log = logging.getLogger(__name__)


def problem_of(
    queries: torch.Tensor,
    keys: torch.Tensor,
    heads: torch.Tensor,
    scale: float,
    pool: int,
    causal: bool,
) -> Problem:
    """The compile-time side of these tensors. Raises `ValueError` for an unsupported dtype."""
    for name, tensor in (("queries", queries), ("keys", keys)):
        if tensor.dtype not in _TYPE_NAMES:
            raise ValueError(f"{name}: dtype {tensor.dtype} must be one of {list(_TYPE_NAMES)}")
    return Problem(
        query_heads=queries.shape[1],
        kv_heads=keys.shape[1],
        rows=heads.shape[0],
        group=heads.shape[1] - 1,
        dim=queries.shape[3],
        query_type=_TYPE_NAMES[queries.dtype],
        key_type=_TYPE_NAMES[keys.dtype],
        scale=scale,
        pool=pool,
        causal=causal,
        max_queries=queries.shape[2],
        splits=default_splits(heads.shape[0]),
    )


def launch(
    problem: Problem,
    queries: torch.Tensor,
    keys: torch.Tensor,
    lengths: torch.Tensor,
    heads: torch.Tensor,
    key_scale: torch.Tensor,
    running: torch.Tensor,
    parts: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Run both kernels on contiguous tensors; every element of `parts` and `out` is written."""
    from plugins.importance import kernels

    b, _, w, _ = queries.shape
    n = keys.shape[2]
    if keys.dtype == torch.float8_e4m3fn:
        keys = keys.view(torch.uint8)
    inputs = (queries, keys, lengths, heads, key_scale)
    kernels.lse_kernel[problem.grid(LSE, b, w, n)](
        *inputs, n, w, parts, **problem.constants(LSE), **problem.options(LSE)
    )
    kernels.pool_kernel[problem.grid(POOL, b, w, n)](
        *inputs, parts, running, n, w, out, **problem.constants(POOL), **problem.options(POOL)
    )


def kernel_layer(
    queries: torch.Tensor,
    keys: torch.Tensor,
    lengths: torch.Tensor,
    heads: torch.Tensor,
    key_scale: torch.Tensor,
    running: torch.Tensor,
    scale: float,
    pool: int,
    causal: bool,
) -> torch.Tensor:
    """The op by the kernels, or in plain torch where they do not take the problem."""
    check_inputs(queries, keys, lengths, heads, key_scale, running, pool)
    try:
        problem = problem_of(queries, keys, heads, scale, pool, causal)
    except ValueError as error:
        _say_once(str(error))
        return plain_layer(queries, keys, lengths, heads, key_scale, running, scale, pool, causal)
    b, w = queries.shape[0], queries.shape[2]
    parts = torch.empty(problem.parts_shape(b, w), dtype=torch.float32, device=queries.device)
    out = torch.empty_like(running, memory_format=torch.contiguous_format)
    with torch.cuda.device(queries.get_device()):  # -1, which does nothing, in the interpreter
        launch(
            problem,
            queries.contiguous(),
            keys.contiguous(),
            lengths.contiguous(),
            heads.contiguous(),
            key_scale.contiguous(),
            running.contiguous(),
            parts,
            out,
        )
    return out


@functools.cache
def _say_once(reason: str) -> None:
    _log.warning("importance in plain torch, without the kernels: %s", reason)


def register() -> None:
    """Make `kernel_layer` the op's CUDA form, if triton is there to compile the kernels."""
    if importlib.util.find_spec("triton") is not None:
        torch.library.register_kernel("specprefill::importance_layer", "cuda", kernel_layer)
