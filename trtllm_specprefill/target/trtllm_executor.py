"""The target as a TensorRT engine behind TensorRT-LLM's C++ executor (up to 1.3.0rc20).

The engine must be built by `engine_build` with the rotation inside the network: then the
`position_ids` of a request reach it, and generated tokens follow the last of them.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_specprefill.errors import InputError, TargetFailed
from trtllm_specprefill.models import EngineModel
from trtllm_specprefill.operations import prefill_operations
from trtllm_specprefill.plan import PrunePlan, Reason
from trtllm_specprefill.settings import GREEDY_BELOW, Sampling
from trtllm_specprefill.target.base import Step, Target
from trtllm_specprefill.target.engine import check_kv_fits, support_of
from trtllm_specprefill.target.manifest import Manifest
from trtllm_specprefill.target.steps import Chunk, assemble

if TYPE_CHECKING:
    from tensorrt_llm.bindings import executor as trtllm

_log = logging.getLogger(__name__)


class ExecutorTarget(Target):
    """Answers with an engine in `folder`, one executor for many requests at a time.

    block_reuse: keep KV blocks between requests, each pruned prompt under a salt of its own.
    timeout_s: longest wait for the next token. On the ranks above 0 of a multi-GPU engine the
    object only holds the rank's executor. Raises `InputError` when TensorRT-LLM's executor is
    not installed, or `folder` is no engine for it.
    """

    def __init__(
        self,
        folder: str | Path,
        model: EngineModel,
        manifest: Manifest,
        *,
        block_reuse: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        if manifest.backend != "tensorrt":
            raise InputError("engine", str(folder), "an engine of the TensorRT backend")
        try:
            from tensorrt_llm.bindings import executor
        except ImportError as error:
            raise InputError(
                "target",
                "trtllm_executor",
                "with TensorRT-LLM 1.2.1 installed (pip install tensorrt-llm==1.2.1, or NVIDIA's"
                f" container); later versions have no TensorRT backend ({error})",
            ) from error
        self.name, self.tokenizer = model.name, model.tokenizer
        self._model, self._manifest = model, manifest
        self._timeout = timedelta(seconds=timeout_s)
        self._salted = block_reuse
        self._executor = executor.Executor(
            Path(folder),
            executor.ModelType.DECODER_ONLY,
            executor.ExecutorConfig(
                max_beam_width=1,
                kv_cache_config=executor.KvCacheConfig(enable_block_reuse=block_reuse),
                enable_chunked_context=True,
            ),
        )
        self.position_support = support_of(
            model,
            manifest,
            self._chunks if self._executor.can_enqueue_requests() else None,
        )

    def stream(self, plan: PrunePlan, sampling: Sampling) -> Generator[Step, None, None]:
        """See `Target.stream`. Raises `ContextTooLong` beyond the engine's KV length."""
        check_kv_fits(plan, sampling, self._manifest)
        yield from assemble(
            self._chunks(plan, sampling), self.tokenizer, sampling, self._model.end_ids
        )

    def operations(self, tokens: int) -> float:
        """See `Target.operations`."""
        return prefill_operations(self._model.config, tokens)

    def close(self) -> None:
        """See `Target.close`. Stops the other ranks too."""
        self._executor.shutdown()

    def request(self, plan: PrunePlan, sampling: Sampling) -> trtllm.Request:
        """The request for `plan`, as the executor takes it."""
        from tensorrt_llm.bindings import executor

        end_id, *other_ends = sorted(self._model.end_ids) or (None,)
        greedy = sampling.temperature < GREEDY_BELOW
        original = plan.positions == "original" and self._manifest.original_positions
        return executor.Request(
            plan.input_ids.tolist(),
            sampling.max_tokens,
            streaming=True,
            sampling_config=executor.SamplingConfig(
                beam_width=1,
                top_k=1 if greedy else sampling.top_k or None,
                # Without a top_p the runtime takes 0, and 0 with no top_k is greedy.
                top_p=None if greedy else sampling.top_p,
                temperature=None if greedy else sampling.temperature,
                seed=sampling.seed,
            ),
            output_config=executor.OutputConfig(
                exclude_input_from_output=True, return_perf_metrics=True
            ),
            end_id=end_id,
            pad_id=end_id,
            stop_words=[[token] for token in other_ends] or None,
            position_ids=plan.position_ids.tolist() if original else None,
            cache_salt_id=self._salt(plan),
        )

    def _salt(self, plan: PrunePlan) -> int | None:
        """Blocks are known by their tokens, not their positions: pruned ones must not be met."""
        pruned = plan.reason is Reason.PRUNED
        return secrets.randbits(63) + 1 if self._salted and pruned else None

    def _chunks(self, plan: PrunePlan, sampling: Sampling) -> Generator[Chunk, None, None]:
        if not self._executor.can_enqueue_requests():
            raise TargetFailed(f"target {self.name}: only rank 0 takes requests")
        try:
            identity = self._executor.enqueue_request(self.request(plan, sampling))
        except Exception as error:  # the executor raises what its C++ code throws
            raise TargetFailed(f"target {self.name}: {error}") from error
        final = False
        try:
            while not final:
                responses = self._executor.await_responses(id=identity, timeout=self._timeout)
                if not responses:
                    raise TargetFailed(
                        f"target {self.name}: no token within {self._timeout.total_seconds():g} s"
                    )
                for response in responses:
                    if response.has_error():
                        final = True
                        raise TargetFailed(f"target {self.name}: {response.error_msg}")
                    final = response.result.is_final
                    yield self._chunk(response.result)
        finally:
            if not final:
                self._executor.cancel_request(id=identity)

    def _chunk(self, result: trtllm.Result) -> Chunk:
        tokens = result.output_token_ids[0]
        if not result.is_final:
            return Chunk(tokens)
        from tensorrt_llm.bindings.executor import FinishReason

        why = result.finish_reasons[0]
        if result.request_perf_metrics is not None:
            timing = result.request_perf_metrics.timing_metrics
            waited = timing.first_token_time - timing.arrival_time
            _log.info("target %s: engine TTFT %.4f s", self.name, waited.total_seconds())
        if why in (FinishReason.END_ID, FinishReason.STOP_WORDS):
            return Chunk(tokens, "stop")
        if why == FinishReason.LENGTH:
            return Chunk(tokens, "length")
        raise TargetFailed(f"target {self.name}: the engine ended the request: {why.name}")
