"""Data beside the tokens of a prompt.

sources: tensorrt_llm/inputs/multimodal.py @ 3277953654b9b2863dae4f1cb81856b172837db4
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class MultimodalParams:
    multimodal_input: Any = None
    multimodal_data: dict[str, Any] | None = field(default_factory=dict)
    multimodal_runtime: Any = None

    def to_handle(self, element: str) -> None:
        if element != "multimodal_data":
            raise ValueError(f"Unsupported element '{element}'")
        assert self.multimodal_data is not None
        self.multimodal_data = {
            kind: {name: {"handle": tensor} for name, tensor in values.items()}
            for kind, values in self.multimodal_data.items()
        }
