"""The two kernels that score one layer, in the Triton language.

The same source runs in Triton's interpreter on a CPU, on a GPU under torch, and, compiled to PTX
ahead of time, inside a TensorRT engine. What they compute is defined by
`trtllm_specprefill.importance` (speculative prefill, arXiv 2502.02789, section 3.2):

    weight[h, j, i]  = softmax_i(scale * q[b, h, j] . k[b, h, i])
    running[b, j, i] = max(running[b, j, i], max_h avgpool_P(weight[h, j])[i])

`lse_kernel` finds the softmax denominators, split over the keys as in flash decoding
(arXiv 2205.14135); `pool_kernel` recomputes the logits of a tile of keys, normalises, pools,
and takes the maxima. No tensor of size heads x queries x tokens is ever written.

**Tensors** (contiguous, row-major)

    queries   [B, Hq, W, D]      fp32, fp16 or bf16, after RoPE
    keys      [B, Hkv, N, D]     the queries' dtype, or the bytes of fp8 e4m3
    lengths   [B]                int32, valid keys of each sequence; the rest is padding, never used
    heads     [R, 1 + G]         int32, one row per key head that scores: its index, then the query
                                 heads that read it and score; -1 fills short rows
    key_scale [Hkv]              fp32, what each key head's stored values are multiplied by
    parts     [B, R, G, W, S]    fp32, log2 of the sum of 2**x over split S of the keys; -inf when
                                 the query sees no key there
    running   [B, W, N]          fp32, >= 0, the maximum over the layers before

Query heads that share a key head are stacked as rows of one product, so keys are read once per
key head. Accumulation is in fp32 throughout.

**Degenerate input.** A query's row in the output is NaN at each of the sequence's valid positions
if any logit of one of its scoring heads, at a key that it sees, is NaN or infinite, and wherever
`running` is NaN. No other row, no other sequence and no position past the valid length is
affected. A row that sees no key (`lengths` 0; or, with `CAUSAL`, a query before the first token)
leaves `running` as it is. Positions past the valid length are 0.

**What it costs.** Let e be the bytes of one element, r = Hq / Hkv, and T = KEY_BLOCK,
P = POOL, so that a tile yields T - P + 1 positions.

    bytes   2 e B Hkv N D        keys, once for each kernel (the P - 1 keys that neighbouring
                                 tiles share come from L2)
          + 8 B W N              running, read and written
          + 2 e B Hq W D + 4 B Hq W S (1 + N / (T - P + 1))     queries and parts: the last term
                                 is re-read by every tile and stays in L2
    flops   2 B Hq W N D                                        lse_kernel
          + 2 B Hq W N (D + 2 T) T / (T - P + 1)                pool_kernel: the pooling is a
                                 product with a band of ones, of two bf16 terms (fp32 inputs: one
                                 fp32 term), since windows across columns have no other fast form

On an H200 (4.3 TB/s copy, 790 TFLOP/s bf16, measured) one layer of Llama-3.2-1B (Hq 32, Hkv 8,
D 64) with W 8, N 131072 and bf16 keys moves 277 MB, a floor of 64 us, and does 20 GFLOP, 26 us at
the full rate, which tiles of 32 rows do not reach. Four times as many queries, W 32, move 302 MB
(70 us) and do 81 GFLOP (102 us): from about there on the products set the floor.
With more queries than QUERY_BLOCK the keys are read once per block of queries; the blocks of one
tile run next to each other, so that L2 serves them.
"""

# Kernels take what the launcher passes; their parameters have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

# The interpreter multiplies the raw bits of bf16 operands. Products of 16-bit floats are exact in
# fp32, so widening them there gives what the tensor cores give.
_WIDEN: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _dot(a, b):
    """Matrix product accumulated in fp32."""
    if _WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _decode_e4m3(byte):
    """Exact fp16 values of fp8 e4m3 bytes, by bits: needs no fp8 instructions (sm_80 has none)."""
    magnitude = (byte & 0x7F).to(tl.uint16)
    sign = (byte & 0x80).to(tl.uint16) << 8
    # Placed in fp16's fields the value is 2**-8 of what e4m3 means by it, subnormals included.
    value = (sign | (magnitude << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def _larger(a, b):
    """Maximum of two values; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _query_rows(
    heads_ptr,
    row,
    chunk,
    w,
    GROUP: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
):
    """What each of the tile's rows stands for: query j, place g in the group, head, scores or not.

    Places in a group are neighbouring rows, so the last reduction stays within a warp.
    """
    rows = tl.arange(0, QUERY_BLOCK * PAD_GROUP)
    j = chunk * QUERY_BLOCK + rows // PAD_GROUP
    g = rows % PAD_GROUP
    head = tl.load(heads_ptr + row * (1 + GROUP) + 1 + g, mask=g < GROUP, other=-1)
    return j, g, head, (head >= 0) & (j < w)


@triton.jit
def _load_queries(
    q_ptr, b, j, head, scores, w, Q_HEADS: tl.constexpr, DIM: tl.constexpr, PAD_DIM: tl.constexpr
):
    """The tile's queries, `[rows, PAD_DIM]`, zero where a row or a dimension is padding."""
    d = tl.arange(0, PAD_DIM)
    offsets = ((b * Q_HEADS + head) * w + j) * DIM
    mask = scores[:, None] & (d < DIM)[None, :]
    return tl.load(q_ptr + offsets[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def _logits(
    q,
    k_ptr,
    b,
    kv,
    position,
    length,
    n,
    factor,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    FP8: tl.constexpr,
):
    """Logits times log2(e) of the tile's queries against the keys at `position`, `[rows, keys]`."""
    d = tl.arange(0, PAD_DIM)
    base = k_ptr + (b * KV_HEADS + kv) * n * DIM
    valid = (position >= 0) & (position < length)
    mask = valid[:, None] & (d < DIM)[None, :]
    if FP8:
        k = tl.load(base + position[:, None] * DIM + d[None, :], mask=mask, other=0)
        k = _decode_e4m3(k).to(q.dtype)
    else:
        k = tl.load(base + position[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    return _dot(q, tl.trans(k)) * factor


@triton.jit
def _sees(position, j, scores, length, w, CAUSAL: tl.constexpr):
    """Which of the tile's queries see which keys, `[rows, keys]`."""
    seen = (position >= 0) & (position < length)
    mask = scores[:, None] & seen[None, :]
    if CAUSAL:
        mask = mask & (position[None, :] <= (length - w + j)[:, None])
    return mask


@triton.jit
def lse_kernel(
    q_ptr,
    k_ptr,
    lengths_ptr,
    heads_ptr,
    key_scale_ptr,
    n,
    w,
    parts_ptr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    FP8: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    PAD_DIM: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Log-sum-exp of every query over each of SPLITS runs of keys, into `parts`.

    Grid: (blocks of queries x SPLITS, R, B). SCALE is the logits' scale times log2(e).
    """
    chunks = tl.cdiv(w, QUERY_BLOCK)
    chunk = tl.program_id(0) % chunks
    split = tl.program_id(0) // chunks
    row = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)  # what it multiplies passes 2**31 first
    length = tl.load(lengths_ptr + b)
    kv = tl.load(heads_ptr + row * (1 + GROUP))
    factor = tl.load(key_scale_ptr + kv) * SCALE
    j, g, head, scores = _query_rows(heads_ptr, row, chunk, w, GROUP, PAD_GROUP, QUERY_BLOCK)
    q = _load_queries(q_ptr, b, j, head, scores, w, Q_HEADS, DIM, PAD_DIM)

    # Splits follow the valid length, not N, so that padding changes neither balance nor rounding.
    run = tl.cdiv(tl.cdiv(length, KEY_BLOCK), SPLITS) * KEY_BLOCK
    peak = tl.full([QUERY_BLOCK * PAD_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_BLOCK * PAD_GROUP], tl.float32)
    for start in range(split * run, tl.minimum((split + 1) * run, length), KEY_BLOCK):
        position = start + tl.arange(0, KEY_BLOCK)
        x = _logits(q, k_ptr, b, kv, position, length, n, factor, KV_HEADS, DIM, PAD_DIM, FP8)
        # An infinite logit would come out as a weight of 0 or 1: make it as visible as NaN.
        x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
        x = tl.where(_sees(position, j, scores, length, w, CAUSAL), x, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(x, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(x - base[:, None]), 1)
        peak = new_peak
    empty = total == 0.0
    lse = tl.where(empty, float("-inf"), peak + tl.log2(tl.where(empty, 1.0, total)))
    out = (((b * tl.num_programs(1) + row) * GROUP + g) * w + j) * SPLITS + split
    tl.store(parts_ptr + out, lse, mask=(g < GROUP) & (j < w))


@triton.jit
def pool_kernel(
    q_ptr,
    k_ptr,
    lengths_ptr,
    heads_ptr,
    key_scale_ptr,
    parts_ptr,
    running_ptr,
    n,
    w,
    out_ptr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    FP8: tl.constexpr,
    POOL: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    PAD_DIM: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Pooled softmax weights of a tile of keys, maximised over heads and `running`, into `out`.

    Grid: (blocks of queries x tiles, B). A tile is KEY_BLOCK keys, POOL // 2 of them halo on each
    side, and KEY_BLOCK - POOL + 1 output positions.
    """
    OUT_BLOCK: tl.constexpr = KEY_BLOCK - POOL + 1
    TILE_ROWS: tl.constexpr = QUERY_BLOCK * PAD_GROUP
    chunks = tl.cdiv(w, QUERY_BLOCK)
    chunk = tl.program_id(0) % chunks
    first = tl.program_id(0) // chunks * OUT_BLOCK
    b = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + b)

    column = tl.arange(0, KEY_BLOCK)
    position = first - POOL // 2 + column
    # Output column c sums the keys c .. c + POOL - 1 of the tile.
    after = column[:, None] - column[None, :]
    band = ((after >= 0) & (after < POOL)).to(tl.float32)
    split = tl.arange(0, SPLITS)

    best = tl.zeros([TILE_ROWS, KEY_BLOCK], tl.float32)
    for row in range(ROWS):
        kv = tl.load(heads_ptr + row * (1 + GROUP))
        factor = tl.load(key_scale_ptr + kv) * SCALE
        j, g, head, scores = _query_rows(heads_ptr, row, chunk, w, GROUP, PAD_GROUP, QUERY_BLOCK)
        q = _load_queries(q_ptr, b, j, head, scores, w, Q_HEADS, DIM, PAD_DIM)
        x = _logits(q, k_ptr, b, kv, position, length, n, factor, KV_HEADS, DIM, PAD_DIM, FP8)

        part = (((b * ROWS + row) * GROUP + g) * w + j) * SPLITS
        parts = tl.load(
            parts_ptr + part[:, None] + split[None, :], mask=scores[:, None], other=float("-inf")
        )
        peak = tl.max(parts, 1)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.sum(tl.exp2(parts - peak[:, None]), 1)
        degenerate = total != total
        lse = peak + tl.log2(tl.where(total == 0.0, 1.0, total))

        sees = _sees(position, j, scores, length, w, CAUSAL)
        weights = tl.where(sees, tl.exp2(x - lse[:, None]), 0.0)
        if q.dtype == tl.float32:
            pooled = _dot(weights, band)
        else:
            # Two bf16 terms carry 16 bits of each weight over bf16's full range; ones are exact.
            high = weights.to(tl.bfloat16)
            low = (weights - high.to(tl.float32)).to(tl.bfloat16)
            ones = band.to(tl.bfloat16)
            pooled = _dot(high, ones) + _dot(low, ones)
        pooled = tl.where(degenerate[:, None], float("nan"), pooled)
        best = _larger(best, pooled)

    # Floats >= 0 sort as their bits do, and NaN above them all.
    bits = tl.reshape(best.to(tl.int32, bitcast=True), [QUERY_BLOCK, PAD_GROUP, KEY_BLOCK])
    best = tl.max(bits, 1).to(tl.float32, bitcast=True) / POOL
    j = chunk * QUERY_BLOCK + tl.arange(0, QUERY_BLOCK)
    place = first + column
    offsets = b * w * n + j[:, None] * n + place[None, :]
    valid = place < length
    inside = (j < w)[:, None] & ((column < OUT_BLOCK) & (place < n))[None, :]
    running = tl.load(running_ptr + offsets, mask=inside & valid[None, :], other=0.0)
    tl.store(out_ptr + offsets, tl.where(valid[None, :], _larger(running, best), 0.0), mask=inside)
