"""Settings of the LLM API.

sources: tensorrt_llm/llmapi/llm_args.py @ 1f064c467a211b4168555ca06bb9b801c64eae20
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from tests.contracts import engine


class KvCacheConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    host_cache_size: int | None = None
    event_buffer_max_size: int = 0
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    max_gpu_total_bytes: int = 0
    tokens_per_block: int = 32


class TorchLlmArgs(BaseModel):
    """What `LLM` does with its other arguments: unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")

    pipeline_parallel_size: int = 1
    enable_chunked_prefill: bool = False
    max_batch_size: int = 2048
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    kv_cache_config: KvCacheConfig = KvCacheConfig()

    @engine.stand_in
    def refuses(self, prompt_tokens: int) -> bool:
        """Whether a prompt would have to be read in one step, and is too long for that."""
        return not self.enable_chunked_prefill and prompt_tokens > self.max_num_tokens
