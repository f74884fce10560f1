"""What every target offers, whatever runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.plan import PositionSupport, PrunePlan
from trtllm_specprefill.settings import Sampling

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Step:
    """One step of an answer.

    text: what it adds to the answer; may be empty while a character or a possible stop text
    is incomplete. token_ids: the tokens it adds. finish_reason: `stop` (an EOS id or a stop
    text) or `length` (max_tokens) on the last step, None before.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


class Target(ABC):
    """A large model that prefills a plan and streams an answer.

    takes_requests: false on the ranks above 0 of an engine on several GPUs: they hold their part
    of it, and rank 0 answers. ranks: processes like this one that only answer together.
    """

    name: str
    tokenizer: Any
    position_support: PositionSupport
    takes_requests: bool = True
    ranks: int = 1

    @abstractmethod
    def stream(self, plan: PrunePlan, sampling: Sampling) -> Generator[Step, None, None]:
        """Prefill `plan` at its positions, then decode from `plan.next_position` on.

        The first step comes as soon as the first token is known. Closing the iterator stops the
        work. Raises `TargetFailed` when the model fails; nothing of a failed prefill is kept.
        """

    def read_ahead(self, head: NDArray[np.int32]) -> None:  # noqa: B027  (most cannot)
        """Read the head of a prompt, ids `[H]` at positions 0 to H - 1, whose plan is to come.

        `stream` of a plan that begins with it has less to do then, and gives the same. Whatever
        fails here fails there again, so nothing is raised. A GPU reads while the caller goes on.
        """

    @abstractmethod
    def operations(self, tokens: int) -> float:
        """Floating-point operations of prefilling `tokens` tokens."""

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Let go of engines and processes; the target answers no more."""
