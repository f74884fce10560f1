"""A built draft under onnxruntime, on a CPU or a GPU.

onnxruntime knows nothing of importance: it runs the function that the graph brings along.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.draft.engine import Engine, Ids, Lengths, Pass, Scores
from trtllm_specprefill.draft.manifest import GRAPH, DraftManifest, EngineRefused
from trtllm_specprefill.errors import InputError, SpecPrefillError
from trtllm_specprefill.fetch import sha256_of

# On a CPU one window fills the cores, and a longer piece only the memory: its attention holds
# heads x piece x tokens.
_CPU_BATCH, _CPU_PIECE = 1, 1024


@dataclass(frozen=True)
class _Place:
    """A device as onnxruntime names it: `cpu` or `cuda`, and which of them."""

    kind: str
    number: int = 0

    @property
    def provider(self) -> tuple[str, dict[str, int]]:
        """What runs graphs there, and its options."""
        if self.kind == "cpu":
            return "CPUExecutionProvider", {}
        return "CUDAExecutionProvider", {"device_id": self.number}


_CPU = _Place("cpu")


class OnnxEngine(Engine):
    """The graph in `folder`; see `Engine`.

    Raises `EngineRefused` for one that was built for something else, `InputError` when there is
    none or onnxruntime cannot run it, `SpecPrefillError` when onnxruntime is not installed.
    """

    def __init__(
        self,
        folder: str | Path,
        manifest: DraftManifest,
        device: str = "auto",
        threads: int | None = None,
    ) -> None:
        """Load it.

        device: `cpu`, `cuda`, `cuda:N`, or `auto`: the GPU if this onnxruntime has one.
        threads: of a CPU; all cores when None.
        """
        manifest.check_field("runtime", "onnx", "what onnxruntime runs")
        if manifest.precision == "bf16":
            raise EngineRefused("precision", "bf16", "fp32 or fp8 under onnxruntime")
        runtime = _onnxruntime()
        self._place = _place(runtime, device)
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        if threads:
            options.intra_op_num_threads = threads
        path = Path(folder) / GRAPH
        if not path.is_file():
            raise InputError("engine", str(folder), f"a folder with {GRAPH}")
        for file in (path, path.with_name(f"{GRAPH}.data")):
            if file.is_file():
                found = sha256_of(file)
                manifest.check_field(f"files.{file.name}", found, "the file that lies there")
        try:
            self._session = runtime.InferenceSession(
                str(path), options, providers=[self._place.provider]
            )
        except Exception as error:  # onnxruntime raises what it likes
            words = " ".join(str(error).split())[:300]
            allowed = f"a graph that onnxruntime takes ({words})"
            raise InputError("engine", str(path), allowed) from None
        if self._session.get_providers()[0] == _CPU.provider[0]:  # also where CUDA did not load
            if device.startswith("cuda"):
                raise InputError("device", device, "cpu: onnxruntime could not load its CUDA part")
            self._place = _CPU
        on_cpu = self._place is _CPU
        self.batch = _CPU_BATCH if on_cpu else manifest.max_batch
        self.piece = _CPU_PIECE if on_cpu else manifest.max_tokens
        self._manifest = manifest

    def read(self, input_ids: Ids, position_ids: Ids, lengths: Lengths, voters: Lengths) -> Scores:
        """See `Engine.read`."""
        feeds = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "lengths": lengths,
            "voters": voters,
        }
        found: Scores = self._session.run(["importance"], feeds)[0]
        return found

    def begin(self, batch: int, capacity: int) -> Pass:
        """See `Engine.begin`."""
        return _OnnxPass(self._session, self._place, self._manifest, batch, capacity)


class _OnnxPass(Pass):
    """Keys and values stay where onnxruntime put them: what one call made, the next reads."""

    def __init__(
        self, session: Any, place: _Place, manifest: DraftManifest, batch: int, capacity: int
    ) -> None:
        assert manifest.cache is not None
        cache = manifest.cache
        size = (batch, cache.kv_heads, capacity, cache.head_dim)
        empty: NDArray[Any] = np.zeros(size, dtype=cache.dtype)
        names = [f"{kind}.{i}" for i in range(cache.layers) for kind in ("keys", "values")]
        self._session, self._place, self._names = session, place, names
        value = _onnxruntime().OrtValue.ortvalue_from_numpy(empty, place.kind, place.number)
        self._past: dict[str, Any] = {f"past_{name}": value for name in names}

    def step(
        self,
        input_ids: Ids,
        position_ids: Ids,
        lengths: Lengths,
        prompt_lengths: Lengths,
        past_lengths: Lengths,
    ) -> tuple[Scores, Ids]:
        """See `Pass.step`."""
        binding = self._session.io_binding()
        for name, array in (
            ("input_ids", input_ids),
            ("position_ids", position_ids),
            ("lengths", lengths),
            ("prompt_lengths", prompt_lengths),
            ("past_lengths", past_lengths),
        ):
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name, value in self._past.items():
            binding.bind_ortvalue_input(name, value)
        for name in ("importance", "next_token"):
            binding.bind_output(name)
        for name in self._names:
            binding.bind_output(f"present_{name}", self._place.kind, self._place.number)
        self._session.run_with_iobinding(binding)
        rows, tokens, *present = binding.get_outputs()
        self._past = {f"past_{n}": value for n, value in zip(self._names, present, strict=True)}
        return rows.numpy(), tokens.numpy()


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise SpecPrefillError(
            "onnxruntime is not installed; pip install 'trtllm-specprefill[onnx]' brings it,"
            " onnxruntime-gpu runs on CUDA"
        ) from error
    return onnxruntime


def chosen_device(device: str) -> str:
    """What `auto` means here: `cuda` where this onnxruntime has it, else `cpu`.

    Raises `SpecPrefillError` where onnxruntime is not installed.
    """
    return device if device != "auto" else _place(_onnxruntime(), device).kind


def _place(runtime: Any, device: str) -> _Place:
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and not number.isdigit()):
        raise InputError("device", device, "auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return _CPU
    if "CUDAExecutionProvider" not in runtime.get_available_providers():
        if kind == "auto":
            return _CPU
        allowed = "cpu: this onnxruntime has no CUDA, onnxruntime-gpu has"
        raise InputError("device", device, allowed)
    return _Place("cuda", int(number or 0))
