"""Speculative prefill: a draft scores a long prompt, the target prefills what matters.

from trtllm_specprefill import SpecPrefill

model = SpecPrefill.from_pretrained(draft="smollm2-135m", target="smollm2-135m")
answer = model.generate([{"role": "user", "content": long_text}], keep=0.1)
print(answer.text, answer.plan.reason, answer.ttft_s)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtllm_specprefill.errors import (
        ContextTooLong,
        DraftFailed,
        InputError,
        SpecPrefillError,
        TargetFailed,
        UnsupportedModel,
    )
    from trtllm_specprefill.importance import Importance
    from trtllm_specprefill.models import Model, load_model
    from trtllm_specprefill.pipeline import Generation, SpecPrefill, Streamed
    from trtllm_specprefill.plan import PrunePlan, Reason
    from trtllm_specprefill.prompt import Prompt, prepare
    from trtllm_specprefill.selection import Kept, select
    from trtllm_specprefill.settings import Sampling, Settings

__version__ = "0.1.0"

__all__ = [
    "ContextTooLong",
    "DraftFailed",
    "Generation",
    "Importance",
    "InputError",
    "Kept",
    "Model",
    "Prompt",
    "PrunePlan",
    "Reason",
    "Sampling",
    "Settings",
    "SpecPrefill",
    "SpecPrefillError",
    "Streamed",
    "TargetFailed",
    "UnsupportedModel",
    "load_model",
    "prepare",
    "select",
]

# Names are imported when first used, so that a part of the library asks only for what it needs:
# the importance kernels run where there is torch and little else.
_HOMES = {
    "errors": (
        "ContextTooLong",
        "DraftFailed",
        "InputError",
        "SpecPrefillError",
        "TargetFailed",
        "UnsupportedModel",
    ),
    "importance": ("Importance",),
    "models": ("Model", "load_model"),
    "pipeline": ("Generation", "SpecPrefill", "Streamed"),
    "plan": ("PrunePlan", "Reason"),
    "prompt": ("Prompt", "prepare"),
    "selection": ("Kept", "select"),
    "settings": ("Sampling", "Settings"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
