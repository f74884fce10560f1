"""Recordings of the API of TensorRT-LLM 1.4 that the targets use; see `tests/contracts/README.md`.

sources: tensorrt_llm/__init__.py @ 1f064c467a211b4168555ca06bb9b801c64eae20
"""

from tensorrt_llm import executor, inputs, llmapi
from tensorrt_llm.llmapi import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams", "executor", "inputs", "llmapi"]
__version__ = "1.4.0rc1"
