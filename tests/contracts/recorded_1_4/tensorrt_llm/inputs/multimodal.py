"""Data beside the tokens of a prompt.

sources: tensorrt_llm/inputs/multimodal.py (class MultimodalParams), stored versions of 1.2 and 1.4
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class MultimodalParams:
    multimodal_input: Any = None
    multimodal_data: dict[str, Any] | None = field(default_factory=dict)
    multimodal_runtime: Any = None
