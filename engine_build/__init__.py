"""Builds what is served: `python -m engine_build target` makes a target for TensorRT-LLM."""
