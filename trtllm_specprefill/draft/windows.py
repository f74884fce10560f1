"""How a long prompt is cut into windows that a draft reads one by one.

A window is a short prompt of its own: the first tokens of the prompt (where attention rests
when it finds nothing), a stretch of the body, and behind it the tokens that ask. So a draft of
any context length scores a prompt of any length, at a cost linear in it, and the question is
always near. The positions in a window are its own, 0 to S - 1.

The softmax is over one window, not over the prompt: then windows are independent, nothing of one
outlives it but its scores, and the op of one layer scores a batch of them as it is. One softmax
over all windows needs the rows of every head until the last window is read. Where all heads score
it would keep more (at 10 % the planted facts of 93 prompts instead of 86 of 96), where calibrated
ones do as many (94 and 92; at 5 % 79 both ways): SmolLM2, `perf/one_softmax.py`.

A token's importance is what `trtllm_specprefill.importance` defines, in the window that owns the
token: softmax over that window, queries of its last tokens. Neighbours share a stretch, of which
each owns a part, so no token is pooled or read at a border. The tokens every window reads get
the mean over windows. With one window that reads everything this is the plain form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Windows:
    """Which tokens each window reads, and which window each score comes from.

    tokens: int64 `[K, S]`, prompt indices in reading order: head, stretch, tail.
    own: int64 `[K + 1]`; window i owns the places from `own[i]` to `own[i + 1]` of `body`.
    body: int64, prompt indices of the tokens that are in neither head nor tail, in order.
    first: int64 `[K]`, place in `body` of the first token that window i reads of it.
    head, tail: how many tokens stand before the stretch, and behind it.
    """

    tokens: NDArray[np.int64]
    own: NDArray[np.int64]
    body: NDArray[np.int64]
    first: NDArray[np.int64]
    head: int
    tail: int

    def gather(self, scores: NDArray[np.float32], prompt_tokens: int) -> NDArray[np.float32]:
        """Scores `[K, S]` in the windows -> float32 `[N]` in the prompt."""
        out = np.zeros(prompt_tokens, dtype=np.float32)
        count, size = self.tokens.shape
        common = np.r_[0 : self.head, size - self.tail : size]
        out[self.tokens[0, common]] = scores[:, common].mean(axis=0)
        owner = np.repeat(np.arange(count), np.diff(self.own))
        place = self.head + np.arange(self.body.size) - self.first[owner]
        out[self.body] = scores[owner, place]
        return out


def whole(prompt_tokens: int) -> Windows:
    """The prompt read at once, in its own order."""
    nothing = np.zeros(0, dtype=np.int64)
    all_of_it = np.arange(prompt_tokens)[None]
    return Windows(all_of_it, np.zeros(2, dtype=np.int64), nothing, nothing[:1], 0, prompt_tokens)


def shared(overlap: int, pool: int) -> int:
    """Tokens that neighbours must share for an overlap of `overlap` and a pooling of `pool`."""
    return max(overlap, pool - 1)


def cut(
    prompt_tokens: int,
    tail: NDArray[np.int64],
    *,
    head: int,
    window: int,
    overlap: int,
    reach: int,
) -> Windows:
    """Windows of a prompt of `prompt_tokens` tokens, all of the same length.

    tail: prompt indices, ascending, of the tokens that end every window.
    head: tokens from the prompt's start that begin every window.
    window: most tokens of a stretch. overlap: tokens that neighbouring stretches share, fewer
    than `window` and at least `2 * reach`; the last stretch ends with the body and shares what
    that takes. Of the first `overlap` tokens of a stretch the window before owns all but the last
    `reach`, which it reads only for pooling.

    Stretches begin at multiples of `window - overlap`, so when a conversation grows all but the
    last few stay as they were. They are equally long since a softmax over fewer tokens gives
    each of them more.
    """
    in_tail = np.zeros(prompt_tokens, dtype=np.bool_)
    in_tail[tail] = True
    front = np.flatnonzero(~in_tail[:head])
    body = np.flatnonzero(~in_tail)[front.size :]
    size = body.size
    count = max(1, -(-(size - overlap) // (window - overlap)))
    stretch = min(window, size)
    first = np.minimum(np.arange(count) * (stretch - overlap), size - stretch)
    own = np.concatenate(([0], first[1:] + overlap - reach, [size]))
    pieces = (
        np.tile(front, (count, 1)),
        body[first[:, None] + np.arange(stretch)],
        np.tile(tail, (count, 1)),
    )
    tokens = np.concatenate(pieces, axis=1).astype(np.int64)
    return Windows(tokens, own, body, first, int(front.size), int(tail.size))
