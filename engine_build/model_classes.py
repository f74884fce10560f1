"""For `trtllm-build --model_cls_file`, which loads this file under a name of its own.

The classes come from an importable module: with several workers the build pickles them.
"""

from engine_build.rotated_models import RotatedLlama, RotatedQwen

__all__ = ["RotatedLlama", "RotatedQwen"]
