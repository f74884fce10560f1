"""How the two kernels are launched: block sizes, compile-time constants and grids, from shapes.

One place for all three users (torch, the interpreter, TensorRT): plain integers in, plain values
out. Grids are computed with the caller's own ceiling division, so that
they come out as integers or as TensorRT's symbolic expressions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_specprefill.importance_op import MAX_GROUP, MAX_QUERIES

LOG2_E = math.log2(math.e)
HEAD_DIMS = (64, 80, 96, 128, 256)
QUERY_TYPES = ("fp32", "fp16", "bf16")
FP8 = "u8"  # e4m3 keys travel as bytes; the kernels decode them

Kernel = str
LSE: Kernel = "lse_kernel"
POOL: Kernel = "pool_kernel"

#: The kernels' run-time arguments, in order. TensorRT passes a plugin's input tensors, then its
#: extra scalars, then its output tensors; that is the order here.
INPUTS: dict[Kernel, tuple[str, ...]] = {
    LSE: ("q_ptr", "k_ptr", "lengths_ptr", "heads_ptr", "key_scale_ptr"),
    POOL: (
        "q_ptr",
        "k_ptr",
        "lengths_ptr",
        "heads_ptr",
        "key_scale_ptr",
        "parts_ptr",
        "running_ptr",
    ),
}
SCALARS = ("n", "w")
OUTPUTS: dict[Kernel, tuple[str, ...]] = {LSE: ("parts_ptr",), POOL: ("out_ptr",)}


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def cdiv(a: Any, b: Any) -> Any:
    """Ceiling division of integers."""
    return -(-a // b)


def default_splits(rows: int) -> int:
    """Splits that give one sequence about 256 programs, two for each processor of an H200."""
    return min(max(next_power_of_two(cdiv(256, rows)), 16), 128)


@dataclass(frozen=True)
class Problem:
    """What is fixed when the kernels are compiled; B, W and N stay free.

    query_heads, kv_heads: Hq and Hkv. rows, group: R and G of the head table. dim: D.
    query_type: one of QUERY_TYPES; key_type: the same, or "u8" for e4m3 bytes.
    scale: multiplies the logits. pool: pooling width P, odd. causal: the queries are the
    sequence's own last W tokens. max_queries: the largest W to expect; it sets block sizes only.
    splits: runs of keys S in the log-sum-exp, a power of two; see `default_splits`.
    """

    query_heads: int
    kv_heads: int
    rows: int
    group: int
    dim: int
    query_type: str
    key_type: str
    scale: float
    pool: int
    causal: bool
    max_queries: int
    splits: int

    def __post_init__(self) -> None:
        """Raise `ValueError`, naming field, value and range, for what the kernels cannot do."""
        if self.query_type not in QUERY_TYPES:
            raise ValueError(f"query_type: {self.query_type!r} must be one of {QUERY_TYPES}")
        if self.key_type not in (self.query_type, FP8):
            raise ValueError(
                f"key_type: {self.key_type!r} must be the queries' {self.query_type!r} or {FP8!r}"
            )
        if self.dim not in HEAD_DIMS:
            raise ValueError(f"dim: {self.dim} must be one of {HEAD_DIMS}")
        if not 1 <= self.max_queries <= MAX_QUERIES:
            raise ValueError(f"max_queries: {self.max_queries} must lie in 1..{MAX_QUERIES}")
        most = self.key_block // 2 + 1
        if not (1 <= self.pool <= most and self.pool % 2):
            raise ValueError(f"pool: {self.pool} must be an odd number in 1..{most}")
        if not 1 <= self.group <= MAX_GROUP:
            raise ValueError(f"group: {self.group} must lie in 1..{MAX_GROUP}")
        if self.splits != next_power_of_two(self.splits):
            raise ValueError(f"splits: {self.splits} must be a power of two")
        if self.rows < 1:
            raise ValueError(f"rows: {self.rows} must be at least 1")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale: {self.scale} must be positive and finite")

    @property
    def pad_group(self) -> int:
        """G rounded up to a power of two."""
        return next_power_of_two(self.group)

    @property
    def pad_dim(self) -> int:
        """D rounded up to a power of two."""
        return next_power_of_two(self.dim)

    @property
    def query_block(self) -> int:
        """Queries of one tile: 16 rows, which tensor cores need, or 32.

        With 64 rows Hopper's wide instructions take the weights' tile into shared memory, which
        then passes 48 KB: more needs an opt-in that TensorRT does not document for compiled
        plugins. The bytes, not the products, set the time at the usual W of about 8.
        """
        fewest, most = max(16 // self.pad_group, 1), max(32 // self.pad_group, 1)
        return max(min(next_power_of_two(self.max_queries), most), fewest)

    @property
    def key_block(self) -> int:
        """Keys of one tile, halo included; at least half of them yield output positions.

        Chosen by the compiler's figures: no register spills, at most 48 KB of shared memory.
        """
        return 32 if self.query_type == "fp32" or self.pad_dim > 128 else 64

    def constants(self, kernel: Kernel) -> dict[str, Any]:
        """The kernel's compile-time constants by name."""
        shared = {
            "Q_HEADS": self.query_heads,
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "DIM": self.dim,
            "SCALE": self.scale * LOG2_E,
            "CAUSAL": self.causal,
            "FP8": self.key_type == FP8,
            "PAD_GROUP": self.pad_group,
            "PAD_DIM": self.pad_dim,
            "QUERY_BLOCK": self.query_block,
            "KEY_BLOCK": self.key_block,
            "SPLITS": self.splits,
        }
        if kernel == POOL:
            return shared | {"ROWS": self.rows, "POOL": self.pool}
        return shared

    def options(self, kernel: Kernel) -> dict[str, Any]:
        """Compiler options: warps, pipeline stages, fused multiply-add.

        In `lse_kernel` a stage is a tile of keys. In `pool_kernel` it is a tile of keys and one of
        queries, the next key head's; two of them are just over 48 KB above 64 dimensions, and four
        warps have too few registers for its tiles there: on some targets they spill, eight do not.
        """
        narrow, wide = self.pad_dim <= 64, self.pad_dim > 128
        if kernel == POOL:
            warps, stages = (4, 3) if narrow else (8, 1)
        else:
            warps, stages = 4, 1 if wide and self.query_type == "fp32" else 2 if wide else 3
        return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}

    def signature(self, kernel: Kernel) -> dict[str, str]:
        """The run-time arguments and their types, in the order in which they are passed."""
        types = {
            "q_ptr": f"*{self.query_type}",
            "k_ptr": f"*{self.key_type}",
            "lengths_ptr": "*i32",
            "heads_ptr": "*i32",
            "key_scale_ptr": "*fp32",
            "parts_ptr": "*fp32",
            "running_ptr": "*fp32",
            "n": "i32",
            "w": "i32",
            "out_ptr": "*fp32",
        }
        return {name: types[name] for name in (*INPUTS[kernel], *SCALARS, *OUTPUTS[kernel])}

    def grid(
        self, kernel: Kernel, b: Any, w: Any, n: Any, ceil_div: Callable[[Any, Any], Any] = cdiv
    ) -> tuple[Any, Any, Any]:
        """Programs in x, y, z for B sequences, W queries, N keys: integers or symbols."""
        chunks = ceil_div(w, self.query_block)
        if kernel == LSE:
            return chunks * self.splits, self.rows, b
        return chunks * ceil_div(n, self.key_block - self.pool + 1), b, 1

    def parts_shape(self, b: Any, w: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Shape of what the first kernel hands to the second, `[B, R, G, W, S]`."""
        return b, self.rows, self.group, w, self.splits

    def bytes_floor(self, b: int, w: int, n: int) -> int:
        """Bytes that must cross the memory bus for one layer: see `kernels`, "What it costs"."""
        size = {"fp32": 4, "fp16": 2, "bf16": 2, "u8": 1}
        keys = size[self.key_type] * b * self.kv_heads * n * self.dim
        queries = size[self.query_type] * b * self.query_heads * w * self.dim
        return 2 * keys + 2 * queries + 8 * b * w * n

    def flops(self, b: int, w: int, n: int) -> int:
        """Multiplies and adds of one layer in the tensor cores, padding left out."""
        tile = self.key_block
        band = (1 if self.query_type == "fp32" else 2) * tile
        pool = (self.dim + band) * tile / (tile - self.pool + 1)
        return int(2 * b * self.rows * self.group * w * n * (self.dim + pool))
