"""A built draft under TensorRT, or TensorRT for RTX, on a GPU.

Everything that a call needs lies in memory that is taken once, when the engine is loaded: pinned
buffers for what goes in and comes out, one workspace that the profiles share, and two sets of keys
and values. A look-ahead step reads one set and writes the other, and the next step reads that
one, so nothing of them is copied between steps. One engine serves one call at a time, on the GPU
that it was loaded onto, whichever thread calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_specprefill.draft.bindings import ErrorLog, load_bindings, same_version
from trtllm_specprefill.draft.engine import Engine, Ids, Lengths, Pass, Scores
from trtllm_specprefill.draft.manifest import DraftManifest, EngineRefused
from trtllm_specprefill.draft.memory import Buffers, CudaMemory, Memory, cache_names
from trtllm_specprefill.errors import DraftFailed, InputError
from trtllm_specprefill.fetch import sha256_of

ENGINE = "draft.engine"
PREFILL, STEP = 0, 1  # the optimisation profiles; window mode has the first alone

_CACHE_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "float8_e4m3fn": "FP8"}


class TensorRTEngine(Engine):
    """The engine in `folder`; see `Engine`.

    Loads only what its manifest says it is: of the installed version of TensorRT, for this GPU,
    with the manifest's tensors in and out; else `EngineRefused`, which names the field. Raises
    `InputError` where TensorRT or a GPU is missing.
    """

    def __init__(
        self,
        folder: str | Path,
        manifest: DraftManifest,
        device: str = "cuda",
        memory: Memory | None = None,
    ) -> None:
        """Load it onto `device`, `cuda` or `cuda:N`. memory: in the place of the GPU's."""
        if manifest.runtime == "onnx":
            raise EngineRefused("runtime", "onnx", "tensorrt or tensorrt-rtx")
        runtime = manifest.runtime
        self._trt = trt = load_bindings(runtime)
        built = manifest.versions.get(runtime)
        if built is None or not same_version(built, trt.__version__):
            allowed = f"{trt.__version__!r}, the version that is installed here"
            raise EngineRefused(f"versions.{runtime}", built, allowed)
        self._memory = memory = memory or CudaMemory(device)
        if manifest.sm and memory.capability not in manifest.sm:
            raise EngineRefused(
                "sm", manifest.sm, f"one with {memory.capability}, that of {device}"
            )
        self._log = ErrorLog(trt)
        self.batch, self.piece = manifest.max_batch, manifest.max_tokens
        self._pass: _TensorRTPass | None = None
        with memory.active():
            self._load(folder, manifest)

    def read(self, input_ids: Ids, position_ids: Ids, lengths: Lengths, voters: Lengths) -> Scores:
        """See `Engine.read`."""
        arrays: dict[str, NDArray[Any]] = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "lengths": lengths,
            "voters": voters,
        }
        (scores,) = self.run(PREFILL, arrays, {}, {"importance": input_ids.shape})
        return scores

    def begin(self, batch: int, capacity: int) -> Pass:
        """See `Engine.begin`. Ends the pass before it: they would share keys and values."""
        with self._memory.active():
            self._pass = _TensorRTPass(self, self._buffers, self._memory, batch, capacity)
        return self._pass

    def is_current(self, one: _TensorRTPass) -> bool:
        """Whether no other pass has begun since."""
        return self._pass is one

    def run(
        self,
        profile: int,
        arrays: Mapping[str, NDArray[Any]],
        bound: Mapping[str, tuple[int, tuple[int, ...]]],
        results: Mapping[str, tuple[int, ...]],
    ) -> list[NDArray[Any]]:
        """One call of the engine.

        arrays: what goes in, by name. bound: address and shape of tensors that lie on the device.
        results: shapes of what comes out; in their order, copies of it. Raises `DraftFailed`
        with TensorRT's words when it does not run.
        """
        with self._memory.active():
            return self._run(profile, arrays, bound, results)

    def close(self) -> None:
        """See `Engine.close`."""
        with self._memory.active():
            self._contexts.clear()
            self._pass = None  # it holds the buffers too
            del self._engine, self._buffers, self._workspace

    def _load(self, folder: str | Path, manifest: DraftManifest) -> None:
        """Take the engine and all memory that its calls need."""
        memory = self._memory
        self._engine = self._deserialised(Path(folder) / ENGINE, manifest)
        self._check_tensors(folder, manifest)
        profiles = range(self._engine.num_optimization_profiles)
        sizes = [self._engine.get_device_memory_size_for_profile_v2(i) for i in profiles]
        self._workspace = memory.device(max(*sizes, 1), torch.uint8)
        self._contexts = [self._context(profile) for profile in profiles]
        self._buffers = Buffers(memory, manifest)

    def _run(
        self,
        profile: int,
        arrays: Mapping[str, NDArray[Any]],
        bound: Mapping[str, tuple[int, tuple[int, ...]]],
        results: Mapping[str, tuple[int, ...]],
    ) -> list[NDArray[Any]]:
        context = self._contexts[profile]
        for name, array in arrays.items():
            self._bind(context, name, self._buffers.put(name, array), array.shape)
        for name, (address, shape) in bound.items():
            self._bind(context, name, address, shape if name.startswith("past_") else None)
        for name in results:
            self._bind(context, name, self._buffers.address(name), None)
        if unknown := context.infer_shapes():
            raise DraftFailed(f"TensorRT has no shape for {', '.join(unknown)}; {self._log.told()}")
        if not context.execute_async_v3(self._memory.stream):
            raise DraftFailed(f"TensorRT did not run the draft; {self._log.told()}")
        found = [self._buffers.fetch(name, shape) for name, shape in results.items()]
        self._memory.wait()
        return [array.copy() for array in found]

    def _bind(self, context: Any, name: str, address: int, shape: Sequence[int] | None) -> None:
        """Where a tensor lies and, of an input, its shape."""
        if shape is not None and not context.set_input_shape(name, tuple(shape)):
            raise DraftFailed(f"{name} {tuple(shape)} does not fit the engine; {self._log.told()}")
        if not context.set_tensor_address(name, address):
            raise DraftFailed(f"TensorRT refused the address of {name}; {self._log.told()}")

    def _deserialised(self, path: Path, manifest: DraftManifest) -> Any:
        if not path.is_file():
            raise InputError("engine", str(path.parent), f"a folder with {ENGINE}")
        manifest.check_field(f"files.{ENGINE}", sha256_of(path), "the file that lies there")
        runtime = self._trt.Runtime(self._log.logger)
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            allowed = f"an engine that TensorRT {self._trt.__version__} loads"
            raise EngineRefused("engine", str(path), f"{allowed} ({self._log.told()})")
        return engine

    def _check_tensors(self, folder: str | Path, manifest: DraftManifest) -> None:
        engine, trt = self._engine, self._trt
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        given = {n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT}
        expected_in, expected_out = tensor_names(manifest)
        if given != set(expected_in) or set(names) - given != set(expected_out):
            allowed = f"one with {', '.join([*expected_in, *expected_out])}, as its manifest says"
            raise EngineRefused("engine", f"{folder} with {', '.join(names)}", allowed)
        if manifest.cache is not None:
            kind = engine.get_tensor_dtype("past_keys.0").name
            if kind != _CACHE_TYPES[manifest.cache.dtype]:
                allowed = f"{kind}, which the engine has"
                raise EngineRefused("cache.dtype", manifest.cache.dtype, allowed)
        profiles = 1 if manifest.cache is None else 2
        if engine.num_optimization_profiles != profiles:
            found = engine.num_optimization_profiles
            raise EngineRefused("engine", f"{found} optimisation profiles", f"{profiles}")

    def _context(self, profile: int) -> Any:
        """An execution context for one profile, in the workspace that all share."""
        trt = self._trt
        context = self._engine.create_execution_context(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if context is None:
            raise InputError("engine", "no execution context", self._log.told())
        context.set_device_memory(self._workspace.data_ptr(), self._workspace.numel())
        if not context.set_optimization_profile_async(profile, self._memory.stream):
            raise InputError("engine", f"profile {profile}", self._log.told())
        return context


class _TensorRTPass(Pass):
    """Look-ahead over one batch: which set of keys and values is read, and which written."""

    def __init__(
        self,
        engine: TensorRTEngine,
        buffers: Buffers,
        memory: Memory,
        batch: int,
        capacity: int,
    ) -> None:
        self._engine, self._buffers, self._capacity = engine, buffers, capacity
        self._shape = buffers.cache_shape(batch, capacity)
        self._read = 0
        for tensor in buffers.caches[0].values():  # masked slots count for nothing if finite
            memory.zero(tensor[: int(np.prod(self._shape))])

    def step(
        self,
        input_ids: Ids,
        position_ids: Ids,
        lengths: Lengths,
        prompt_lengths: Lengths,
        past_lengths: Lengths,
    ) -> tuple[Scores, Ids]:
        """See `Pass.step`."""
        if not self._engine.is_current(self):
            raise DraftFailed("another prompt has taken the engine's keys and values")
        batch, tokens = input_ids.shape
        bound: dict[str, tuple[int, tuple[int, ...]]] = {}
        for name, tensor in self._buffers.caches[self._read].items():
            bound[f"past_{name}"] = (tensor.data_ptr(), self._shape)
        for name, tensor in self._buffers.caches[1 - self._read].items():
            bound[f"present_{name}"] = (tensor.data_ptr(), self._shape)
        arrays: dict[str, NDArray[Any]] = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "lengths": lengths,
            "prompt_lengths": prompt_lengths,
            "past_lengths": past_lengths,
        }
        results: dict[str, tuple[int, ...]] = {
            "importance": (batch, self._capacity),
            "next_token": (batch,),
        }
        rows, tokens_ = self._engine.run(STEP if tokens == 1 else PREFILL, arrays, bound, results)
        self._read = 1 - self._read
        return rows, tokens_


def tensor_names(manifest: DraftManifest) -> tuple[list[str], list[str]]:
    """What goes in and what comes out of an engine; see `engine_build.scoring_model`."""
    shared = ["input_ids", "position_ids", "lengths"]
    if manifest.cache is None:
        return [*shared, "voters"], ["importance"]
    names = cache_names(manifest.cache.layers)
    return (
        [*shared, "prompt_lengths", "past_lengths", *(f"past_{name}" for name in names)],
        ["importance", "next_token", *(f"present_{name}" for name in names)],
    )
