"""What a deployment will do, from its configs and its GPUs: a roofline, not a measurement.

A prefill is bound by arithmetic and takes its operations over the GPUs' peak times an efficiency;
a decoding step is bound by memory and takes the weights and the KV it reads over the bandwidth
times an efficiency, and a fixed time besides. One set of figures for all models: with it the
published speed-ups of an 8B draft and a 405B target (arXiv 2502.02789, figure 3) come out.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trtllm_specprefill.errors import InputError
from trtllm_specprefill.operations import parameters, prefill_operations

Precision = Literal["fp8", "bf16", "fp32"]

_BYTES: dict[str, float] = {"fp8": 1.0, "bf16": 2.0, "fp32": 4.0}
PREFILL_EFFICIENCY = 0.5  # of the peak without sparsity
DECODE_EFFICIENCY = 0.6  # of the bandwidth
STEP_S = 0.5e-3  # launches and all-reduces of one decoding step
MEMORY_SHARE = 0.9  # of a GPU; the rest is for activations and the runtime


@dataclass(frozen=True)
class Gpu:
    """One GPU, as its data sheet has it: bytes, bytes/s, operations/s without sparsity.

    fp8: None where the tensor cores have no FP8.
    """

    memory: float
    bandwidth: float
    bf16: float
    fp8: float | None


GPUS = {
    "a100-80gb": Gpu(80e9, 2.039e12, 312e12, None),
    "h100": Gpu(80e9, 3.35e12, 989e12, 1979e12),
    "h200": Gpu(141e9, 4.8e12, 989e12, 1979e12),
    "l40s": Gpu(48e9, 0.864e12, 362e12, 733e12),
}


@dataclass(frozen=True)
class Served:
    """A model on GPUs that share it evenly. config: a transformers text config."""

    config: Any
    precision: Precision
    gpus: int

    @classmethod
    def of(cls, config: Any, precision: str, gpus: int) -> Served:
        """The same from a word; raises `InputError` for a precision there is not."""
        if precision == "fp8":
            return cls(config, "fp8", gpus)
        if precision == "bf16":
            return cls(config, "bf16", gpus)
        raise InputError("precision", precision, "fp8 or bf16")

    @property
    def weights(self) -> float:
        """Bytes of all its weights."""
        return parameters(self.config) * _BYTES[self.precision]

    @property
    def kv_per_token(self) -> float:
        """Bytes of KV cache a token takes, in the precision of the weights."""
        heads = int(self.config.num_attention_heads)
        dim = int(getattr(self.config, "head_dim", None) or int(self.config.hidden_size) // heads)
        kv_heads = int(getattr(self.config, "num_key_value_heads", None) or heads)
        layers = int(self.config.num_hidden_layers)
        return 2.0 * layers * kv_heads * dim * _BYTES[self.precision]

    def prefill_s(self, gpu: Gpu, tokens: int) -> float:
        """Seconds to read `tokens` tokens."""
        peak = gpu.fp8 if self.precision == "fp8" else gpu.bf16  # fp32 is not planned with
        assert peak is not None
        operations = prefill_operations(self.config, tokens)
        return operations / (peak * PREFILL_EFFICIENCY * self.gpus)

    def step_s(self, gpu: Gpu, kv_tokens: float) -> float:
        """Seconds of one decoding step over `kv_tokens` cached tokens, all requests together."""
        read = self.weights + self.kv_per_token * kv_tokens
        return STEP_S + read / (gpu.bandwidth * DECODE_EFFICIENCY * self.gpus)


@dataclass(frozen=True)
class Workload:
    """One kind of request. Lengths are in tokens. batch: most requests at a time."""

    prompt: int
    keep_rate: float
    output: int
    look_ahead: int = 8
    batch: int = 64


@dataclass(frozen=True)
class Capacity:
    """What is predicted, pruned and dense. Seconds, bytes, requests.

    draft_s, prefill_s: what TTFT is made of. kv_saved: bytes a request does not hold.
    batch: requests at a time, as the workload has them and as fit the target's memory.
    """

    draft_s: float
    prefill_s: float
    ttft_s: float
    dense_ttft_s: float
    kv_bytes: float
    kv_saved: float
    batch: int
    dense_batch: int
    requests_per_s: float
    dense_requests_per_s: float

    @property
    def speedup(self) -> float:
        """Dense TTFT over pruned TTFT."""
        return self.dense_ttft_s / self.ttft_s

    def report(self) -> dict[str, float]:
        """All of it as plain JSON values."""
        return {**asdict(self), "speedup": self.speedup}


def plan_capacity(
    draft: Served, target: Served, gpu: Gpu, workload: Workload, *, shared: bool = True
) -> Capacity:
    """Predict TTFT, KV and throughput.

    shared: the draft lives on the target's GPUs and takes their time and memory; else it has
    its own, and scores one prompt while the target reads another. Raises `InputError` for a
    workload out of range, a precision that the GPU has not, and models that do not fit together.
    """
    _check(draft, target, gpu, workload)
    kept = max(1, round(workload.keep_rate * workload.prompt))
    steps = (draft.step_s(gpu, workload.prompt + i) for i in range(workload.look_ahead))
    draft_s = draft.prefill_s(gpu, workload.prompt) + sum(steps)
    prefill_s, dense_s = target.prefill_s(gpu, kept), target.prefill_s(gpu, workload.prompt)
    guest = draft if shared else None
    if not shared:  # alone on its GPUs, it needs room for one prompt
        _batch(draft, None, gpu, workload, workload.prompt + workload.look_ahead)
    kv, dense_kv = (n + workload.output for n in (kept, workload.prompt))
    batch = _batch(target, guest, gpu, workload, kv)
    dense_batch = _batch(target, None, gpu, workload, dense_kv)
    busy = prefill_s + _decode_s(target, gpu, workload, kv, batch)
    busy = busy + draft_s if shared else max(busy, draft_s)
    dense_busy = dense_s + _decode_s(target, gpu, workload, dense_kv, dense_batch)
    return Capacity(
        draft_s=draft_s,
        prefill_s=prefill_s,
        ttft_s=draft_s + prefill_s,
        dense_ttft_s=dense_s,
        kv_bytes=kv * target.kv_per_token,
        kv_saved=(dense_kv - kv) * target.kv_per_token,
        batch=batch,
        dense_batch=dense_batch,
        requests_per_s=1 / busy,
        dense_requests_per_s=1 / dense_busy,
    )


def _check(draft: Served, target: Served, gpu: Gpu, workload: Workload) -> None:
    if not 0 < workload.keep_rate <= 1:
        raise InputError("keep_rate", workload.keep_rate, "a number > 0 and <= 1")
    for name, least in (("prompt", 1), ("output", 1), ("look_ahead", 0), ("batch", 1)):
        if getattr(workload, name) < least:
            raise InputError(name, getattr(workload, name), f"a whole number >= {least}")
    for served, name in ((draft, "draft_precision"), (target, "precision")):
        if served.gpus < 1:
            raise InputError("gpus", served.gpus, "a whole number >= 1")
        if served.precision == "fp8" and gpu.fp8 is None:
            raise InputError(name, "fp8", "bf16 on a GPU without FP8")


def _batch(
    target: Served, guest: Served | None, gpu: Gpu, workload: Workload, kv_tokens: int
) -> int:
    """Requests that fit at a time beside the weights and, where it is a guest, the draft."""
    room = gpu.memory * MEMORY_SHARE * target.gpus - target.weights
    if guest is not None:
        room -= guest.weights + guest.kv_per_token * (workload.prompt + workload.look_ahead)
    most = math.floor(room / (kv_tokens * target.kv_per_token))
    if most < 1:
        need = target.weights + (guest.weights if guest else 0.0)
        raise InputError(
            "gpus",
            target.gpus,
            f"enough for {need / 1e9:.0f} GB of weights and {kv_tokens} tokens of KV:"
            f" these hold {gpu.memory * MEMORY_SHARE * target.gpus / 1e9:.0f} GB",
        )
    return min(most, workload.batch)


def _decode_s(target: Served, gpu: Gpu, workload: Workload, kv_tokens: int, batch: int) -> float:
    """Seconds of decoding that one request costs when `batch` of them share every step."""
    return workload.output * target.step_s(gpu, batch * kv_tokens) / batch


@dataclass(frozen=True)
class Guest:
    """What a draft takes of the GPU that it is on, in bytes.

    weights: with an engine's programs. kv: its keys and values. work: of an engine, which takes
    it for as long as it is loaded: buffers, and an estimate of the workspace. The activations of a
    draft under torch are in what `MEMORY_SHARE` leaves.
    """

    weights: float
    kv: float
    work: float = 0.0

    @classmethod
    def of(cls, served: Served, tokens: int) -> Guest:
        """A draft under torch that reads prompts of up to `tokens` tokens, one at a time."""
        return cls(served.weights, served.kv_per_token * tokens)

    @property
    def bytes(self) -> float:
        """All of it."""
        return self.weights + self.kv + self.work


NOBODY = Guest(0.0, 0.0)


@dataclass(frozen=True)
class Memory:
    """What one of the target's GPUs holds, in bytes; what is left is for the target's KV cache.

    usable: `MEMORY_SHARE` of the GPU. target: its part of the weights. draft: what the draft takes
    here. kv_per_token: the GPU's part of the KV of one token.
    """

    usable: float
    target: float
    draft: Guest
    kv_per_token: float

    @property
    def kv(self) -> float:
        """Bytes of the target's KV cache; negative when what comes before it does not fit."""
        return self.usable - self.target - self.draft.bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens of the KV cache, in whole blocks of 64."""
        return max(int(self.kv / self.kv_per_token) // 64 * 64, 0)


def memory_of(gpu_memory: float, target: Served, draft: Guest = NOBODY) -> Memory:
    """Memory of one of the GPUs that share `target` evenly.

    draft: what it takes, where it is on this GPU too. A GPU has one KV head at least: with fewer
    heads than GPUs each is held by several.
    """
    heads = int(getattr(target.config, "num_key_value_heads", None) or target.gpus)
    return Memory(
        usable=gpu_memory * MEMORY_SHARE,
        target=target.weights / target.gpus,
        draft=draft,
        kv_per_token=target.kv_per_token / min(target.gpus, heads),
    )
