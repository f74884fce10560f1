"""The draft as a transformers model under torch, on a CPU or a GPU."""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from trtllm_specprefill.cache import Recent, key_of
from trtllm_specprefill.draft.capture import Enough, capturing, mask_to_bool, verify_capture
from trtllm_specprefill.draft.heads import calibration_for
from trtllm_specprefill.draft.reading import ReadingDraft
from trtllm_specprefill.errors import ContextTooLong, DraftFailed
from trtllm_specprefill.forward import feed, last_logits, new_cache, watch_layers
from trtllm_specprefill.importance import Importance, RunningImportance, combine
from trtllm_specprefill.importance_op import importance_layer, use_kernels
from trtllm_specprefill.models import Model
from trtllm_specprefill.operations import layer_windows
from trtllm_specprefill.settings import Settings

# Tokens that one forward pass reads. On a CPU one window fills the cores, and the rest of a batch
# only its caches; on a GPU a batch is one launch of each kernel.
_CPU_BATCH, _GPU_BATCH = 1, 1 << 15
_CPU_TAILS = 1 << 12  # tokens of the windows whose tails, short, are read together


class TorchDraft(ReadingDraft):
    """Scores a prompt with any causal language model that transformers can load.

    Look-ahead reads the whole prompt through every layer; its memory beside the model is the KV
    cache, `[queries, N]` float32 scores and one block of one layer's logits. The other way
    reads windows through the first layers and keeps nothing of a window but its scores, `[N]`
    in all, and what it is told to keep for the next prompt: of a prompt that begins like one
    before, as a conversation does that goes on, only the new windows are read. On CUDA the
    kernels of `plugins.importance` score, where they are installed.
    Raises `UnsupportedModel`, naming the family, when the model's attention cannot be captured
    faithfully.
    """

    def __init__(self, model: Model, keep: int = 0) -> None:
        """keep: bytes of keys and values of windows that are kept between prompts."""
        self.name, self.tokenizer = model.name, model.tokenizer
        self.context_length, self.config = model.context_length, model.config
        self.model, self.calibration = model, calibration_for(model.fingerprint)
        self._known: Recent[_Layers] | None = Recent(keep, _bytes_of) if keep else None
        verify_capture(model)
        watch_layers(model)
        if model.device.type == "cuda":
            use_kernels()

    def score(
        self,
        ids: NDArray[np.int32],
        settings: Settings,
        question: NDArray[np.int64] | None = None,
    ) -> Importance:
        """See `Draft.score`. Look-ahead is greedy and stops at the model's own EOS ids."""
        settings = settings.in_force()
        ahead = settings.scoring == "lookahead"
        asked = int(self.config.num_hidden_layers) if ahead else self.depth(settings)
        if asked > self.model.layers:
            raise DraftFailed(
                f"{asked} layers of draft {self.name} are asked for and the first"
                f" {self.model.layers} were loaded"
            )
        if ahead:
            return self._look_ahead(ids, settings)
        return self._read_windows(ids, settings, question)

    def _look_ahead(self, ids: NDArray[np.int32], settings: Settings) -> Importance:
        n = int(ids.size)
        if n + settings.look_ahead > self.context_length:
            raise ContextTooLong(
                "prompt",
                f"{n} draft tokens and {settings.look_ahead} look-ahead tokens",
                f"at most {self.context_length}, the context of draft {self.name}",
            )
        if all(w is not None and w < n for w in layer_windows(self.model.config)):
            raise self._blind(n)
        assert settings.votes is not None
        votes = _LookAhead(n, settings.pool)
        seconds: dict[str, float] = {}
        cache = new_cache(self.model)
        started = time.perf_counter()
        with torch.inference_mode(), capturing(votes):
            token = self._next(torch.from_numpy(ids.astype(np.int64)), 0, cache)
            seconds["draft_prefill"] = time.perf_counter() - started
            for step in range(settings.look_ahead):
                if token in self.model.eos_token_ids:
                    break
                votes.row, votes.fed = 1 + step, n + step + 1
                token = self._next(torch.tensor([token]), n + step, cache)
        seconds["look_ahead"] = time.perf_counter() - started - seconds["draft_prefill"]
        if not votes.layers:
            raise self._blind(n)
        return Importance(
            votes.running.scores(settings.votes),
            votes.running.queries,
            votes.heads,
            tuple(sorted(votes.layers)),
            seconds,
        )

    def _next(self, ids: torch.Tensor, position: int, cache: DynamicCache) -> int:
        """Feed `ids` from `position` on; the greedy next token."""
        positions = torch.arange(position, position + ids.numel())
        return int(last_logits(self.model, ids, positions, cache).argmax())

    def _read_windows(
        self, ids: NDArray[np.int32], settings: Settings, question: NDArray[np.int64] | None
    ) -> Importance:
        assert settings.votes is not None
        started = time.perf_counter()
        windows = self.windows(int(ids.size), settings, question)
        size = windows.tokens.shape[1]
        limit = _CPU_BATCH if self.model.device.type == "cpu" else _GPU_BATCH
        tokens = torch.from_numpy(ids.astype(np.int64)[windows.tokens])
        votes = _FirstLayers(
            min(settings.window, windows.tail),
            self.depth(settings),
            self.scoring_heads(settings),
            settings.pool,
        )
        split = size - windows.tail if self._known else 0
        batch = max((_CPU_TAILS if split and limit == _CPU_BATCH else limit) // size, 1)
        scores = []
        for rows in torch.split(tokens, batch):
            with torch.inference_mode(), capturing(votes), suppress(Enough):
                if split:
                    past = self._past(rows[:, :split], votes.depth, max(limit // size, 1))
                    feed(self.model, rows[:, split:], torch.arange(split, size)[None], past)
                else:
                    self.model.module(
                        input_ids=rows.to(self.model.device), use_cache=False, logits_to_keep=1
                    )
            if votes.best is None:
                raise self._blind(size)
            scores.append(combine(votes.best, settings.votes))
            votes.best = None
        return Importance(
            windows.gather(np.concatenate(scores), int(ids.size)),
            votes.width,
            votes.heads,
            tuple(sorted(votes.layers)),
            {"draft_prefill": time.perf_counter() - started},
        )

    def _past(self, rows: torch.Tensor, depth: int, batch: int) -> DynamicCache:
        """Keys and values of windows without their tails, `[B, L]`, in the first `depth` layers.

        Those that are not known are read, `batch` at a time.
        """
        assert self._known is not None
        keys = [key_of(str(depth).encode(), row.numpy().tobytes()) for row in rows]
        found = [self._known.get(key) for key in keys]
        missing = [i for i, layers in enumerate(found) if layers is None]
        for part in (missing[i : i + batch] for i in range(0, len(missing), batch)):
            # Not the model's own kind of cache: that of a sliding layer forgets.
            cache = DynamicCache()
            with capturing(_Until(depth)), suppress(Enough):
                feed(self.model, rows[part], torch.arange(rows.shape[1])[None], cache)
            for place, i in enumerate(part):
                one = slice(place, place + 1)
                layers = [
                    (c.keys[one].clone(), c.values[one].clone()) for c in cache.layers[:depth]
                ]
                self._known.put(keys[i], layers)
                found[i] = layers
        past = DynamicCache()
        for layer in range(depth):
            k, v = (torch.cat([one[layer][i] for one in found if one]) for i in (0, 1))
            past.update(k, v, layer)
        return past

    def _blind(self, tokens: int) -> DraftFailed:
        return DraftFailed(f"no layer of draft {self.name} attends to all of {tokens} tokens")


class _LookAhead:
    """Lets the last query of every call vote, and all layers that see the whole prompt."""

    def __init__(self, n: int, pool: int) -> None:
        self.running = RunningImportance(n, pool=pool)
        self.layers: set[int] = set()
        self.heads = 0
        self.row = 0
        self.fed = n  # tokens the draft has read, this call's included
        self._n = n

    def see(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None,
    ) -> None:
        """See `Capture.see`."""
        if k.shape[2] < self.fed:
            return  # a sliding cache that has let go of the prompt's start
        if mask is not None and not bool(mask_to_bool(mask)[..., -1, : self._n].all()):
            return  # a sliding window hides part of the prompt
        # All layers of a call read the same number of keys; those of look-ahead tokens, at the
        # end, take no part.
        self.running.add(self.row, q[0, :, -1:], k[0, :, : self.fed], scale)
        self.layers.add(layer)
        self.heads = max(self.heads, q.shape[1])


class _FirstLayers:
    """Lets the last `width` queries vote in the first `depth` layers, and runs no other layer."""

    def __init__(
        self, width: int, depth: int, heads: tuple[tuple[int, ...], ...] | None, pool: int
    ) -> None:
        self.width, self.depth, self._scoring, self._pool = width, depth, heads, pool
        self.best: torch.Tensor | None = None  # [B, width, S] of the batch that is being read
        self.layers: set[int] = set()
        self.heads = 0

    def see(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None,
    ) -> None:
        """See `Capture.see`."""
        heads = range(q.shape[1]) if self._scoring is None else self._scoring[layer]
        if heads and (mask is None or self._sees_all(layer, mask)):
            self.best = importance_layer(
                q[:, :, -self.width :],
                k,
                self.best,
                scale=scale,
                pool=self._pool,
                causal=True,
                heads=heads,
            )
            self.layers.add(layer)
            self.heads = max(self.heads, len(heads))
        if layer + 1 == self.depth:
            raise Enough

    def _sees_all(self, layer: int, mask: torch.Tensor) -> bool:
        """Whether the last query sees its whole window; then the mask must be a causal one."""
        seen = mask_to_bool(mask)[..., -self.width :, :]
        if not bool(seen[..., -1, :].all()):
            return False  # a sliding window hides part of it
        causal = torch.ones_like(seen[0, 0]).tril(seen.shape[-1] - self.width)
        if not bool((seen == causal).all()):
            raise DraftFailed(f"layer {layer} masks its keys in a way that is not causal")
        return True


class _Until:
    """Lets nobody vote, and runs no layer beyond the first `depth`."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def see(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None,
    ) -> None:
        """See `Capture.see`."""
        del q, k, scale, mask
        if layer + 1 == self._depth:
            raise Enough


_Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values `[1, Hkv, L, D]` of one window, by layer."""


def _bytes_of(layers: _Layers) -> int:
    return sum(k.nbytes + v.nbytes for k, v in layers)
