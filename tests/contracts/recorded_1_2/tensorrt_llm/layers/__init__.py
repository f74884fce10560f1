"""Layers of the TensorRT backend."""

from tensorrt_llm.layers import attention

__all__ = ["attention"]
