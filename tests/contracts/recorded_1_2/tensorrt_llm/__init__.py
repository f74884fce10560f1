"""Recordings of the API of TensorRT-LLM 1.2 that the targets use; see `tests/contracts/README.md`.

sources: tensorrt_llm/version.py @ b35ac1b64368513d215c57d2ed01d62d910df8da
"""

from tensorrt_llm import bindings, executor, inputs, llmapi
from tensorrt_llm.llmapi import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams", "bindings", "executor", "inputs", "llmapi"]
__version__ = "1.2.1"
