"""A built draft that runs, whatever runs it, and the two ways of scoring prompts with it.

An `Engine` is the graph that `engine_build.scoring_model` describes: tensors in, tensors out, of
sequences padded at their ends. `read` scores a batch in one call, `look_ahead` reads a batch and
decodes behind it. Neither knows of windows, settings or tokenizers: see `draft.graph`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.forward import check_interrupted
from trtllm_specprefill.settings import Votes

Ids = NDArray[np.int64]
Lengths = NDArray[np.int32]
Scores = NDArray[np.float32]


class Pass(ABC):
    """One batch that is being read with look-ahead; holds its keys and values."""

    @abstractmethod
    def step(
        self,
        input_ids: Ids,
        position_ids: Ids,
        lengths: Lengths,
        prompt_lengths: Lengths,
        past_lengths: Lengths,
    ) -> tuple[Scores, Ids]:
        """Feed `[B, S]` tokens behind the past ones.

        Returns `[B, C]` importance by each sequence's last token, and `[B]` likeliest next ones.
        """


class Engine(ABC):
    """What runs a built draft.

    batch: most sequences of one call that it is worth to make.
    piece: most tokens that look-ahead reads in one call, which bounds its memory.
    """

    batch: int
    piece: int

    @abstractmethod
    def read(self, input_ids: Ids, position_ids: Ids, lengths: Lengths, voters: Lengths) -> Scores:
        """Importance `[B, S]` of a batch by each sequence's last `voters` tokens; window mode."""

    @abstractmethod
    def begin(self, batch: int, capacity: int) -> Pass:
        """An empty cache for `batch` sequences of at most `capacity` tokens; look-ahead mode."""

    def close(self) -> None:
        """Give back what it holds."""
        return


def read(engine: Engine, prompts: Sequence[Ids], voters: Sequence[int]) -> list[Scores]:
    """Importance of each prompt, float32 `[N]`, by its last `voters` tokens.

    Takes as many prompts together as the engine takes.
    """
    scores: list[Scores] = []
    for start in range(0, len(prompts), engine.batch):
        check_interrupted()
        some = prompts[start : start + engine.batch]
        ids, lengths = padded(some)
        rows = np.array(voters[start : start + engine.batch], dtype=np.int32)
        found = engine.read(ids, _places(np.zeros_like(lengths), ids.shape[1]), lengths, rows)
        scores += [found[i, :n] for i, n in enumerate(lengths)]
    return scores


@dataclass(frozen=True)
class LookedAhead:
    """What look-ahead found out about one prompt.

    scores: float32 `[N]`. queries: rows that voted. tokens: what was decoded, end ids included.
    """

    scores: Scores
    queries: int
    tokens: tuple[int, ...]


def look_ahead(
    engine: Engine,
    prompts: Sequence[Ids],
    steps: int,
    votes: Votes,
    *,
    ends: Collection[int] = (),
    sees: Callable[[int], bool] = lambda tokens: True,
    forced: Sequence[int] = (),
    told: Callable[[float], None] = lambda seconds: None,
) -> list[LookedAhead]:
    """Read a batch of prompts, decode up to `steps` tokens behind each, and combine the votes.

    ends: ids that end a sequence; they are not fed. sees: whether, `tokens` tokens read, any
    layer votes. forced: tokens to feed in the place of the decoded ones. told: called with the
    seconds that reading took.
    """
    begin = time.perf_counter()
    ids, lengths = padded(prompts)
    cache = engine.begin(len(prompts), ids.shape[1] + steps)
    tallies = [_Tally(int(n), votes) for n in lengths]
    tokens = np.zeros(len(prompts), dtype=np.int64)
    for start in range(0, ids.shape[1], engine.piece):
        check_interrupted()
        part = ids[:, start : start + engine.piece]
        past = np.minimum(lengths, start).astype(np.int32)
        # One token at least: of a prompt that has been read it lands behind the prompt, where
        # the next token overwrites it.
        fed = np.clip(lengths - start, 1, part.shape[1]).astype(np.int32)
        rows, next_tokens = cache.step(part, _places(past, part.shape[1]), fed, lengths, past)
        for i in np.flatnonzero((lengths > start) & (lengths <= start + part.shape[1])):
            tallies[i].add(rows[i], sees(int(lengths[i])))
            tokens[i] = next_tokens[i]
    told(time.perf_counter() - begin)
    going = np.ones(len(prompts), dtype=np.bool_)
    for step in range(steps):
        check_interrupted()
        for tally, token, alive in zip(tallies, tokens.tolist(), going, strict=True):
            if alive:
                tally.tokens.append(token)
        going &= ~np.isin(tokens, list(ends))
        if not going.any():
            break
        past = lengths + np.int32(step)
        given = np.full_like(tokens, forced[step]) if step < len(forced) else tokens
        ones = np.ones_like(lengths)
        rows, tokens = cache.step(given[:, None], _places(past, 1), ones, lengths, past)
        for i in np.flatnonzero(going):
            tallies[i].add(rows[i], sees(int(lengths[i]) + step + 1))
    return [LookedAhead(t.scores(), t.queries, tuple(t.tokens)) for t in tallies]


class _Tally:
    """Combines the rows of one prompt as they come, in the memory of one."""

    def __init__(self, n: int, votes: Votes) -> None:
        self.queries, self.tokens = 0, list[int]()
        self._votes, self._total = votes, np.zeros(n, dtype=np.float32)

    def add(self, row: Scores, counts: bool) -> None:
        if counts:
            combine = np.add if self._votes == "mean" else np.maximum
            combine(self._total, row[: self._total.size], out=self._total)
            self.queries += 1

    def scores(self) -> Scores:
        if self._votes == "max" or not self.queries:
            return self._total
        return self._total / np.float32(self.queries)


def padded(prompts: Sequence[Ids]) -> tuple[Ids, Lengths]:
    """int64 `[B, S]`, filled up with zeros, and the lengths, int32 `[B]`."""
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
    ids = np.zeros((len(prompts), int(lengths.max())), dtype=np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return ids, lengths


def _places(past: Lengths, tokens: int) -> Ids:
    return past[:, None].astype(np.int64) + np.arange(tokens)
