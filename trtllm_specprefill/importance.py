"""What importance is, once: the judge in float64, and the layers' scores put together.

Speculative prefill (arXiv 2502.02789, section 3.2) scores prompt token i by

    a[l, h, j, i] = softmax_i(scale * q[l, h, j] . k[l, h, i])      over prompt keys only
    importance[i] = mean_j max_{l, h} avgpool_P(a[l, h, j])[i]

where q are the post-RoPE queries of the last prompt token and of the look-ahead tokens
(or, without look-ahead, of the last W prompt tokens, each seeing the keys up to itself),
k the post-RoPE keys of the N prompt tokens. The pooling is zero padded and divides by P
everywhere, as the authors' code does, so both ends of the prompt are damped alike.

`reference_importance` is written from those two lines and is what every executor is checked
against. `RunningImportance` takes one layer at a time through the op of `importance_op`, which
works through the keys in blocks, so its memory does not grow with layers or with
layers x heads x tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_specprefill.errors import DegenerateScores, InputError
from trtllm_specprefill.importance_op import check_pool_width, importance_layer

if TYPE_CHECKING:  # at run time this module needs torch and numpy alone
    from trtllm_specprefill.settings import Votes


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
    detail: a word on the draft for every report, such as whose place it takes.
    """

    scores: NDArray[np.float32]
    queries: int
    heads: int
    layers: tuple[int, ...]
    seconds: dict[str, float] = field(default_factory=dict)
    detail: str = ""

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


def reference_importance(
    queries: Sequence[NDArray[Any]],
    keys: Sequence[NDArray[Any]],
    scale: float,
    pool: int = 13,
    causal: bool = False,
    votes: Votes = "mean",
) -> NDArray[np.float64]:
    """Importance in float64, straight from the paper; the judge for every executor.

    queries: per layer `[Hq, W, D]`; keys: per layer `[Hkv, N, D]`, Hq a multiple of Hkv.
    scale: multiplies the logits (1 / sqrt(D) in most models).
    causal: the W queries are the prompt's own last W tokens; query j sees keys up to
        N - W + j. Otherwise every query sees all N keys.
    votes: how the queries are combined; the paper takes their mean.
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
    return np.asarray(best.mean(axis=0) if votes == "mean" else best.max(axis=0))


def combine(rows: torch.Tensor, votes: Votes) -> NDArray[np.float32]:
    """Scores of W query rows, `[..., W, N]`, as one score a token: float32 `[..., N]`.

    A maximum is for queries of which only some ask: the words of a question each look for
    their own answer, and a mean over them and the template's tokens drowns it.
    """
    combined = rows.mean(dim=-2) if votes == "mean" else rows.amax(dim=-2)
    result: NDArray[np.float32] = combined.cpu().numpy()
    return result


class RunningImportance:
    """Importance gathered layer by layer and query by query, in bounded memory.

    Feed it with `add(row, q, k, ...)` in any order of layers and rows; read `scores()` once.
    Each layer goes through the op of `trtllm_specprefill.importance_op`. Holds one float32
    `[W, N]` maximum for each row that was named, and nothing that grows with layers or heads.
    """

    def __init__(self, tokens: int, *, pool: int = 13) -> None:
        check_pool_width(pool)
        self._tokens, self._pool = tokens, pool
        self._best: dict[int, torch.Tensor] = {}

    def add(
        self, row: int, q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool = False
    ) -> None:
        """Take one layer's queries `[Hq, W, D]` against its keys `[Hkv, S, D]`.

        row: first of the W rows they fill; a row keeps the W and S of its first layer.
        S may be more than the prompt's N: its keys are the first N. scale: multiplies the
        logits. causal: the queries are the prompt's own last W tokens; query j sees keys up to
        N - W + j. Raises `InputError` for what the op does not take.
        """
        self._best[row] = importance_layer(
            q[None],
            k[None],
            self._best.get(row),
            scale=scale,
            pool=self._pool,
            causal=causal,
            lengths=torch.tensor([self._tokens], dtype=torch.int32),
        )

    @property
    def queries(self) -> int:
        """How many query rows voted."""
        return sum(best.shape[1] for best in self._best.values())

    def scores(self, votes: Votes = "mean") -> NDArray[np.float32]:
        """The query rows that voted, combined: float32 `[N]`."""
        rows = [self._best[row][0, :, : self._tokens] for row in sorted(self._best)]
        return combine(torch.cat(rows), votes)
