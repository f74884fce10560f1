"""`LLM` and what it runs requests with.

sources:
    tensorrt_llm/llmapi/llm.py @ 4c05a74891e4df8066f08ed4ce14b0972abe4e25
    tensorrt_llm/executor/executor.py @ ed53795b33fc139493f762a1c6c53f691cf52d38
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from tensorrt_llm.executor.result import GenerationResult
from tensorrt_llm.inputs.multimodal import MultimodalParams
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tensorrt_llm.sampling_params import SamplingParams
from tests.contracts import engine
from tests.contracts.llm_jobs import job


class GenerationExecutor:
    @engine.stand_in
    def __init__(self, runs: engine.Engine, args: TorchLlmArgs) -> None:
        self._engine, self._args = runs, args

    def generate_async(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        query_token_ids: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        postproc_params: Any = None,
        multimodal_params: MultimodalParams | None = None,
        scheduling_params: Any = None,
        cache_salt_id: int | None = None,
        arrival_time: float | None = None,
    ) -> GenerationResult:
        if self._args.refuses(len(prompt_token_ids)):
            raise RuntimeError("total_num_tokens should be less than or equal to max_num_tokens")
        asked = job(prompt_token_ids, sampling_params, multimodal_params, cache_salt_id)
        return GenerationResult(self._engine, self._engine.enqueue(asked))


class LLM:
    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: Literal["auto", "slow"] = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.args = TorchLlmArgs(**kwargs)
        cache = self.args.kv_cache_config
        runs = engine.started(cache.enable_block_reuse, cache.max_tokens)
        self._executor = GenerationExecutor(runs, self.args)
        self._runs = runs

    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> GenerationResult:
        raise NotImplementedError("1.2 offers no way for position ids here")

    def shutdown(self) -> None:
        self._runs.stop()
