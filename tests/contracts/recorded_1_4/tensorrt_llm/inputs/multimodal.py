"""Data beside the tokens of a prompt.

sources: tensorrt_llm/inputs/multimodal.py @ 01138754b3f4b047dfacd714ff121cc7f4df6d67
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class MultimodalParams:
    multimodal_input: Any = None
    multimodal_data: dict[str, Any] | None = field(default_factory=dict)
    multimodal_runtime: Any = None
    input_ids_start_offset: int = 0
    mm_item_order: list[dict[str, Any]] | None = None
    encoder_event: Any = None

    def to_handle(self, element: str) -> None:
        if element != "multimodal_data":
            raise ValueError(f"Unsupported element '{element}'")
        assert self.multimodal_data is not None
        self.multimodal_data = {
            kind: {name: {"handle": tensor} for name, tensor in values.items()}
            for kind, values in self.multimodal_data.items()
        }
