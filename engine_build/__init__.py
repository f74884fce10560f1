"""Builds what is served: `target` for TensorRT-LLM, `draft` for onnxruntime and TensorRT."""
