"""The target as TensorRT-LLM's LLM API on its PyTorch backend (1.2 to 1.4).

Position ids travel as MRoPE positions, three equal rows of them; the checkpoint's config must
say so, which `engine_build` sees to. Every request carries them, dense ones too: in 1.2 a batch
in which only some do gives a position tensor that is too short.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trtllm_specprefill.errors import InputError, TargetFailed
from trtllm_specprefill.plan import PrunePlan
from trtllm_specprefill.settings import GREEDY_BELOW, Sampling
from trtllm_specprefill.target.engine import EngineTarget, fresh_salt
from trtllm_specprefill.target.positions import mrope_position_deltas, mrope_position_ids
from trtllm_specprefill.target.steps import Chunk

if TYPE_CHECKING:
    from tensorrt_llm import SamplingParams
    from tensorrt_llm.executor.result import CompletionOutput, GenerationResult
    from tensorrt_llm.inputs.multimodal import MultimodalParams


class LLMTarget(EngineTarget):
    """Answers with a checkpoint through one `LLM`; see `EngineTarget`."""

    backend = "pytorch"

    def _start(self, folder: Path, block_reuse: bool, kv_cache_tokens: int | None) -> None:
        try:
            import tensorrt_llm
            from tensorrt_llm.llmapi import LLM, KvCacheConfig
        except ImportError as error:
            raise InputError(
                "target",
                "trtllm_llm",
                "with TensorRT-LLM 1.2 to 1.4 installed (pip install tensorrt-llm==1.2.1, or"
                f" NVIDIA's container) ({error})",
            ) from error
        manifest = self._manifest
        manifest.check_version(tensorrt_llm.__version__)
        cache = KvCacheConfig(enable_block_reuse=block_reuse, max_tokens=kv_cache_tokens)
        try:
            self._llm = LLM(
                model=str(folder),
                skip_tokenizer_init=True,
                tensor_parallel_size=manifest.tensor_parallel,
                pipeline_parallel_size=manifest.pipeline_parallel,
                max_batch_size=manifest.batch_size,
                max_seq_len=manifest.kv_tokens,
                # Else a prompt longer than one step reads, 8,192 tokens, is refused.
                enable_chunked_prefill=True,
                kv_cache_config=cache,
            )
        except Exception as error:  # whatever its workers end with
            raise self._not_started(folder, error) from error

    def close(self) -> None:
        """See `Target.close`. Stops the other ranks too."""
        self._llm.shutdown()

    def _params(self, sampling: Sampling) -> SamplingParams:
        from tensorrt_llm import SamplingParams

        # Without an end id `LLM` asks its tokenizer for one; it has none, and -1 is no token.
        end_id, *other_ends = sorted(self._model.end_ids) or (-1,)
        greedy = sampling.temperature < GREEDY_BELOW
        return SamplingParams(
            end_id=end_id,
            pad_id=end_id,
            max_tokens=sampling.max_tokens,
            stop_token_ids=other_ends or None,
            top_k=1 if greedy else sampling.top_k or None,
            # Without a top_p the runtime takes 0, and 0 with no top_k is greedy.
            top_p=None if greedy else sampling.top_p,
            temperature=None if greedy else sampling.temperature,
            seed=sampling.seed,
            return_perf_metrics=True,
            detokenize=False,
            add_special_tokens=False,
        )

    def _positions(self, plan: PrunePlan) -> MultimodalParams | None:
        """The plan's positions beside its tokens; None for a checkpoint that takes none."""
        from tensorrt_llm.inputs.multimodal import MultimodalParams

        if not self._manifest.original_positions:
            return None
        rotary = {
            "mrope_position_ids": torch.from_numpy(mrope_position_ids(plan)),
            "mrope_position_deltas": torch.from_numpy(mrope_position_deltas(plan)),
        }
        positions = MultimodalParams(multimodal_data={"mrope_config": rotary})
        positions.to_handle("multimodal_data")  # as `LLM` does before tensors go to its workers
        return positions

    def _submit(self, plan: PrunePlan, sampling: Sampling) -> GenerationResult:
        """Start a request, by the way the installed version has for position ids."""
        from tensorrt_llm.llmapi import llm

        ids, params = plan.input_ids.tolist(), self._params(sampling)
        positions = self._positions(plan)
        salted = self._needs_salt(plan)
        inputs_of = getattr(llm, "PreprocessedInputs", None)
        if inputs_of is not None:  # from 1.3 on
            result: GenerationResult = self._llm.generate_async(
                inputs_of(prompt_token_ids=ids, multimodal_params=positions),
                sampling_params=params,
                streaming=True,
                cache_salt=str(fresh_salt()) if salted else None,
            )
            return result
        return self._llm._executor.generate_async(
            ids,
            params,
            streaming=True,
            multimodal_params=positions,
            cache_salt_id=fresh_salt() if salted else None,
        )

    def _chunks(self, plan: PrunePlan, sampling: Sampling) -> Generator[Chunk, None, None]:
        try:
            result = self._submit(plan, sampling)
        except Exception as error:  # the engine raises what it likes
            raise TargetFailed(f"target {self.name}: {error}") from error
        try:
            while not result.finished:
                self._await(result)
                try:
                    result._result_step()
                except Exception as error:
                    raise TargetFailed(f"target {self.name}: {error}") from error
                output = result.outputs[0]
                if result.finished and output.finish_reason is None:
                    words = getattr(result, "error", None) or "the engine gave no reason to end"
                    raise TargetFailed(f"target {self.name}: {words}")
                yield self._chunk(output)
        finally:
            if not result.finished:
                result.abort()

    def _await(self, result: GenerationResult) -> None:
        """Wait for the next response: in 1.2 a step does so for ever, whatever its timeout is."""
        coming = result.queue
        with coming.not_empty:
            if not coming.not_empty.wait_for(lambda: coming.queue, self._timeout):
                raise TargetFailed(f"target {self.name}: no token within {self._timeout:g} s")

    def _chunk(self, output: CompletionOutput) -> Chunk:
        if output.finish_reason is not None:
            self._log_ttft(output.request_perf_metrics)
        if output.finish_reason in (None, "stop", "length"):
            return Chunk(output.token_ids_diff, output.finish_reason)
        raise TargetFailed(
            f"target {self.name}: the engine ended the request: {output.finish_reason}"
        )
