"""Memory that a draft on a GPU takes once, when it is loaded: on the device, and pinned."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_specprefill.draft.manifest import CacheGeometry, DraftManifest
from trtllm_specprefill.errors import InputError

CACHE_SETS = 2  # of keys and values: a step reads one and writes the other


class Memory(Protocol):
    """Where an engine's tensors lie, and the stream that its work goes to."""

    stream: int
    """Handle of the CUDA stream."""
    capability: int
    """Of the device, 10 x major + minor."""

    def active(self) -> AbstractContextManager[None]:
        """Within it, the device is the calling thread's current one.

        TensorRT asks for no device: an engine belongs to the one that is current when it is
        loaded, and must be called where that is current, in every thread.
        """

    def device(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory that the engine reads and writes: `[elements]`."""

    def host(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory of the host: `[elements]`."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the stream, without waiting."""

    def zero(self, tensor: torch.Tensor) -> None:
        """Fill with zeros on the stream, without waiting."""

    def wait(self) -> None:
        """Wait for the stream."""


class CudaMemory:
    """Memory of a GPU, with a stream of its own; see `Memory`."""

    def __init__(self, device: str) -> None:
        """Take a stream of `device`, `cuda` or `cuda:N`; `InputError` where torch sees none."""
        if not torch.cuda.is_available():
            raise InputError("device", device, "a GPU, which torch does not see here")
        named = torch.device(device)  # without a number it is the one that is current now
        number = torch.cuda.current_device() if named.index is None else named.index
        self._device = torch.device("cuda", number)
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.stream = int(self._stream.cuda_stream)
        major, minor = torch.cuda.get_device_capability(self._device)
        self.capability = 10 * major + minor

    def active(self) -> AbstractContextManager[None]:
        """See `Memory.active`."""
        current: AbstractContextManager[None] = torch.cuda.device(self._device)
        return current

    def device(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Memory.device`."""
        return torch.empty(elements, dtype=dtype, device=self._device)

    def host(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Memory.host`."""
        return torch.empty(elements, dtype=dtype, pin_memory=True)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """See `Memory.copy`."""
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def zero(self, tensor: torch.Tensor) -> None:
        """See `Memory.zero`."""
        with torch.cuda.stream(self._stream):
            tensor.zero_()

    def wait(self) -> None:
        """See `Memory.wait`."""
        self._stream.synchronize()


class Buffers:
    """Device and pinned memory for the largest call, taken once."""

    def __init__(self, memory: Memory, manifest: DraftManifest) -> None:
        self._memory, self._cache = memory, manifest.cache
        sizes = _tensors(manifest)
        self._device = {name: memory.device(n, dtype) for name, (n, dtype) in sizes.items()}
        self._host = {name: memory.host(n, dtype) for name, (n, dtype) in sizes.items()}
        self.caches: list[dict[str, torch.Tensor]] = []
        if self._cache is not None:
            largest, dtype = _largest(manifest, self._cache)
            names = cache_names(self._cache.layers)
            self.caches = [
                {name: memory.device(largest, dtype) for name in names} for _ in range(CACHE_SETS)
            ]

    def cache_shape(self, batch: int, capacity: int) -> tuple[int, int, int, int]:
        """Of one layer's keys or values."""
        assert self._cache is not None
        return _shape(self._cache, batch, capacity)

    def put(self, name: str, array: NDArray[Any]) -> int:
        """Bring an input to the device; its address there."""
        host, device = self._host[name], self._device[name]
        host[: array.size].copy_(torch.from_numpy(np.ascontiguousarray(array)).flatten())
        self._memory.copy(device[: array.size], host[: array.size])
        return device.data_ptr()

    def address(self, name: str) -> int:
        """Where an output goes on the device."""
        return self._device[name].data_ptr()

    def fetch(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Bring an output to the host; there once the stream has been waited for."""
        size = int(np.prod(shape))
        host = self._host[name][:size]
        self._memory.copy(host, self._device[name][:size])
        result: NDArray[Any] = host.numpy().reshape(shape)
        return result


def cache_names(layers: int) -> list[str]:
    """Names of keys and values, without `past_` or `present_`, in the graph's order."""
    return [f"{kind}.{i}" for i in range(layers) for kind in ("keys", "values")]


def tensor_bytes(manifest: DraftManifest) -> int:
    """Of the device memory that `Buffers` takes beside keys and values."""
    return sum(elements * dtype.itemsize for elements, dtype in _tensors(manifest).values())


def cache_bytes(manifest: DraftManifest) -> int:
    """Of the keys and values that `Buffers` takes; none in window mode."""
    if manifest.cache is None:
        return 0
    elements, dtype = _largest(manifest, manifest.cache)
    return CACHE_SETS * len(cache_names(manifest.cache.layers)) * elements * dtype.itemsize


def _tensors(manifest: DraftManifest) -> dict[str, tuple[int, torch.dtype]]:
    """Elements and type of everything that goes in or comes out, but keys and values."""
    batch, tokens = manifest.max_batch, manifest.max_tokens
    return {
        "input_ids": (batch * tokens, torch.int64),
        "position_ids": (batch * tokens, torch.int64),
        "lengths": (batch, torch.int32),
        "voters": (batch, torch.int32),
        "prompt_lengths": (batch, torch.int32),
        "past_lengths": (batch, torch.int32),
        "importance": (batch * tokens, torch.float32),
        "next_token": (batch, torch.int64),
    }


def _shape(cache: CacheGeometry, batch: int, capacity: int) -> tuple[int, int, int, int]:
    return batch, cache.kv_heads, capacity, cache.head_dim


def _largest(manifest: DraftManifest, cache: CacheGeometry) -> tuple[int, torch.dtype]:
    """Elements and type of one layer's keys or values of the largest batch."""
    shape = _shape(cache, manifest.max_batch, manifest.max_tokens)
    dtype: torch.dtype = getattr(torch, cache.dtype)
    return int(np.prod(shape)), dtype
