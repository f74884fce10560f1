"""A request of the LLM API as the engine sees it, after the checks that the runtime makes.

sources: tensorrt_llm/_torch/pyexecutor/model_engine.py @ 1a0dc5f70054f66d892df6a964996fc5ead6f81e
    `mrope_position_ids` is cut along its last axis and `mrope_position_deltas` expanded to
    [3, 1, 1]; what one step reads must fit into `max_num_tokens`.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.contracts.engine import Job


def job(tokens: list[int], params: Any, multimodal: Any, salt: int | str | None) -> Job:
    """See the module."""
    positions = None
    config = ((multimodal.multimodal_data if multimodal else None) or {}).get("mrope_config")
    if config is not None:
        ids, delta = (
            config[name]["handle"] for name in ("mrope_position_ids", "mrope_position_deltas")
        )
        assert ids.dtype is torch.int32, "mrope_position_ids must be int32"
        assert ids.shape == (3, 1, len(tokens)), "mrope_position_ids must be [3, 1, tokens]"
        assert delta.dtype is torch.int32, "mrope_position_deltas must be int32"
        assert bool((ids == ids[:1]).all()), "the axes of a text differ"
        following = (len(tokens) + delta).expand(3, 1, 1)  # of the first generated token
        positions = tuple(ids[0, 0].tolist())
        assert positions[-1] + 1 == int(following[0, 0, 0]), "the delta leaves a gap"
    ends = () if params.end_id in (None, -1) else (params.end_id,)
    stops = (*(params.stop_token_ids or ()), *ends)
    return Job(tuple(tokens), positions, params.max_tokens, stops, params, salt)
