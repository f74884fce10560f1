"""Rotary embedding inside a network, from the position ids it is given.

TensorRT-LLM's attention plugin rotates by the index in the KV cache and ignores position ids
without a word (NVIDIA/TensorRT-LLM issue 1797). A target built for original positions therefore
rotates its queries and keys itself and gives the plugin no rotary embedding. The rotation is
written once, in `rotate`, over the few operators of `Operators`; `TorchOperators` executes it,
`TensorRTOperators` adds it to a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_specprefill.errors import InputError, UnsupportedModel

# Of these, the frequencies are the same for every prompt length, so one table serves all prompts.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

T = TypeVar("T")


@dataclass(frozen=True)
class RotaryTable:
    """One row per position; a head of size D is seen as two halves of D/2.

    cos: float32 `[P, 1, 1, D/2]`. signed_sin: float32 `[P, 1, 2, D/2]`, minus the sine for the
    first half and the sine for the second. Both carry the attention scaling of YaRN.
    """

    cos: NDArray[np.float32]
    signed_sin: NDArray[np.float32]

    @property
    def positions(self) -> int:
        """Number of positions P."""
        return int(self.cos.shape[0])

    @property
    def head_size(self) -> int:
        """D."""
        return 2 * int(self.cos.shape[-1])

    @property
    def nbytes(self) -> int:
        """Size of both constants."""
        return self.cos.nbytes + self.signed_sin.nbytes


def rotary_table(config: Any, positions: int) -> RotaryTable:
    """The table of a transformers text config for position ids `0 .. positions - 1`.

    The frequencies are transformers' own, bit for bit, and the angle is their float32 product
    with the position: a frequency that is off by its last bit turns a query at position 131,072
    by 0.008 radians. Raises `UnsupportedModel` for a kind of rotary embedding whose frequencies
    depend on the length of the prompt, or that leaves part of a head alone.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    if positions < 1:
        raise InputError("positions", positions, "a whole number >= 1")
    kind = rope_type(config)
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(
            f"rotary embedding {kind!r} cannot be put into one table; those that can: "
            + ", ".join(ROPE_TYPES)
        )
    module = LlamaRotaryEmbedding(config=config)
    frequencies: NDArray[np.float32] = module.inv_freq.float().numpy()
    size = int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    if 2 * frequencies.size != size:
        raise UnsupportedModel(
            f"rotary embedding of {2 * frequencies.size} of {size} values of a head;"
            " only whole heads are supported"
        )
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    exact, scale = angles.astype(np.float64), float(module.attention_scaling)
    cos = (np.cos(exact) * scale).astype(np.float32)[:, None, None, :]
    sin = (np.sin(exact) * scale).astype(np.float32)[:, None, None, :]
    return RotaryTable(cos, np.concatenate([-sin, sin], axis=2))


def rope_type(config: Any) -> str:
    """`rope_type` of a config, by the name that transformers 5 or 4 gives its parameters."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    parameters = parameters or {}
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


class Operators(Protocol[T]):
    """What the rotation needs of a tensor library."""

    def constant(self, values: NDArray[Any]) -> T:
        """A tensor that holds `values`."""

    def rows(self, table: T, index: T) -> T:
        """Rows `index` int32 `[L]` of `table` `[P, ...]`: `[L, ...]`."""

    def pick(self, x: T, axis: int, indices: Sequence[int]) -> T:
        """`x` with only `indices` of `axis`, in that order."""

    def reshape(self, x: T, kept: int, *sizes: int) -> T:
        """`x` with its dimensions after the first `kept` seen as `sizes`."""

    def join(self, a: T, b: T, axis: int) -> T:
        """`a`, then `b`, along `axis`."""

    def multiply(self, a: T, b: T) -> T:
        """Elementwise, broadcast."""

    def add(self, a: T, b: T) -> T:
        """Elementwise, broadcast."""

    def float32(self, x: T) -> T:
        """`x` in float32."""

    def like(self, x: T, other: T) -> T:
        """`x` in the type of `other`."""


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of one network: its table held once, as constants of the network."""

    operators: Operators[Any]
    cos: Any
    signed_sin: Any
    head_size: int

    @classmethod
    def of(cls, operators: Operators[Any], table: RotaryTable) -> Rotation:
        """Put `table` into the network behind `operators`."""
        return cls(
            operators,
            operators.constant(table.cos),
            operators.constant(table.signed_sin),
            table.head_size,
        )

    def __call__(self, x: Any, position_ids: Any) -> Any:
        """Rotate `x` `[L, heads, D]` of any float type by `position_ids` int32 `[L]`.

        In float32, whatever the type of `x`; the result has the type of `x`.
        """
        ops = self.operators
        cos = ops.rows(self.cos, position_ids)
        sin = ops.rows(self.signed_sin, position_ids)
        halves = ops.reshape(ops.float32(x), 2, 2, self.head_size // 2)
        crossed = ops.multiply(ops.pick(halves, 2, (1, 0)), sin)
        turned = ops.add(ops.multiply(halves, cos), crossed)
        return ops.like(ops.reshape(turned, 2, self.head_size), x)

    def packed(self, qkv: Any, position_ids: Any, heads: int, kv_heads: int) -> Any:
        """Rotate the queries and keys of `qkv` `[L, (heads + 2 * kv_heads) * D]`, as one rank of
        TensorRT-LLM packs them; the values stay as they are."""
        ops, turned, every = self.operators, heads + kv_heads, heads + 2 * kv_heads
        by_head = ops.reshape(qkv, 1, every, self.head_size)
        rotated = self(ops.pick(by_head, 1, range(turned)), position_ids)
        values = ops.pick(by_head, 1, range(turned, every))
        return ops.reshape(ops.join(rotated, values, 1), 1, every * self.head_size)


class TorchOperators:
    """Executes at once, on torch tensors."""

    def constant(self, values: NDArray[Any]) -> torch.Tensor:
        """See `Operators.constant`."""
        return torch.from_numpy(values)

    def rows(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """See `Operators.rows`."""
        return table[index.long()]

    def pick(self, x: torch.Tensor, axis: int, indices: Sequence[int]) -> torch.Tensor:
        """See `Operators.pick`."""
        return x.index_select(axis, torch.tensor(indices))

    def reshape(self, x: torch.Tensor, kept: int, *sizes: int) -> torch.Tensor:
        """See `Operators.reshape`."""
        return x.reshape(*x.shape[:kept], *sizes)

    def join(self, a: torch.Tensor, b: torch.Tensor, axis: int) -> torch.Tensor:
        """See `Operators.join`."""
        return torch.cat([a, b], dim=axis)

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See `Operators.multiply`."""
        return a * b

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See `Operators.add`."""
        return a + b

    def float32(self, x: torch.Tensor) -> torch.Tensor:
        """See `Operators.float32`."""
        return x.float()

    def like(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """See `Operators.like`."""
        return x.to(other.dtype)


class TensorRTOperators:
    """Adds layers to a TensorRT network; tensors are `ITensor`.

    trt: the module `tensorrt`, or another with the same network API. network: an
    `INetworkDefinition`; holds on to the arrays of its constants, which TensorRT does not copy.
    """

    def __init__(self, trt: Any, network: Any) -> None:
        self._trt, self._network = trt, network
        self._held: list[NDArray[Any]] = []

    def constant(self, values: NDArray[Any]) -> Any:
        """See `Operators.constant`."""
        held = np.ascontiguousarray(values)
        self._held.append(held)
        return self._network.add_constant(held.shape, self._trt.Weights(held)).get_output(0)

    def rows(self, table: Any, index: Any) -> Any:
        """See `Operators.rows`."""
        return self._network.add_gather(table, index, 0).get_output(0)

    def pick(self, x: Any, axis: int, indices: Sequence[int]) -> Any:
        """See `Operators.pick`."""
        order = self.constant(np.array(indices, dtype=np.int32))
        return self._network.add_gather(x, order, axis).get_output(0)

    def reshape(self, x: Any, kept: int, *sizes: int) -> Any:
        """See `Operators.reshape`."""
        layer = self._network.add_shuffle(x)
        layer.reshape_dims = (0,) * kept + sizes  # 0 copies a dimension, so lengths may be dynamic
        return layer.get_output(0)

    def join(self, a: Any, b: Any, axis: int) -> Any:
        """See `Operators.join`."""
        layer = self._network.add_concatenation([a, b])
        layer.axis = axis
        return layer.get_output(0)

    def multiply(self, a: Any, b: Any) -> Any:
        """See `Operators.multiply`."""
        operation = self._trt.ElementWiseOperation.PROD
        return self._network.add_elementwise(a, b, operation).get_output(0)

    def add(self, a: Any, b: Any) -> Any:
        """See `Operators.add`."""
        operation = self._trt.ElementWiseOperation.SUM
        return self._network.add_elementwise(a, b, operation).get_output(0)

    def float32(self, x: Any) -> Any:
        """See `Operators.float32`."""
        return self._cast(x, self._trt.float32)

    def like(self, x: Any, other: Any) -> Any:
        """See `Operators.like`."""
        return self._cast(x, other.dtype)

    def _cast(self, x: Any, kind: Any) -> Any:
        return x if x.dtype == kind else self._network.add_cast(x, kind).get_output(0)
