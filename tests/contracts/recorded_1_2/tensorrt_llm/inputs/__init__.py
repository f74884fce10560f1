"""What goes into the LLM API."""

from tensorrt_llm.inputs import multimodal

__all__ = ["multimodal"]
