"""The importance of one layer's keys, as kernels, as a torch op and as a TensorRT plugin.

    kernels          the two Triton-language kernels, their tensors and their cost
    launch           block sizes, constants and grids, from shapes
    torch_op         `importance_layer` and the op `specprefill::importance_layer`
    aot              PTX and cubin without a GPU
    tensorrt_plugin  the kernels as two quickly deployable plugins, and the pair as one call
    onnx_nodes       the op as one ONNX node, and that node as the two plugins

Importing this package registers the torch op; the others load what they need when imported.
"""

from plugins.importance.torch_op import importance_layer

__all__ = ["importance_layer"]
