"""Models of the TensorRT backend.

sources: tensorrt_llm/models/__init__.py @ 02267d3d4fd886c3ad036f6580beb0847eac6e4b
"""

from tensorrt_llm.models.modeling_utils import DecoderModelForCausalLM


class LLaMAForCausalLM(DecoderModelForCausalLM): ...


class QWenForCausalLM(DecoderModelForCausalLM): ...
