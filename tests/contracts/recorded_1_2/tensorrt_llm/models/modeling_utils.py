"""What every decoder of the TensorRT backend is.

sources: tensorrt_llm/models/modeling_utils.py @ 01ea6d79d454bb3ab10c7510a6f706ba039090c2
    (DecoderModelForCausalLM.forward: input_ids, position_ids, then the rest by name)
"""

from __future__ import annotations

from typing import Any

from tensorrt_llm.functional import Tensor
from tensorrt_llm.layers import attention


class DecoderModelForCausalLM:
    def __init__(self, config: Any) -> None:
        self.config = config

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, **others: Any
    ) -> list[Tensor]:
        contexts = []
        for qkv in others["hidden_states"]:  # what each layer's own projection would give
            context, _ = attention.gpt_attention(
                qkv=qkv,
                past_key_value=None,
                num_heads=self.config.num_attention_heads,
                num_kv_heads=self.config.num_key_value_heads,
                hidden_size_per_head=self.config.head_size,
                position_embedding_type=self.config.position_embedding_type,
                rotary_cos_sin=None,
            )
            contexts.append(context)
        return contexts
