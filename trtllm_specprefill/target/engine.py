"""What the targets that are built ahead share: their model's files, their limits, their check."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.errors import ContextTooLong
from trtllm_specprefill.models import EngineModel
from trtllm_specprefill.operations import shortest_window
from trtllm_specprefill.plan import PositionSupport, PrunePlan
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.manifest import Manifest
from trtllm_specprefill.target.positions import ENDED, Recorded, check_positions
from trtllm_specprefill.target.steps import Chunk

_log = logging.getLogger(__name__)


def support_of(
    model: EngineModel,
    manifest: Manifest,
    chunks: Callable[[PrunePlan, Sampling], Generator[Chunk, None, None]] | None,
) -> PositionSupport:
    """What an engine does with positions: what it was built for, and the check confirms.

    chunks: the engine's answer to a plan; None where it takes no requests.
    """
    honoured = manifest.original_positions
    if honoured and chunks is not None:

        def first_token(plan: PrunePlan) -> NDArray[np.int32]:
            tokens = [t for c in chunks(plan, Sampling(max_tokens=1)) for t in c.token_ids]
            return np.array(tokens[:1] or [ENDED], dtype=np.int32)

        probes = manifest.probes
        recorded = Recorded(probes.scattered, probes.contiguous) if probes else None
        check = check_positions(first_token, int(model.config.vocab_size), recorded)
        honoured = check.honoured
        _log.log(
            logging.INFO if honoured else logging.ERROR,
            "target %s: original positions %s: %s",
            model.name,
            "honoured" if honoured else "refused",
            check.detail,
        )
    return PositionSupport(
        honoured=honoured, window=shortest_window(model.config), context=manifest.positions
    )


def check_kv_fits(plan: PrunePlan, sampling: Sampling, manifest: Manifest) -> None:
    """Raise `ContextTooLong` when kept prompt and answer are longer than the engine's KV cache."""
    if plan.input_ids.size + sampling.max_tokens > manifest.kv_tokens:
        raise ContextTooLong(
            "prompt",
            f"{plan.input_ids.size} tokens to read",
            f"at most {manifest.kv_tokens} of them and max_tokens ({sampling.max_tokens}) together:"
            " the engine was built with that KV length",
        )
