"""Importance -> `Kept`: which spans of the prompt the target will read.

Protected spans come first and count in the budget. The rest is cut into chunks of draft
tokens, each chunk scored by the mean importance of its tokens (arXiv 2502.02789, section
3.2.3), and the best chunks that still fit are taken, ties in order of the prompt. The budget
is counted in *target* tokens, so it holds across tokenizers. No randomness anywhere: the same
prompt and scores give the same spans, alone or in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.boundaries import Boundaries, Cuts, chunk_borders
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.importance import Importance
from trtllm_specprefill.prompt import PROTECTION_RULES, Prompt, Rule, Span

_RULES: tuple[Rule, ...] = (*PROTECTION_RULES, "importance")
_IMPORTANCE = len(_RULES)  # codes are 1-based; 0 is "not kept"


@dataclass(frozen=True)
class KeptSpan(Span):
    """A kept stretch: characters `[start, end)`, draft tokens `[token_start, token_end)`."""

    token_start: int
    token_end: int


@dataclass(frozen=True)
class Kept:
    """What is kept of a prompt.

    spans: sorted and disjoint; neighbours differ in their rule.
    target_tokens: bool `[N]`, the target tokens that the spans stand for.
    budget: target tokens allowed; None when coverage decided.
    mass: share of the importance that lies in kept draft tokens, 0 to 1.
    protected_exceeds_budget: protections alone are over the budget (nothing else was kept).
    """

    spans: tuple[KeptSpan, ...]
    target_tokens: NDArray[np.bool_]
    budget: int | None
    mass: float
    protected_exceeds_budget: bool

    @property
    def tokens(self) -> int:
        """Number of kept target tokens."""
        return int(np.count_nonzero(self.target_tokens))

    @property
    def keep_rate(self) -> float:
        """Realised keep rate: kept target tokens / target tokens of the prompt."""
        return self.tokens / max(self.target_tokens.size, 1)


def select(prompt: Prompt, importance: Importance, separator_tokens: int = 0) -> Kept:
    """Choose what to keep of `prompt`.

    separator_tokens: length of the separator the plan will put into every gap, counted in
    the budget. Raises `InputError` when the scores are not one per draft token.
    """
    scores = importance.scores.astype(np.float64)
    if scores.size != len(prompt.draft):
        raise InputError("importance", scores.size, f"{len(prompt.draft)} scores, one per token")
    settings = prompt.settings.in_force()
    n = len(prompt.target)
    rules, kept = _protect(prompt)
    budget = settings.budget(n)
    limit = settings.limit(n)
    used = _cost(kept, separator_tokens)
    exceeded = used > limit
    if not exceeded:
        assert settings.chunk_tokens is not None
        assert settings.snap is not None
        cuts = _common_cuts(prompt, settings.snap)
        borders = chunk_borders(len(prompt.draft), settings.chunk_tokens, cuts)
        places = _target_borders(prompt, borders)
        free = np.concatenate(([0], np.cumsum(~kept)))
        costs = free[places[1:]] - free[places[:-1]]
        masses = np.add.reduceat(np.where(rules == 0, scores, 0.0), borders[:-1])
        mass = float(scores.sum() - masses.sum())
        enough = (settings.coverage or 1.0) * float(scores.sum())
        order = _best_first(masses, rules, borders)
        last = borders.size - 2
        if last in order and borders[-1] - borders[-2] < settings.chunk_tokens:
            order.insert(0, order.pop(order.index(last)))  # a partial last chunk goes first
        for chunk in order:
            if budget is None and mass >= enough and used >= settings.clamp(0, n):
                break
            here = slice(int(places[chunk]), int(places[chunk + 1]))
            cost = int(costs[chunk])
            if separator_tokens:
                cost += separator_tokens * _new_gaps(kept, here)
            if used + cost > limit:
                continue
            kept[here] = True
            used += cost
            mass += float(masses[chunk])
            chosen = rules[borders[chunk] : borders[chunk + 1]]
            chosen[chosen == 0] = _IMPORTANCE
    total = float(scores.sum())
    return Kept(
        spans=_spans(prompt, rules),
        target_tokens=kept,
        budget=budget,
        mass=float(scores[rules != 0].sum()) / total if total > 0 else 1.0,
        protected_exceeds_budget=exceeded,
    )


def protected_tokens(prompt: Prompt, separator_tokens: int = 0) -> int:
    """Target tokens that `select` keeps whatever the scores, with the separators they need."""
    return _cost(_protect(prompt)[1], separator_tokens)


def _cost(kept: NDArray[np.bool_], separator_tokens: int) -> int:
    """What kept target tokens take of a budget, with a separator in every gap between them."""
    return int(kept.sum()) + separator_tokens * max(_rises(kept, 0, kept.size) - 1, 0)


def _protect(prompt: Prompt) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Rule code per draft token (0: none yet), and the target tokens that are protected."""
    rules = np.zeros(len(prompt.draft), dtype=np.uint8)
    # BOS and the like stand for no text: kept, and an attention sink that no chunk may profit by.
    rules[prompt.draft.starts == prompt.draft.ends] = _RULES.index("control") + 1
    kept = prompt.target.starts == prompt.target.ends
    # Later writes win, so the rule of highest precedence is written last.
    for span in sorted(prompt.protected, key=lambda s: -PROTECTION_RULES.index(s.rule)):
        rules[prompt.draft.overlapping(span.start, span.end)] = _RULES.index(span.rule) + 1
        kept[prompt.target.overlapping(span.start, span.end)] = True
    if kept.size:
        kept[-1] = True
    return rules, kept


def _best_first(
    masses: NDArray[np.float64], rules: NDArray[np.uint8], borders: NDArray[np.int64]
) -> list[int]:
    """Chunks by falling mean score of their unprotected tokens; wholly protected ones left out."""
    tokens = np.add.reduceat((rules == 0).astype(np.int64), borders[:-1])
    means = masses / np.maximum(tokens, 1)
    order: NDArray[np.int64] = np.argsort(-means, kind="stable")
    best: list[int] = order[tokens[order] > 0].tolist()
    return best


def _common_cuts(prompt: Prompt, level: str) -> list[Cuts]:
    """Where the draft's tokens may be cut: places that are fair cuts of the target's as well.

    A cut that only the draft's tokens allow would part a word or a character in the target's.
    """
    draft = Boundaries(prompt.text, prompt.draft.starts, prompt.draft.ends).at(level)
    if prompt.shared_tokenizer:
        return draft
    target = Boundaries(prompt.text, prompt.target.starts, prompt.target.ends).at(level)
    ours, theirs = (np.append(e.starts, len(prompt.text)) for e in (prompt.draft, prompt.target))
    for cuts, others in zip(draft, target, strict=True):
        fair = np.zeros(len(prompt.text) + 1, dtype=np.bool_)
        fair[theirs[others]] = True
        cuts &= fair[ours]
        cuts[[0, -1]] = True
    return draft


def _target_borders(prompt: Prompt, borders: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of the first target token that starts at or after each draft border."""
    if prompt.shared_tokenizer:
        return borders
    edges = np.append(prompt.draft.starts, len(prompt.text))[borders]
    places = np.searchsorted(prompt.target.starts, edges, side="left").astype(np.int64)
    places[0], places[-1] = 0, len(prompt.target)
    return places


def _rises(kept: NDArray[np.bool_], start: int, stop: int) -> int:
    """How many runs of kept tokens begin in `[start, stop]`."""
    window = kept[max(start - 1, 0) : stop + 1]
    first = int(start == 0 and window.size > 0 and bool(window[0]))
    return first + int(np.count_nonzero(window[1:] & ~window[:-1]))


def _new_gaps(kept: NDArray[np.bool_], here: slice) -> int:
    """How many more gaps there are once `here` is kept as well (-1 where it closes one)."""
    before = _rises(kept, here.start, here.stop)
    was = kept[here].copy()
    kept[here] = True
    after = _rises(kept, here.start, here.stop)
    kept[here] = was
    return after - before


def _spans(prompt: Prompt, rules: NDArray[np.uint8]) -> tuple[KeptSpan, ...]:
    """Runs of equal rule as spans; white space between tokens goes with the token after it."""
    if not rules.size:
        return ()
    edges = np.concatenate(([0], np.flatnonzero(np.diff(rules)) + 1, [rules.size]))
    at = np.append(prompt.draft.starts, len(prompt.text))
    return tuple(
        KeptSpan(int(at[a]), int(at[b]), _RULES[rules[a] - 1], int(a), int(b))
        for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        if rules[a] and at[b] > at[a]
    )
