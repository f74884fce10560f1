"""Models of the TensorRT backend.

sources: tensorrt_llm/models/__init__.py, stored version of 1.2
"""

from tensorrt_llm.models.modeling_utils import DecoderModelForCausalLM


class LLaMAForCausalLM(DecoderModelForCausalLM): ...


class QWenForCausalLM(DecoderModelForCausalLM): ...
