"""The target as a TensorRT engine behind TensorRT-LLM's C++ executor (up to 1.3.0rc20).

The engine must be built by `engine_build` with the rotation inside the network: then the
`position_ids` of a request reach it, and generated tokens follow the last of them.
"""

from __future__ import annotations

from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_specprefill.errors import InputError, TargetFailed
from trtllm_specprefill.plan import PrunePlan
from trtllm_specprefill.settings import GREEDY_BELOW, Sampling
from trtllm_specprefill.target.engine import EngineTarget, fresh_salt
from trtllm_specprefill.target.steps import Chunk

if TYPE_CHECKING:
    from tensorrt_llm.bindings import executor as trtllm


class ExecutorTarget(EngineTarget):
    """Answers with a TensorRT engine through one executor; see `EngineTarget`.

    On the ranks above 0 of a multi-GPU engine the object only holds the rank's executor.
    """

    backend = "tensorrt"

    def _start(self, folder: Path, block_reuse: bool, kv_cache_tokens: int | None) -> None:
        built = self._manifest.tensorrt_llm
        try:
            import tensorrt_llm
            from tensorrt_llm.bindings import executor
        except ImportError as error:
            raise InputError(
                "target",
                "trtllm_executor",
                f"with TensorRT-LLM {built} installed (pip install tensorrt-llm=={built}, or"
                f" NVIDIA's container); after 1.3.0rc20 there is no TensorRT backend ({error})",
            ) from error
        self._manifest.check_version(tensorrt_llm.__version__)
        config = executor.ExecutorConfig(
            max_beam_width=1,
            kv_cache_config=executor.KvCacheConfig(
                enable_block_reuse=block_reuse, max_tokens=kv_cache_tokens
            ),
            enable_chunked_context=True,
        )
        try:
            self._executor = executor.Executor(folder, executor.ModelType.DECODER_ONLY, config)
        except Exception as error:  # the executor raises what its C++ code throws
            raise self._not_started(folder, error) from error
        self.takes_requests = self._executor.can_enqueue_requests()
        self.ranks = self._manifest.ranks

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
            cache_salt_id=fresh_salt() if self._needs_salt(plan) else None,
        )

    def _chunks(self, plan: PrunePlan, sampling: Sampling) -> Generator[Chunk, None, None]:
        if not self.takes_requests:
            raise TargetFailed(f"target {self.name}: only rank 0 takes requests")
        try:
            identity = self._executor.enqueue_request(self.request(plan, sampling))
        except Exception as error:  # the executor raises what its C++ code throws
            raise TargetFailed(f"target {self.name}: {error}") from error
        final = False
        try:
            while not final:
                responses = self._executor.await_responses(
                    id=identity, timeout=timedelta(seconds=self._timeout)
                )
                if not responses:
                    raise TargetFailed(f"target {self.name}: no token within {self._timeout:g} s")
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
        self._log_ttft(result.request_perf_metrics)
        if why in (FinishReason.END_ID, FinishReason.STOP_WORDS):
            return Chunk(tokens, "stop")
        if why == FinishReason.LENGTH:
            return Chunk(tokens, "length")
        raise TargetFailed(f"target {self.name}: the engine ended the request: {why.name}")
