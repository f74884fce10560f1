"""Kept spans -> `PrunePlan`: the ids and positions the target gets, or the reason it gets all.

Two position policies. `original`: a kept token keeps its place in the prompt and generation
starts at the prompt's length N (arXiv 2502.02789 calls this restoring the positions).
`contiguous`: kept tokens are renumbered 0..M-1 and generation starts at M (arXiv 2603.02631).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.errors import ContextTooLong, UnsupportedPositions
from trtllm_specprefill.prompt import Prompt
from trtllm_specprefill.selection import Kept
from trtllm_specprefill.settings import PositionPolicy

Positions = Literal["original", "contiguous"]


class Reason(str, Enum):
    """Why the target got what it got. Every value but `pruned` means the full prompt."""

    PRUNED = "pruned"
    BELOW_THRESHOLD = "below_threshold"
    DISABLED = "disabled"
    PROTECTED_EXCEEDS_BUDGET = "protected_exceeds_budget"
    DEGENERATE_SCORES = "degenerate_scores"
    DRAFT_FAILED = "draft_failed"
    DRAFT_TIMEOUT = "draft_timeout"
    TOKENIZER_MISMATCH = "tokenizer_mismatch"
    UNSUPPORTED_TARGET = "unsupported_target"
    PREDICTED_NO_GAIN = "predicted_no_gain"
    CONTEXT_TOO_LONG = "context_too_long"


@dataclass(frozen=True)
class PositionSupport:
    """What a target does with position ids.

    honoured: it rotates by the ids it is given, not by the index in the KV cache.
    window: shortest sliding or chunked attention window of its layers; None without one.
    context: number of positions it has.
    better: the policy it was measured to answer better with; None when nobody measured.
    evidence: that measurement in words.
    """

    honoured: bool
    window: int | None
    context: int
    better: Positions | None = None
    evidence: str = ""


@dataclass(frozen=True)
class PrunePlan:
    """What the target gets.

    input_ids, position_ids: int32 `[M]`; positions strictly increasing. next_position: of the
    first generated token. prompt_tokens: N, the length of the unpruned prompt. reason: `pruned`,
    or why not; detail says the same in words. kept: the selection, when pruned. head: ids at the
    start, at positions 0, 1, 2 ..., that other prompts begin with too; see `Prompt.head`.
    """

    input_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    next_position: int
    positions: Positions
    prompt_tokens: int
    reason: Reason
    detail: str = ""
    kept: Kept | None = None
    head: int = 0

    @property
    def keep_rate(self) -> float:
        """Realised: M / N, separators included."""
        return self.input_ids.size / max(self.prompt_tokens, 1)


def dense_plan(prompt: Prompt, reason: Reason, detail: str = "") -> PrunePlan:
    """The full prompt at its own positions, and why."""
    n = len(prompt.target)
    positions = np.arange(n, dtype=np.int32)
    ids, head = prompt.target.ids, prompt.head
    return PrunePlan(ids, positions, n, "original", n, reason, detail, head=head)


def resolve_positions(
    policy: PositionPolicy,
    support: PositionSupport,
    *,
    prompt_tokens: int,
    max_tokens: int,
    shared_tokenizer: bool,
    separator: str = "",
) -> Positions:
    """The policy that will be used.

    `auto` is `original` only where draft and target share a tokenizer, the target honours
    position ids, no layer of it attends through a window shorter than the prompt, the original
    positions fit its context, no separator is asked for, which has no place in the prompt, and
    the target was not measured to answer better otherwise; else `contiguous`. Raises
    `UnsupportedPositions` when `original` is asked of a target that cannot do it.
    """
    problem = _original_problem(support, prompt_tokens, max_tokens)
    if policy == "original":
        if problem:
            raise UnsupportedPositions("positions", policy, f"auto or contiguous: {problem}")
        return "original"
    worse = support.better == "contiguous"
    if policy == "auto" and shared_tokenizer and not (separator or problem or worse):
        return "original"
    return "contiguous"


def _original_problem(support: PositionSupport, prompt_tokens: int, max_tokens: int) -> str:
    if not support.honoured:
        return "the target does not honour position ids"
    if support.window is not None and support.window < prompt_tokens:
        return (
            f"the target attends through a window of {support.window} tokens, "
            f"shorter than the prompt of {prompt_tokens}"
        )
    if prompt_tokens + max_tokens > support.context:
        return (
            f"the prompt of {prompt_tokens} tokens and {max_tokens} to generate need more "
            f"than the target's {support.context} positions"
        )
    return ""


def make_plan(
    prompt: Prompt,
    kept: Kept,
    positions: Positions,
    separator_ids: NDArray[np.int32] | None = None,
) -> PrunePlan:
    """Ids and positions of the kept target tokens.

    separator_ids: int32 `[S]`, put wherever a stretch of the prompt was left out between two
    kept tokens; contiguous positions only, since a separator has no place in the prompt.
    The last prompt token is always kept, so original positions end at N - 1.
    """
    indices = np.flatnonzero(kept.target_tokens).astype(np.int32)
    n = len(prompt.target)
    ids, head = prompt.target.ids[indices], prompt.head
    if positions == "original":
        return PrunePlan(ids, indices, n, positions, n, Reason.PRUNED, kept=kept, head=head)
    if separator_ids is not None and separator_ids.size:
        gaps = np.flatnonzero(np.diff(indices) > 1) + 1
        ids = np.insert(ids, np.repeat(gaps, separator_ids.size), np.tile(separator_ids, gaps.size))
    fresh = np.arange(ids.size, dtype=np.int32)
    m = int(ids.size)
    return PrunePlan(ids, fresh, m, positions, n, Reason.PRUNED, kept=kept, head=head)


def check_fits(plan: PrunePlan, context: int, max_tokens: int) -> None:
    """Raise `ContextTooLong` when prompt and answer need more positions than there are."""
    if plan.next_position + max_tokens > context:
        pruned = plan.reason is Reason.PRUNED
        kept = f" ({plan.input_ids.size} kept)" if pruned else ""
        why = f"; not pruned: {plan.detail}" if plan.detail and not pruned else ""
        raise ContextTooLong(
            "prompt",
            f"{plan.prompt_tokens} tokens{kept}",
            f"at most {context} positions for the prompt and max_tokens ({max_tokens}) together"
            f"{why}",
        )
