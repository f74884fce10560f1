"""Kernels here run in Triton's interpreter; tests that compile use processes of their own."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The decorator of each kernel reads this when `plugins.importance.kernels` is first imported.
os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path[:0] = [str(ROOT), str(ROOT / "perf"), str(Path(__file__).parent)]
