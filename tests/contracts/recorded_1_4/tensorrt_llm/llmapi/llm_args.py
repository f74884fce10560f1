"""Settings of the LLM API.

sources: tensorrt_llm/llmapi/llm_args.py (class KvCacheConfig, StrictBaseModel), version of 1.2
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
