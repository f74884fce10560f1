"""Native bindings."""

from tensorrt_llm.bindings import executor

__all__ = ["executor"]
