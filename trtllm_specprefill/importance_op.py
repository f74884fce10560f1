"""The torch op `specprefill::importance_layer`: one layer's contribution to the importance.

    running = torch.ops.specprefill.importance_layer(
        queries, keys, lengths, heads, key_scale, running, scale, pool, causal)

`importance_layer` is the same with the optional inputs filled in. This is the one place where
queries and keys become scores: the torch draft calls it, an ONNX export holds it as one node, and
a TensorRT engine runs the same kernels. The form here is plain torch, streams over keys, and runs
on any device and for any head size; importing `plugins.importance` puts the kernels in its place
on CUDA. Averaged over W, the last layer's output is the importance that
`trtllm_specprefill.importance` defines (speculative prefill, arXiv 2502.02789, section 3.2).

**Tensors**

    queries   [B, Hq, W, D]      after RoPE
    keys      [B, Hkv, N, D]     the queries' dtype, or fp8 e4m3
    lengths   [B]                int32, valid keys of each sequence; the rest is never used
    heads     [R, 1 + G]         int32, see `head_table`
    key_scale [Hkv]              float32, what each key head's stored values are multiplied by
    running   [B, W, N]          float32, >= 0, the maximum over the layers before

**Degenerate input.** A query's row in the output is NaN at each of the sequence's valid positions
if any logit of one of its scoring heads, at a key that it sees, is NaN or infinite, and wherever
`running` is NaN. No other row or sequence is affected. A row that sees no key leaves `running` as
it is. Positions past the valid length are 0.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence

import torch

from trtllm_specprefill.errors import InputError

MAX_QUERIES = 64
MAX_TOKENS = 1_048_576
MAX_GROUP = 16
_QUERY_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NEG_INF = float("-inf")
_log = logging.getLogger(__name__)


def check_pool_width(pool: int) -> None:
    """Raise `InputError` unless the pooling width is odd and positive (an even one shifts)."""
    if pool < 1 or pool % 2 == 0:
        raise InputError("pool", pool, "an odd number >= 1")


def head_table(
    query_heads: int, kv_heads: int, scoring: Sequence[int] | None = None
) -> list[list[int]]:
    """Rows of the op's `heads` input: a key head, then the query heads that read it and score.

    scoring: indices of the query heads that score; all of them when None. Key heads that no
    scoring head reads have no row, so their keys are never loaded. Rows are filled up with -1;
    a group wider than MAX_GROUP takes several rows. Raises `InputError` on bad indices.
    """
    if kv_heads < 1 or query_heads % kv_heads:
        raise InputError("query_heads", query_heads, f"a multiple of the {kv_heads} key heads")
    heads = list(range(query_heads)) if scoring is None else list(scoring)
    if not heads or len(set(heads)) != len(heads):
        raise InputError("heads", heads, "a list of distinct heads with at least one entry")
    if min(heads) < 0 or max(heads) >= query_heads:
        raise InputError("heads", heads, f"heads in 0..{query_heads - 1}")
    ratio = query_heads // kv_heads
    rows: list[list[int]] = []
    for kv in range(kv_heads):
        group = sorted(h for h in heads if h // ratio == kv)
        rows += [[kv, *group[i : i + MAX_GROUP]] for i in range(0, len(group), MAX_GROUP)]
    width = max(len(row) for row in rows)
    return [row + [-1] * (width - len(row)) for row in rows]


def check_inputs(
    queries: torch.Tensor,
    keys: torch.Tensor,
    lengths: torch.Tensor,
    heads: torch.Tensor,
    key_scale: torch.Tensor,
    running: torch.Tensor,
    pool: int,
) -> None:
    """Raise `InputError`, naming the tensor, unless the op's inputs fit together."""
    for name, tensor in (("queries", queries), ("keys", keys)):
        if tensor.dim() != 4:
            raise InputError(name, tuple(tensor.shape), "a shape [B, heads, W or N, D]")
    (b, _, w, d), (_, kv_heads, n, _) = queries.shape, keys.shape
    if queries.dtype not in _QUERY_TYPES:
        raise InputError("queries", queries.dtype, f"one of {_QUERY_TYPES}")
    if keys.dtype not in (queries.dtype, torch.float8_e4m3fn):
        raise InputError("keys", keys.dtype, f"{queries.dtype} as the queries, or float8_e4m3fn")
    if heads.dim() != 2 or heads.shape[1] < 2:
        raise InputError("heads", tuple(heads.shape), "a shape [R, 1 + G]")
    expected = (
        ("keys", keys, (b, kv_heads, n, d), keys.dtype),
        ("lengths", lengths, (b,), torch.int32),
        ("heads", heads, tuple(heads.shape), torch.int32),
        ("key_scale", key_scale, (kv_heads,), torch.float32),
        ("running", running, (b, w, n), torch.float32),
    )
    for name, tensor, shape, dtype in expected:
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            given = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise InputError(name, given, f"{dtype} {shape}")
    if not 1 <= w <= MAX_QUERIES:
        raise InputError("queries", f"W = {w}", f"1 to {MAX_QUERIES} queries")
    if not 1 <= n <= MAX_TOKENS:
        raise InputError("keys", f"N = {n}", f"1 to {MAX_TOKENS} keys")
    check_pool_width(pool)


@torch.library.custom_op("specprefill::importance_layer", mutates_args=())
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
    check_inputs(queries, keys, lengths, heads, key_scale, running, pool)
    return plain_layer(queries, keys, lengths, heads, key_scale, running, scale, pool, causal)


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


def use_kernels() -> bool:
    """Put the kernels in the place of the plain form on CUDA, if they are installed.

    The kernels are a package of their own, `plugins`, which builds on this one and needs triton;
    without either the op stays as it is, and a log line says so. Returns whether CUDA tensors
    go to the kernels.
    """
    try:
        importlib.import_module("triton")
        importlib.import_module("plugins.importance")
    except ImportError as error:
        _log.warning("importance on CUDA in plain torch, without the kernels: %s", error)
        return False
    return True


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
    Raises `InputError` for shapes, dtypes or widths that are not supported.
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
    """The op in plain torch: one sequence, then one row of the head table, after the other.

    Beside its output it holds the logits of one key head's group for one block of keys.
    """
    out = torch.zeros_like(running, memory_format=torch.contiguous_format)
    factors = (key_scale * scale).tolist()
    for i, length in enumerate(lengths.tolist()):
        best = out[i, :, :length]
        best.copy_(running[i, :, :length])
        for kv, *group in heads.tolist():
            scoring = [head for head in group if head >= 0]
            if length and scoring:
                # fp32 once for the queries, and block by block for the keys.
                q = queries[i, scoring].float() * factors[kv]
                _raise_to_pooled_weights(best, q, keys[i, kv, :length], pool, causal)
    return out


def _raise_to_pooled_weights(
    best: torch.Tensor, q: torch.Tensor, k: torch.Tensor, pool: int, causal: bool
) -> None:
    """Maximum of `best` `[W, n]` and the pooled weights of one key head's queries, in place.

    q: float32 `[G, W, D]`, scaled; k: `[n, D]`, the valid keys.
    """
    (g, w, d), n, half = q.shape, k.shape[0], pool // 2
    rows = q.reshape(g * w, d)
    # From this key on, some query of a causal window does not see it.
    tail = max(n - w + 1, 0) if causal else n
    place = torch.arange(tail, n, device=k.device)
    unseen = place > (n - w + torch.arange(w, device=k.device))[:, None]

    def logits(start: int, stop: int) -> torch.Tensor:
        return (rows @ k[start:stop].float().t()).view(g, w, stop - start)

    def hide(x: torch.Tensor, start: int, stop: int, value: float) -> torch.Tensor:
        first = max(tail, start)
        if first < stop:
            x[..., first - start :].masked_fill_(unseen[:, first - tail : stop - tail], value)
        return x

    step = _key_block(g * w, k.device)
    blocks = [(start, min(start + step, n)) for start in range(0, n, step)]
    parts, low = [], torch.full((g, w), float("inf"), device=k.device)
    for start, stop in blocks:
        x = hide(logits(start, stop), start, stop, float("inf"))
        low = torch.minimum(low, x.amin(-1))
        x = hide(x, start, stop, _NEG_INF)
        parts.append(x.logsumexp(-1))
    lse = torch.stack(parts).logsumexp(0)
    # An infinite logit would come out as a weight of 0 or 1: make it as visible as NaN.
    finite = (low > _NEG_INF) & (lse < float("inf"))
    lse = torch.where(lse == _NEG_INF, 0.0, lse)[..., None]
    for start, stop in blocks:
        left, right = max(start - half, 0), min(stop + half, n)
        if len(blocks) > 1:  # else `x` still holds them all
            x = hide(logits(left, right), left, right, _NEG_INF)
        weights = x.sub_(lse).exp_()
        # The halo that lies outside the sequence is zero: pad what the clamping cut off.
        cut = (left - (start - half), stop + half - right)
        if any(cut):
            weights = torch.nn.functional.pad(weights, cut)
        pooled = _sum_of_neighbours(weights, pool).amax(0).div_(pool)
        block = best[:, start:stop]
        torch.maximum(block, pooled, out=block)
    best.masked_fill_(~finite.all(0)[:, None], float("nan"))


def _sum_of_neighbours(x: torch.Tensor, width: int) -> torch.Tensor:
    """Sums of `width` adjacent columns, `[..., C - width + 1]`, by doubling.

    A power of two takes one addition of whole rows for each bit, which on a CPU is many times
    faster than torch's pooling; nothing is subtracted, so small weights keep their digits.
    """
    columns, done, power = x.shape[-1] - width + 1, 0, 1
    total: torch.Tensor | None = None
    while True:
        if width & power:
            part = x[..., done : done + columns]
            total = part if total is None else total + part
            done += power
        if 2 * power > width:
            assert total is not None
            return total
        x = x[..., :-power] + x[..., power:]
        power *= 2


def _key_block(rows: int, device: torch.device) -> int:
    """Keys of one block: on a CPU its logits stay in cache, elsewhere there are fewer launches."""
    elements = 1 << 17 if device.type == "cpu" else 1 << 22
    return max(elements // rows, 1024)
