"""The LLM API.

sources:
    tensorrt_llm/llmapi/__init__.py @ 1f064c467a211b4168555ca06bb9b801c64eae20
    tensorrt_llm/llmapi/llm.py @ 10066832d2dd98366524589f7494535458a945b3
"""

from tensorrt_llm.llmapi import llm
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.llm_args import KvCacheConfig
from tensorrt_llm.sampling_params import SamplingParams

__all__ = ["LLM", "KvCacheConfig", "SamplingParams", "llm"]
