"""The network that is being made.

sources: tensorrt_llm/_common.py @ 73c0d691ea936a348448e00b0a1fe1c428da1ab7
"""

from __future__ import annotations

from typing import Any

network: Any = None


def default_trtnet() -> Any:
    return network
