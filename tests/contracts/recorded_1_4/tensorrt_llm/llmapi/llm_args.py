"""Settings of the LLM API.

sources: tensorrt_llm/llmapi/llm_args.py (KvCacheConfig, TorchLlmArgs), stored version of 1.4
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class KvCacheConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = None
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True


class TorchLlmArgs(BaseModel):
    """What `LLM` does with its other arguments: unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")

    pipeline_parallel_size: int = 1
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    kv_cache_config: KvCacheConfig = KvCacheConfig()
