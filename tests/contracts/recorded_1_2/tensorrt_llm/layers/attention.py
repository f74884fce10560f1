"""The one call that every attention layer ends in.

sources: tensorrt_llm/functional.py @ 0071496dc625910229bf433821453636ef3770eb
    (gpt_attention, which the attention layer calls with all arguments by name; `num_heads` and
    `num_kv_heads` are those of the rank)
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
