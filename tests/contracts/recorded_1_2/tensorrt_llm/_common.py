"""The network that is being made.

sources: examples/openai_triton/manual_plugin/plugin.py @ 5c0c175 (imports it from here)
    tensorrt_llm/_common.py, stored version of 1.2
"""

from __future__ import annotations

from typing import Any

network: Any = None


def default_trtnet() -> Any:
    return network
