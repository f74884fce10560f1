"""What the targets that are built ahead share: their model's files, their limits, their check."""

from __future__ import annotations

import logging
import secrets
from abc import abstractmethod
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.errors import ContextTooLong, InputError, TargetFailed
from trtllm_specprefill.models import EngineModel
from trtllm_specprefill.operations import prefill_operations, shortest_window
from trtllm_specprefill.plan import PositionSupport, PrunePlan
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.base import Step, Target
from trtllm_specprefill.target.evidence import PositionEvidence, informed
from trtllm_specprefill.target.manifest import Backend, Manifest
from trtllm_specprefill.target.positions import ENDED, Recorded, check_positions
from trtllm_specprefill.target.steps import Chunk, assemble

_log = logging.getLogger(__name__)


class EngineTarget(Target):
    """Answers with what `engine_build` made in `folder`, many requests at a time.

    block_reuse: keep KV blocks between requests, each prompt with gaps under a salt of its own.
    kv_cache_tokens: what the KV cache holds; when None, what the runtime finds room for.
    timeout_s: longest wait for the next token. evidence: which positions the model that it was
    built from answers better with. Raises `InputError` when TensorRT-LLM is not
    installed, or `folder` was built for another version or backend, and `TargetFailed` when the
    engine does not start.
    """

    backend: ClassVar[Backend]

    def __init__(
        self,
        folder: str | Path,
        model: EngineModel,
        manifest: Manifest,
        *,
        block_reuse: bool = False,
        kv_cache_tokens: int | None = None,
        timeout_s: float = 600.0,
        evidence: PositionEvidence | None = None,
    ) -> None:
        if manifest.backend != self.backend:
            raise InputError("engine", str(folder), f"one built for the backend {self.backend}")
        self.name, self.tokenizer = model.name, model.tokenizer
        self._model, self._manifest = model, manifest
        self._timeout, self._salted = timeout_s, block_reuse
        self._start(Path(folder), block_reuse, kv_cache_tokens)
        support = support_of(model, manifest, self._chunks if self.takes_requests else None)
        self.position_support = informed(support, evidence)

    def stream(self, plan: PrunePlan, sampling: Sampling) -> Generator[Step, None, None]:
        """See `Target.stream`. Raises `ContextTooLong` beyond the engine's KV length."""
        check_kv_fits(plan, sampling, self._manifest)
        yield from assemble(
            self._chunks(plan, sampling), self.tokenizer, sampling, self._model.end_ids
        )

    def operations(self, tokens: int) -> float:
        """See `Target.operations`."""
        return prefill_operations(self._model.config, tokens)

    @abstractmethod
    def _start(self, folder: Path, block_reuse: bool, kv_cache_tokens: int | None) -> None:
        """Start the engine, or hold this rank's part of it."""

    def _not_started(self, folder: Path, error: Exception) -> TargetFailed:
        """The engine's own words of why it did not start."""
        words = str(error) or type(error).__name__
        return TargetFailed(f"target {self.name}: {folder} could not be loaded: {words}")

    @abstractmethod
    def _chunks(self, plan: PrunePlan, sampling: Sampling) -> Generator[Chunk, None, None]:
        """The engine's tokens; closing it cancels the request. Raises `TargetFailed`."""

    def _log_ttft(self, metrics: Any) -> None:
        """Log a request's TTFT as the engine measured it; metrics: `RequestPerfMetrics` or None."""
        if metrics is not None:
            timing = metrics.timing_metrics
            waited = timing.first_token_time - timing.arrival_time
            _log.info("target %s: engine TTFT %.4f s", self.name, waited.total_seconds())

    def _needs_salt(self, plan: PrunePlan) -> bool:
        """Blocks are known by their tokens, not their positions: those elsewhere must not be met.

        A prompt pruned to contiguous positions is a dense one of what was kept.
        """
        return self._salted and plan.next_position != plan.input_ids.size


def fresh_salt() -> int:
    """A salt that no other request has."""
    return secrets.randbits(63) + 1


def support_of(
    model: EngineModel,
    manifest: Manifest,
    chunks: Callable[[PrunePlan, Sampling], Generator[Chunk, None, None]] | None,
) -> PositionSupport:
    """What an engine does with positions: what it was built for, and the check confirms.

    chunks: the engine's answer to a plan; None where it takes no requests.
    """
    honoured = manifest.original_positions
    if honoured and chunks is not None:

        def first_token(plan: PrunePlan) -> NDArray[np.int32]:
            tokens = [t for c in chunks(plan, Sampling(max_tokens=1)) for t in c.token_ids]
            return np.array(tokens[:1] or [ENDED], dtype=np.int32)

        probes = manifest.probes
        recorded = Recorded(probes.scattered, probes.contiguous) if probes else None
        check = check_positions(first_token, int(model.config.vocab_size), recorded)
        honoured = check.honoured
        _log.log(
            logging.INFO if honoured else logging.ERROR,
            "target %s: original positions %s: %s",
            model.name,
            "honoured" if honoured else "refused",
            check.detail,
        )
    return PositionSupport(
        honoured=honoured, window=shortest_window(model.config), context=manifest.positions
    )


def check_kv_fits(plan: PrunePlan, sampling: Sampling, manifest: Manifest) -> None:
    """Raise `ContextTooLong` when kept prompt and answer are longer than the engine's KV cache."""
    if plan.input_ids.size + sampling.max_tokens > manifest.kv_tokens:
        raise ContextTooLong(
            "prompt",
            f"{plan.input_ids.size} tokens to read",
            f"at most {manifest.kv_tokens} of them and max_tokens ({sampling.max_tokens}) together:"
            " the engine was built with that KV length",
        )
