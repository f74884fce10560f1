"""Kernels and TensorRT plugins of trtllm-specprefill."""
