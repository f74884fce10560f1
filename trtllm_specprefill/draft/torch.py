"""The draft as a transformers model under torch, on a CPU or a GPU."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from trtllm_specprefill.draft.base import Draft
from trtllm_specprefill.draft.capture import capturing, mask_to_bool, verify_capture
from trtllm_specprefill.errors import ContextTooLong, DraftFailed
from trtllm_specprefill.forward import last_logits, new_cache, watch_layers
from trtllm_specprefill.importance import Importance, RunningImportance
from trtllm_specprefill.importance_op import use_kernels
from trtllm_specprefill.models import Model
from trtllm_specprefill.operations import layer_windows, prefill_operations
from trtllm_specprefill.settings import Settings


class TorchDraft(Draft):
    """Scores a prompt with any causal language model that transformers can load.

    Memory beside the model and its KV cache: `[queries, N]` float32 scores and one block of one
    layer's logits. On CUDA the kernels of `plugins.importance` score, where they are installed.
    Raises `UnsupportedModel`, naming the family, when the model's attention cannot be captured
    faithfully.
    """

    def __init__(self, model: Model) -> None:
        self.name, self.tokenizer = model.name, model.tokenizer
        self.context_length = model.context_length
        self._model = model
        verify_capture(model)
        watch_layers(model)
        if model.device.type == "cuda":
            use_kernels()

    def score(self, ids: NDArray[np.int32], settings: Settings) -> Importance:
        """See `Draft.score`. Look-ahead is greedy and stops at the model's own EOS ids."""
        n = int(ids.size)
        look_ahead = settings.look_ahead if settings.scoring == "lookahead" else 0
        if n + look_ahead > self.context_length:
            raise ContextTooLong(
                "prompt",
                f"{n} draft tokens and {look_ahead} look-ahead tokens",
                f"at most {self.context_length}, the context of draft {self.name}",
            )
        if all(w is not None and w < n for w in layer_windows(self._model.config)):
            raise DraftFailed(
                f"no layer of draft {self.name} attends to all {n} tokens of the prompt"
            )
        window = 1 if settings.scoring == "lookahead" else min(settings.window, n)
        votes = _Votes(n, window, settings.pool)
        seconds: dict[str, float] = {}
        cache = new_cache(self._model)
        started = time.perf_counter()
        with torch.inference_mode(), capturing(votes):
            token = self._next(torch.from_numpy(ids.astype(np.int64)), 0, cache)
            seconds["draft_prefill"] = time.perf_counter() - started
            for step in range(look_ahead):
                if token in self._model.eos_token_ids:
                    break
                votes.next_row, votes.fed = window + step, n + step + 1
                token = self._next(torch.tensor([token]), n + step, cache)
        seconds["look_ahead"] = time.perf_counter() - started - seconds["draft_prefill"]
        if not votes.layers:
            raise DraftFailed(
                f"no layer of draft {self.name} attends to all {n} tokens of the prompt"
            )
        return Importance(
            votes.running.scores(),
            votes.running.queries,
            votes.heads,
            tuple(sorted(votes.layers)),
            seconds,
        )

    def operations(self, tokens: int, settings: Settings) -> float:
        """See `Draft.operations`."""
        look_ahead = settings.look_ahead if settings.scoring == "lookahead" else 0
        config = self._model.config
        steps = (prefill_operations(config, 1, past=tokens + i) for i in range(look_ahead))
        return prefill_operations(config, tokens) + sum(steps)

    def _next(self, ids: torch.Tensor, position: int, cache: DynamicCache) -> int:
        """Feed `ids` from `position` on; the greedy next token."""
        positions = torch.arange(position, position + ids.numel())
        return int(last_logits(self._model, ids, positions, cache).argmax())


class _Votes:
    """Turns the attention calls of one prompt into running importance."""

    def __init__(self, n: int, window: int, pool: int) -> None:
        self.running = RunningImportance(n, pool=pool)
        self.layers: set[int] = set()
        self.heads = 0
        self.next_row = 0
        self.fed = n  # tokens the draft has read, this call's included
        self._n, self._window = n, window

    def see(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None,
    ) -> None:
        """Let the last queries of this call vote, if they see the whole prompt."""
        width = min(self._window, q.shape[1])
        if k.shape[1] < self.fed:
            return  # a sliding cache that has let go of the prompt's start
        causal = width > 1
        if mask is not None:
            seen = mask_to_bool(mask)[:, -width:, : self._n]
            if seen.shape[0] != 1 and not bool((seen == seen[:1]).all()):
                raise DraftFailed(f"layer {layer} masks each head differently")
            if not bool(seen[0, -1].all()):
                return  # a sliding window hides part of the prompt
            causal = not bool(seen[0].all())
            if causal and not torch.equal(seen[0], torch.ones_like(seen[0]).tril(self._n - width)):
                raise DraftFailed(f"layer {layer} hides keys that a causal mask would show")
        # All layers of a call read the same number of keys; those of look-ahead tokens, at the
        # end, take no part.
        keys = k[:, : self.fed]
        self.running.add(self.next_row, q[:, -width:], keys, scale, causal)
        self.layers.add(layer)
        self.heads = max(self.heads, q.shape[0])
