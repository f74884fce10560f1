"""What runs requests for the LLM API."""

from tensorrt_llm.executor import result

__all__ = ["result"]
