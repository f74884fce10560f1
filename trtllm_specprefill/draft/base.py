"""What every draft offers, whatever runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.importance import Importance
from trtllm_specprefill.settings import Settings


class Draft(ABC):
    """A small model that reads a prompt and says how much each token matters."""

    name: str
    tokenizer: Any
    context_length: int

    @abstractmethod
    def score(
        self,
        ids: NDArray[np.int32],
        settings: Settings,
        question: NDArray[np.int64] | None = None,
    ) -> Importance:
        """Importance of the prompt `ids`, int32 `[N]`, as `settings` ask for it.

        question: indices of the tokens that ask, ascending; the prompt's last tokens when None.
        One prompt at a time: a long prompt fills the device by itself, and a batch would
        only tie prompts of different lengths together. Raises `ContextTooLong` when what is read
        at once does not fit the draft, `DraftFailed` when it gives no usable scores.
        """

    @abstractmethod
    def operations(self, tokens: int, settings: Settings) -> float:
        """Floating-point operations of scoring a prompt of `tokens` tokens."""
