"""What importance is, once: the judge in float64 and the form that streams over keys.

Speculative prefill (arXiv 2502.02789, section 3.2) scores prompt token i by

    a[l, h, j, i] = softmax_i(scale * q[l, h, j] . k[l, h, i])      over prompt keys only
    importance[i] = mean_j max_{l, h} avgpool_P(a[l, h, j])[i]

where q are the post-RoPE queries of the last prompt token and of the look-ahead tokens
(or, without look-ahead, of the last W prompt tokens, each seeing the keys up to itself),
k the post-RoPE keys of the N prompt tokens. The pooling is zero padded and divides by P
everywhere, as the authors' code does, so both ends of the prompt are damped alike.

`reference_importance` is written from those two lines and is what every executor is checked
against. `RunningImportance` holds one `[W, N]` float32 maximum, takes one layer at a time and
works through the keys in blocks, so its extra memory does not grow with layers or with
layers x heads x tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_specprefill.errors import DegenerateScores, InputError

NEG_INF = float("-inf")


@dataclass(frozen=True)
class Importance:
    """One score per draft token, and where it came from.

    scores: float32 `[N]`, finite and >= 0, N the prompt's length in draft tokens.
    queries: how many query tokens voted (1 + look-ahead tokens before EOS, or the window).
    heads: query heads per layer that voted.
    layers: indices of the layers that voted. A layer whose sliding window hides part of the
        prompt from its last token does not vote: its softmax is over other tokens than the
        rest's, and a maximum over both would favour the end of the prompt.
    seconds: time by stage, in seconds (`draft_prefill`, `look_ahead`).
    """

    scores: NDArray[np.float32]
    queries: int
    heads: int
    layers: tuple[int, ...]
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_scores(self.scores)


def check_scores(scores: NDArray[np.float32]) -> None:
    """Raise `DegenerateScores` unless all scores are finite, >= 0 and not all zero."""
    bad = int(np.count_nonzero(~np.isfinite(scores)))
    if bad:
        raise DegenerateScores(f"{bad} of {scores.size} importance scores are NaN or infinite")
    if scores.size and float(scores.min()) < 0:
        raise DegenerateScores(f"importance holds a negative score ({float(scores.min())!r})")
    if not scores.any():
        raise DegenerateScores(f"all {scores.size} importance scores are zero")


def check_pool_width(pool: int) -> None:
    """Raise `InputError` unless the pooling width is odd and positive (an even one shifts)."""
    if pool < 1 or pool % 2 == 0:
        raise InputError("pool", pool, "an odd number >= 1")


def reference_importance(
    queries: Sequence[NDArray[Any]],
    keys: Sequence[NDArray[Any]],
    scale: float,
    pool: int = 13,
    causal: bool = False,
) -> NDArray[np.float64]:
    """Importance in float64, straight from the paper; the judge for every executor.

    queries: per layer `[Hq, W, D]`; keys: per layer `[Hkv, N, D]`, Hq a multiple of Hkv.
    scale: multiplies the logits (1 / sqrt(D) in most models).
    causal: the W queries are the prompt's own last W tokens; query j sees keys up to
        N - W + j. Otherwise every query sees all N keys.
    Returns float64 `[N]`. Materialises heads x W x N of one layer: for small inputs.
    """
    check_pool_width(pool)
    best: NDArray[np.float64] | None = None
    for q_layer, k_layer in zip(queries, keys, strict=True):
        q = np.asarray(q_layer, dtype=np.float64)
        k = np.asarray(k_layer, dtype=np.float64)
        (heads, width, _), n = q.shape, k.shape[1]
        k = np.repeat(k, heads // k.shape[0], axis=0)
        logits = scale * np.einsum("hwd,hnd->hwn", q, k)
        if causal:
            last_seen = n - width + np.arange(width)
            logits[:, np.arange(n)[None, :] > last_seen[:, None]] = -np.inf
        logits -= logits.max(axis=-1, keepdims=True)
        weights = np.exp(logits)
        weights /= weights.sum(axis=-1, keepdims=True)
        padded = np.pad(weights, ((0, 0), (0, 0), (pool // 2, pool // 2)))
        pooled = np.lib.stride_tricks.sliding_window_view(padded, pool, axis=-1).mean(axis=-1)
        layer_best = pooled.max(axis=0)
        best = layer_best if best is None else np.maximum(best, layer_best)
    if best is None:
        raise InputError("queries", "no layer", "at least one layer")
    return np.asarray(best.mean(axis=0))


class RunningImportance:
    """Importance gathered layer by layer and query by query, in bounded memory.

    Feed it with `add(row, q, k, ...)` in any order of layers and rows; read `scores()` once.
    Holds `[rows, N]` float32; while a layer is added, logits of one block of keys as well:
    Hq x W x (key_block + 2 * (pool // 2)) float32.
    """

    def __init__(
        self,
        rows: int,
        tokens: int,
        *,
        pool: int = 13,
        key_block: int = 4096,
        device: torch.device | str = "cpu",
    ) -> None:
        check_pool_width(pool)
        if key_block < 1:
            raise InputError("key_block", key_block, "a number of keys >= 1")
        self._pool, self._key_block = pool, key_block
        self._best = torch.zeros(rows, tokens, dtype=torch.float32, device=device)

    def add(
        self,
        row: int,
        q: torch.Tensor,
        k: torch.Tensor,
        scale: float,
        visible: torch.Tensor | None = None,
    ) -> None:
        """Take one layer's queries `[Hq, W, D]` against its prompt keys `[Hkv, N, D]`.

        row: first of the W rows they fill. scale: multiplies the logits.
        visible: bool `[W, N]`, the keys each query attends to; all of them when None.
        """
        rows = slice(row, row + q.shape[1])
        lse = _log_sum_exp(q, k, scale, visible, self._key_block)
        n, half = k.shape[1], self._pool // 2
        for start in range(0, n, self._key_block):
            stop = min(start + self._key_block, n)
            left, right = max(start - half, 0), min(stop + half, n)
            logits = _block_logits(q, k, scale, visible, left, right)
            weights = torch.exp(logits - lse[..., None])
            # The halo that lies outside the prompt is zero: pad what the clamping cut off.
            weights = torch.nn.functional.pad(
                weights, (left - (start - half), (stop + half) - right)
            )
            pooled = torch.nn.functional.avg_pool1d(weights, self._pool, stride=1).amax(dim=0)
            block = self._best[rows, start:stop]
            torch.maximum(block, pooled, out=block)

    def scores(self, rows: int | None = None) -> NDArray[np.float32]:
        """Mean over the first `rows` query rows (all when None): float32 `[N]`."""
        best = self._best if rows is None else self._best[:rows]
        result: NDArray[np.float32] = best.mean(dim=0).cpu().numpy()
        return result


def _block_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    visible: torch.Tensor | None,
    start: int,
    stop: int,
) -> torch.Tensor:
    """Logits `[Hq, W, stop - start]` in float32; -inf where a query does not see the key."""
    heads, width, dim = q.shape
    kv_heads = k.shape[0]
    # Query heads that share a key head are stacked as more rows of one product, so that
    # keys are never repeated.
    grouped = q.float().reshape(kv_heads, heads // kv_heads * width, dim)
    logits = torch.bmm(grouped, k[:, start:stop].float().transpose(1, 2))
    logits = logits.reshape(heads, width, stop - start) * scale
    if visible is not None:
        logits = logits.masked_fill(~visible[None, :, start:stop], NEG_INF)
    return logits


def _log_sum_exp(
    q: torch.Tensor, k: torch.Tensor, scale: float, visible: torch.Tensor | None, key_block: int
) -> torch.Tensor:
    """Log of the softmax denominator over all keys, `[Hq, W]` float32, block by block."""
    n = k.shape[1]
    parts = [
        torch.logsumexp(
            _block_logits(q, k, scale, visible, start, min(start + key_block, n)), dim=-1
        )
        for start in range(0, n, key_block)
    ]
    return torch.logsumexp(torch.stack(parts), dim=0)
