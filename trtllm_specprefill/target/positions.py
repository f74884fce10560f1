"""How position ids reach an engine, and the check at load that they have an effect.

TensorRT-LLM takes position ids in several places and ignores them in most without a word, so
no target is believed: each is asked the same questions at scattered and at contiguous positions
before it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.plan import PrunePlan, Reason

_PROBES, _TOKENS, _GAP = 6, 24, 7
ENDED = -1  # in the place of a token: the answer to a probe ended before its first


@dataclass(frozen=True)
class PositionCheck:
    """honoured: other positions give other answers, and those that torch gave. detail: in words."""

    honoured: bool
    detail: str


@dataclass(frozen=True)
class Recorded:
    """What torch answered to each probe, recorded when a target was built.

    scattered, contiguous: one greedy token a probe, at either kind of positions; `ENDED` for an
    end id, which an engine does not show.
    """

    scattered: tuple[int, ...]
    contiguous: tuple[int, ...]


def probe_plans(vocabulary: int) -> tuple[tuple[PrunePlan, PrunePlan], ...]:
    """The probes: the same ids at scattered and at contiguous positions, always the same ones."""
    rng = np.random.default_rng(1797)
    pairs = []
    for _ in range(_PROBES):
        ids = rng.integers(1, vocabulary, _TOKENS).astype(np.int32)
        far = np.cumsum(rng.integers(1, 2 * _GAP, _TOKENS)).astype(np.int32)
        near = np.arange(_TOKENS, dtype=np.int32)
        n = int(far[-1]) + 1
        pairs.append(
            (
                PrunePlan(ids, far, n, "original", n, Reason.PRUNED),
                PrunePlan(ids, near, _TOKENS, "contiguous", _TOKENS, Reason.PRUNED),
            )
        )
    return tuple(pairs)


def check_positions(
    respond: Callable[[PrunePlan], NDArray[Any]],
    vocabulary: int,
    recorded: Recorded | None = None,
) -> PositionCheck:
    """Whether a target rotates by the position ids of a plan.

    respond: the target's answer to a plan, the logits of the next token or greedy tokens.
    recorded: figures of a faithful model; of its scattered answers at least half must come, and
    more of them than of its contiguous ones (a quantised engine need not agree on every token).
    A target whose answers to one and the same plan differ is not believed either.
    """
    pairs = probe_plans(vocabulary)
    far, near = [], []
    for scattered, contiguous in pairs:
        far.append(respond(scattered))
        near.append(respond(contiguous))
        if not _same(near[-1], respond(contiguous)):
            return PositionCheck(False, "the same probe twice gave two answers")
        if recorded is None and not _same(far[-1], near[-1]):
            return PositionCheck(True, "a probe answered differently at scattered positions")
    if all(map(_same, far, near)):
        return PositionCheck(False, f"{len(pairs)} probes answered alike at any positions")
    assert recorded is not None
    first = [int(answer[0]) for answer in far]
    right, wrong = _agree(first, recorded.scattered), _agree(first, recorded.contiguous)
    return PositionCheck(
        2 * right >= len(pairs) and right > wrong,
        f"at scattered positions {right} of {len(pairs)} probes answered as recorded for them,"
        f" {wrong} as recorded for contiguous ones",
    )


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=0, atol=1e-4))


def _agree(answers: Sequence[int], recorded: Sequence[int]) -> int:
    return sum(a == b for a, b in zip(answers, recorded, strict=True))


def mrope_position_ids(plan: PrunePlan) -> NDArray[np.int32]:
    """int32 `[3, 1, M]`: the plan's positions on each of the three axes of MRoPE.

    Three equal rows are ordinary rotary embedding (arXiv 2409.12191, 2.1). TensorRT-LLM's
    PyTorch backend takes them as `mrope_config.mrope_position_ids`.
    """
    return np.broadcast_to(plan.position_ids, (3, 1, plan.input_ids.size)).copy()


def mrope_position_deltas(plan: PrunePlan) -> NDArray[np.int32]:
    """int32 `[1, 1]`: what the engine adds to the index in the KV cache for generated tokens.

    The first of them has index M and belongs at `next_position`.
    """
    return np.array([[plan.next_position - plan.input_ids.size]], dtype=np.int32)
