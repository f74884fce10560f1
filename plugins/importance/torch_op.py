"""The torch op `specprefill::importance_layer`: one layer's contribution to the importance.

    running = torch.ops.specprefill.importance_layer(
        queries, keys, lengths, heads, key_scale, running, scale, pool, causal)

`importance_layer` is the same with the optional inputs filled in. On CUDA the op launches the two
kernels of `plugins.importance.kernels`, whose docstring gives shapes and the treatment of
degenerate input; on a CPU it streams over keys in plain torch. Both hold one block of logits at
a time, and both agree with `trtllm_specprefill.importance.reference_importance` (speculative
prefill, arXiv 2502.02789): averaged over W, the last layer's output is the importance.
"""

from collections.abc import Sequence

import torch

from plugins.importance.launch import (
    LSE,
    MAX_QUERIES,
    MAX_TOKENS,
    POOL,
    Problem,
    default_splits,
    head_table,
)

_TYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "u8",
}
_KEY_BLOCK = 4096
_NEG_INF = float("-inf")


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


def check_shapes(
    queries: torch.Tensor,
    keys: torch.Tensor,
    lengths: torch.Tensor,
    heads: torch.Tensor,
    key_scale: torch.Tensor,
    running: torch.Tensor,
) -> None:
    """Raise `ValueError`, naming the tensor, unless shapes and dtypes fit together."""
    if queries.dim() != 4 or keys.dim() != 4:
        raise ValueError("queries and keys: must be [B, Hq, W, D] and [B, Hkv, N, D]")
    (b, _, w, d), (_, kv_heads, n, _) = queries.shape, keys.shape
    expected = (
        ("keys", keys, (b, kv_heads, n, d), None),
        ("lengths", lengths, (b,), torch.int32),
        ("heads", heads, (*heads.shape[:1], *heads.shape[1:]), torch.int32),
        ("key_scale", key_scale, (kv_heads,), torch.float32),
        ("running", running, (b, w, n), torch.float32),
    )
    for name, tensor, shape, dtype in expected:
        if tuple(tensor.shape) != shape or (dtype is not None and tensor.dtype != dtype):
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} must be {dtype or ''} {shape}"
            )
    if heads.dim() != 2 or heads.shape[1] < 2:
        raise ValueError(f"heads: {tuple(heads.shape)} must be [R, 1 + G]")
    if not 1 <= w <= MAX_QUERIES:
        raise ValueError(f"queries: W = {w} must lie in 1..{MAX_QUERIES}")
    if not 1 <= n <= MAX_TOKENS:
        raise ValueError(f"keys: N = {n} must lie in 1..{MAX_TOKENS}")


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


@torch.library.custom_op("specprefill::importance_layer", mutates_args=(), device_types="cpu")
def _importance_layer(
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
    check_shapes(queries, keys, lengths, heads, key_scale, running)
    problem_of(queries, keys, heads, scale, pool, causal)
    return plain_layer(queries, keys, lengths, heads, key_scale, running, scale, pool, causal)


@_importance_layer.register_kernel("cuda")
def _(
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
    check_shapes(queries, keys, lengths, heads, key_scale, running)
    problem = problem_of(queries, keys, heads, scale, pool, causal)
    b, w = queries.shape[0], queries.shape[2]
    parts = torch.empty(problem.parts_shape(b, w), dtype=torch.float32, device=queries.device)
    out = torch.empty_like(running, memory_format=torch.contiguous_format)
    with torch.cuda.device(queries.device):
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


@_importance_layer.register_fake
def _(
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
    return torch.empty_like(running, memory_format=torch.contiguous_format)


def importance_layer(
    queries: torch.Tensor,
    keys: torch.Tensor,
    running: torch.Tensor | None = None,
    *,
    scale: float,
    pool: int = 13,
    causal: bool = False,
    lengths: torch.Tensor | None = None,
    heads: Sequence[int] | None = None,
    key_scale: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """Maximum over layers so far of the pooled weights: float32 `[B, W, N]`.

    queries: `[B, Hq, W, D]`; keys: `[B, Hkv, N, D]`, both after RoPE; Hq a multiple of Hkv.
    running: what the layer before returned; zeros when None.
    scale: multiplies the logits. pool: pooling width in tokens, odd.
    causal: the queries are each sequence's own last W tokens; query j sees the keys up to
        lengths - W + j. lengths: valid keys per sequence, int `[B]`; N when None.
    heads: query heads that score, all when None. key_scale: what stored keys are multiplied by
        (fp8), a number or `[Hkv]`.
    Raises `ValueError` for shapes, dtypes or widths that are not supported.
    """
    b, w, n = queries.shape[0], queries.shape[2], keys.shape[2]
    device = queries.device
    if running is None:
        running = torch.zeros(b, w, n, dtype=torch.float32, device=device)
    if lengths is None:
        lengths = torch.full((b,), n, dtype=torch.int32, device=device)
    table = torch.tensor(
        head_table(queries.shape[1], keys.shape[1], heads), dtype=torch.int32, device=device
    )
    factors = torch.as_tensor(key_scale, dtype=torch.float32, device=device).expand(keys.shape[1])
    result: torch.Tensor = torch.ops.specprefill.importance_layer(
        queries,
        keys,
        lengths.to(device, torch.int32),
        table,
        factors,
        running,
        scale,
        pool,
        causal,
    )
    return result


def plain_layer(
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
    """The op in plain torch, on any device, one sequence after the other."""
    out = torch.zeros_like(running)
    for i, length in enumerate(lengths.tolist()):
        if length:
            best = _pooled_maximum(
                queries[i], keys[i, :, :length], heads, key_scale, scale, pool, causal
            )
            out[i, :, :length] = torch.maximum(running[i, :, :length], best)
    return out


def _pooled_maximum(
    queries: torch.Tensor,
    keys: torch.Tensor,
    heads: torch.Tensor,
    key_scale: torch.Tensor,
    scale: float,
    pool: int,
    causal: bool,
) -> torch.Tensor:
    """Plain torch form for one sequence: `[W, n]`, the maximum over heads of the pooled weights.

    queries: `[Hq, W, D]`; keys: `[Hkv, n, D]`, valid ones only.
    """
    (_, w, d), n, half = queries.shape, keys.shape[1], pool // 2
    rows, group = heads.shape[0], heads.shape[1] - 1
    index = heads.long()
    kv = index[:, 0]
    scores = (index[:, 1:] >= 0)[:, :, None].expand(rows, group, w).reshape(rows, group * w, 1)
    # fp32 once for the queries and block by block for the keys.
    q = queries.float()[index[:, 1:].clamp(min=0)].reshape(rows, group * w, d)
    factor = (key_scale[kv] * scale)[:, None, None]
    last_seen = n - w + torch.arange(w, device=keys.device)
    last_seen = last_seen.repeat(group)[None, :, None] if causal else torch.full_like(kv, n)[0]

    def logits(start: int, stop: int) -> torch.Tensor:
        block = keys[kv, start:stop].float()
        x = torch.bmm(q, block.transpose(1, 2)) * factor
        x = torch.where(x.abs() < float("inf"), x, float("nan"))
        seen = torch.arange(start, stop, device=keys.device) <= last_seen
        return torch.where(seen & scores, x, _NEG_INF)

    blocks = [(start, min(start + _KEY_BLOCK, n)) for start in range(0, n, _KEY_BLOCK)]
    lse = torch.stack([torch.logsumexp(logits(*block), -1) for block in blocks]).logsumexp(0)
    degenerate = lse.isnan().reshape(rows, group, w).any(1).any(0)
    lse = torch.where(lse == _NEG_INF, 0.0, lse)[..., None]
    best = torch.empty(w, n, dtype=torch.float32, device=keys.device)
    for start, stop in blocks:
        left, right = max(start - half, 0), min(stop + half, n)
        weights = torch.exp(logits(left, right) - lse)
        # The halo that lies outside the sequence is zero: pad what the clamping cut off.
        weights = torch.nn.functional.pad(weights, (left - (start - half), stop + half - right))
        pooled = torch.nn.functional.avg_pool1d(weights, pool, stride=1)
        best[:, start:stop] = pooled.reshape(rows * group, w, stop - start).amax(0)
    best[degenerate] = float("nan")
    return best
