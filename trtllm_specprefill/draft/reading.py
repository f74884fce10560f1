"""What a draft reads of a prompt and what that costs, known from its config alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.draft.base import Draft
from trtllm_specprefill.draft.heads import HeadCalibration
from trtllm_specprefill.draft.windows import Windows, cut, shared, whole
from trtllm_specprefill.errors import ContextTooLong
from trtllm_specprefill.operations import layer_windows, prefill_operations, reading_operations
from trtllm_specprefill.settings import Settings

DEFAULT_DEPTH = 4  # one layer in so many is run unless the settings say how many


class ReadingDraft(Draft):
    """A draft whose config is known, wherever its weights are.

    calibration: which heads of it score best, where that was measured.
    """

    config: Any
    calibration: HeadCalibration | None = None

    @property
    def limit(self) -> str:
        """What `context_length` is, in words."""
        return f"the context of draft {self.name}"

    def operations(self, tokens: int, settings: Settings) -> float:
        """See `Draft.operations`."""
        config = self.config
        if settings.scoring == "lookahead":
            past = range(tokens, tokens + settings.look_ahead)
            steps = sum(prefill_operations(config, 1, past=p) for p in past)
            return prefill_operations(config, tokens) + steps
        count, size = self.windows(tokens, settings, None).tokens.shape
        return count * reading_operations(config, size, self.depth(settings))

    def windows(
        self, tokens: int, settings: Settings, question: NDArray[np.int64] | None
    ) -> Windows:
        """How this draft reads a prompt of `tokens` tokens."""
        if not settings.draft_window:
            if tokens > self.context_length:
                raise ContextTooLong(
                    "prompt",
                    f"{tokens} draft tokens at once (draft_window=0)",
                    f"at most {self.context_length}, {self.limit}",
                )
            return whole(tokens)
        tail = np.arange(tokens) if question is None else question
        tail = tail[-settings.draft_tail :]
        room = self.context_length - settings.draft_head - tail.size
        overlap = shared(settings.draft_overlap, settings.pool)
        if room <= overlap:
            raise ContextTooLong(
                "draft_head, draft_overlap and draft_tail",
                f"{settings.draft_head}, {overlap} and {tail.size}",
                f"less than {self.context_length} together, {self.limit}",
            )
        return cut(
            tokens,
            tail,
            head=settings.draft_head,
            window=min(settings.draft_window, room),
            overlap=overlap,
            reach=settings.pool // 2,
        )

    def depth(self, settings: Settings) -> int:
        """How many of the first layers are run.

        Unless the settings say, as many as the calibration takes, else `usual_depth`.
        """
        if settings.draft_layers:
            return min(settings.draft_layers, int(self.config.num_hidden_layers))
        if self.calibration is not None and self._applies(self.calibration.layers, settings):
            return self.calibration.layers
        return self.usual_depth(settings)

    def usual_depth(self, settings: Settings) -> int:
        """How many layers are run where nothing else says: a quarter of them.

        And no fewer than reach one that attends to all of what is read at once: Gemma 3 begins
        with five layers of sliding windows.
        """
        layers = int(self.config.num_hidden_layers)
        size = self._read_at_once(settings)
        sees_all = (
            index + 1
            for index, window in enumerate(layer_windows(self.config))
            if window is None or (size is not None and window >= size)
        )
        return max(-(-layers // DEFAULT_DEPTH), next(sees_all, layers))

    def scoring_heads(self, settings: Settings) -> tuple[tuple[int, ...], ...] | None:
        """For each layer that is run, the query heads that score; None for all of them."""
        depth = self.depth(settings)
        if self.calibration is None or not self._applies(depth, settings):
            return None
        found = self.calibration.at(depth)
        return None if found is None else found.heads

    def _applies(self, depth: int, settings: Settings) -> bool:
        """Whether the heads found for this depth all see what is read at once, a window."""
        found = None if self.calibration is None else self.calibration.at(depth)
        size = self._read_at_once(settings)
        if found is None or size is None:
            return False
        windows = layer_windows(self.config)
        return all(
            window is None or window >= size
            for window, heads in zip(windows, found.heads, strict=False)
            if heads
        )

    def _read_at_once(self, settings: Settings) -> int | None:
        """Most tokens of a window; None when the whole prompt is read."""
        if settings.draft_window == 0:
            return None
        return settings.draft_head + settings.draft_window + settings.draft_tail
