"""The importance of one layer's keys, as kernels and as a TensorRT plugin.

The torch op `specprefill::importance_layer`, its plain form and its Python call are the library's
(`trtllm_specprefill.importance_op`); here is what runs it on a GPU.

    kernels          the two Triton-language kernels, their tensors and their cost
    launch           block sizes, constants and grids, from shapes
    torch_op         the kernels under torch: the CUDA form of `specprefill::importance_layer`
    aot              PTX and cubin without a GPU
    tensorrt_plugin  the kernels as two quickly deployable plugins, and the pair as one call
    onnx_nodes       the op as one ONNX node, and that node as the two plugins

Importing this package gives the op its CUDA form where triton is installed; the others load
what they need when imported.
"""

from plugins.importance import torch_op
from trtllm_specprefill.importance_op import importance_layer

torch_op.register()

__all__ = ["importance_layer"]
