"""The LLM API.

sources:
    tensorrt_llm/llmapi/llm.py, stored version of 1.4 (file version 55216765702)
    tensorrt_llm/llmapi/llm_args.py (class KvCacheConfig), stored version of 1.2
    tensorrt_llm/sampling_params.py @ a98a9061d72f6fd39f5d055ebdd2c6878a100e2c
"""

from tensorrt_llm.llmapi import llm
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.llm_args import KvCacheConfig
from tensorrt_llm.sampling_params import SamplingParams

__all__ = ["LLM", "KvCacheConfig", "SamplingParams", "llm"]
