"""Rotary settings of published models, in the words of transformers 5 or 4."""

from __future__ import annotations

from typing import Any

import transformers

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
}


def with_rope(kind: Any, rope: dict[str, Any], **fields: Any) -> Any:
    """A config of `kind` with these rotary parameters."""
    if not transformers.__version__.startswith("4."):
        return kind(rope_parameters=dict(rope), **fields)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    plain = scaling == {"rope_type": "default"}
    return kind(rope_theta=rope["rope_theta"], rope_scaling=None if plain else scaling, **fields)
