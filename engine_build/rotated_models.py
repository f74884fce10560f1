"""TensorRT-LLM models that rotate queries and keys inside the network, by their position ids.

The attention layers are TensorRT-LLM's own. Each ends in one call of `gpt_attention`, with the
packed queries, keys and values; while a network is made, that call first rotates them. The
plugin itself is told of learned positions, which it leaves to the network (the way out that
NVIDIA/TensorRT-LLM issue 1797 found). Works on the TensorRT backend, up to 1.3.0rc20.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorrt as trt
from tensorrt_llm._common import default_trtnet
from tensorrt_llm.functional import PositionEmbeddingType, Tensor, _create_tensor
from tensorrt_llm.layers import attention as attention_layers
from tensorrt_llm.models import LLaMAForCausalLM, QWenForCausalLM
from tensorrt_llm.models.modeling_utils import DecoderModelForCausalLM

from engine_build.target import ENGINE_ENVIRONMENT
from trtllm_specprefill.models import load_config
from trtllm_specprefill.target.manifest import Manifest
from trtllm_specprefill.target.rotary import RotaryTable, Rotation, TensorRTOperators, rotary_table

# Networks point into these tables until their engines are built.
_held: list[TensorRTOperators] = []


def engine_table() -> RotaryTable:
    """The rotary table for the engine that is being built, as its manifest says."""
    folder = os.environ[ENGINE_ENVIRONMENT]
    manifest = Manifest.read(folder)
    return rotary_table(load_config(manifest.described_in(folder)), manifest.positions)


@contextmanager
def rotated_attention(position_ids: Tensor, table: RotaryTable) -> Iterator[None]:
    """Within it, attention that is added to the network rotates by `position_ids` first."""
    plugin: Callable[..., Any] = attention_layers.gpt_attention
    operators = TensorRTOperators(trt, default_trtnet())
    rotation = Rotation.of(operators, table)

    def attention(*, qkv: Tensor, **others: Any) -> Any:
        if others["position_embedding_type"] != PositionEmbeddingType.learned_absolute:
            raise ValueError("the attention plugin would rotate a second time")
        turned = rotation.packed(
            qkv.trt_tensor, position_ids.trt_tensor, others["num_heads"], others["num_kv_heads"]
        )
        last = default_trtnet().add_identity(turned)
        return plugin(qkv=_create_tensor(last.get_output(0), last), **others)

    _held.append(operators)
    attention_layers.gpt_attention = attention
    try:
        yield
    finally:
        attention_layers.gpt_attention = plugin


class _Rotated(DecoderModelForCausalLM):
    """What the two model classes do differently from TensorRT-LLM's."""

    def __init__(self, config: Any) -> None:
        config.position_embedding_type = PositionEmbeddingType.learned_absolute
        super().__init__(config)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **others: Any) -> Any:
        """Make the network; the same inputs and outputs as TensorRT-LLM's own."""
        if position_ids is None:
            raise ValueError("no position_ids on this rank: pipeline parallelism is not supported")
        with rotated_attention(position_ids, engine_table()):
            return super().forward(input_ids, position_ids=position_ids, **others)


class RotatedLlama(_Rotated, LLaMAForCausalLM):
    """Llama 2, 3, 3.1 and what shares their layers."""


class RotatedQwen(_Rotated, QWenForCausalLM):
    """Qwen2, Qwen2.5 and Qwen3; the query and key norms of Qwen3 come before the rotation."""
