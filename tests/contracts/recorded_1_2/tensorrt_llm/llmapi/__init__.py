"""The LLM API.

sources:
    tensorrt_llm/llmapi/llm.py @ 4c05a74891e4df8066f08ed4ce14b0972abe4e25
    tensorrt_llm/llmapi/llm_args.py @ fcd3f31682808ae56118ae43c1d7864a3a945e6f
    tensorrt_llm/sampling_params.py @ a98a9061d72f6fd39f5d055ebdd2c6878a100e2c
    tensorrt_llm/executor/executor.py @ ed53795b33fc139493f762a1c6c53f691cf52d38
"""

from tensorrt_llm.llmapi import llm
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.llm_args import KvCacheConfig
from tensorrt_llm.sampling_params import SamplingParams

__all__ = ["LLM", "KvCacheConfig", "SamplingParams", "llm"]
