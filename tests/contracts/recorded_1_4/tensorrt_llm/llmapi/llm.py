"""`LLM` of 1.4: preprocessed inputs come through the front door.

sources: tensorrt_llm/llmapi/llm.py @ 10066832d2dd98366524589f7494535458a945b3
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tensorrt_llm.executor.result import GenerationResult
from tensorrt_llm.inputs.multimodal import MultimodalParams
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tensorrt_llm.sampling_params import SamplingParams
from tests.contracts import engine
from tests.contracts.llm_jobs import job


@dataclass
class PreprocessedInputs:
    prompt_token_ids: list[int]
    multimodal_params: MultimodalParams | None = None
    encoder_input_token_ids: list[int] | None = None


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
        self.tokenizer = None if skip_tokenizer_init else tokenizer
        cache = self.args.kv_cache_config
        self._runs = engine.started(cache.enable_block_reuse, cache.max_tokens)

    def generate_async(
        self,
        inputs: PreprocessedInputs,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        conversation_params: Any = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> GenerationResult:
        assert sampling_params is not None
        if sampling_params.end_id is None and self.tokenizer is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if self.args.refuses(len(inputs.prompt_token_ids)):
            raise RuntimeError("The prompt length should not exceed max_num_tokens")
        asked = job(inputs.prompt_token_ids, sampling_params, inputs.multimodal_params, cache_salt)
        return GenerationResult(self._runs, self._runs.enqueue(asked))

    def shutdown(self) -> None:
        self._runs.stop()
