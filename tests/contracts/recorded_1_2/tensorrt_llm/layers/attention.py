"""The one call that every attention layer ends in.

sources: tensorrt_llm/layers/attention.py, stored version of 1.2 (65982961227)
    There all arguments are given by name; `num_heads` and `num_kv_heads` are those of the rank.
"""

from __future__ import annotations

from typing import Any

from tensorrt_llm.functional import PositionEmbeddingType, Tensor


def gpt_attention(
    *,
    qkv: Tensor,
    past_key_value: Any,
    num_heads: int,
    num_kv_heads: int,
    hidden_size_per_head: int,
    position_embedding_type: PositionEmbeddingType,
    **others: Any,
) -> tuple[Tensor, Any]:
    return qkv, past_key_value
