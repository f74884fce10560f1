"""Recordings of the API of TensorRT-LLM 1.4 that the targets use; see `tests/contracts/README.md`.

sources: tensorrt_llm/llmapi/llm.py, stored version of 1.4 (the one with PreprocessedInputs)
"""

from tensorrt_llm import executor, inputs, llmapi
from tensorrt_llm.llmapi import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams", "executor", "inputs", "llmapi"]
__version__ = "1.4.0rc1"
