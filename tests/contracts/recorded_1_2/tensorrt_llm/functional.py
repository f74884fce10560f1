"""Tensors of a network.

sources: tensorrt_llm/functional.py @ 0071496dc625910229bf433821453636ef3770eb
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class PositionEmbeddingType(IntEnum):
    learned_absolute = 0
    rope_gptj = 1
    rope_gpt_neox = 2


class Tensor:
    def __init__(self, trt_tensor: Any) -> None:
        self.trt_tensor = trt_tensor


def _create_tensor(trt_tensor: Any, producer: Any) -> Tensor:
    assert producer.get_output(0) is not None
    return Tensor(trt_tensor)
