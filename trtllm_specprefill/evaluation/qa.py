"""Questions about prose: are those that the full prompt answers still answered after pruning?

Each question is about one paragraph of a document, in other words than the paragraph's own. It is
asked of that paragraph among its neighbours, at a depth that differs from question to question.
Retention is the number of right answers to the pruned prompts by that to the full ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from trtllm_specprefill.allowed import refusal
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.evaluation.needle import FULL, Case
from trtllm_specprefill.evaluation.words import find_words
from trtllm_specprefill.plan import Reason
from trtllm_specprefill.prompt import encode, read_text

_SHIPPED = files("trtllm_specprefill.evaluation") / "questions.json"
_RESAMPLES = 10_000
_Z = 1.96  # 95 % of a normal distribution lie within so many deviations
_Words = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]


class Question(BaseModel):
    """anchor: words found once in the document, in the paragraph that answers. answers: forms of
    the answer that are right, one of which stands in that paragraph.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    anchor: _Words
    question: _Words
    answers: tuple[_Words, ...]


class Questions(BaseModel):
    """A file of questions and the name of the document that they are about."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    document: str
    questions: tuple[Question, ...] = Field(min_length=1)


def read_questions(path: Path | None = None) -> tuple[Question, ...]:
    """The questions of a JSON file; those on the handbook (see `haystack`) when it is None.

    Raises `InputError` for a file that is not of the form of `Questions`.
    """
    text = _SHIPPED.read_text("utf-8") if path is None else read_text("questions", path)
    try:
        return Questions.model_validate_json(text).questions
    except ValidationError as error:
        allowed = f"a JSON file of questions ({refusal(Questions, error)})"
        raise InputError("questions", str(path), allowed) from None


def locate(paragraphs: Sequence[str], question: Question) -> int:
    """Index of the paragraph that answers.

    Raises `InputError` where the anchor is not in just one, or no accepted answer stands there.
    """
    found = [i for i, paragraph in enumerate(paragraphs) if question.anchor in paragraph]
    if len(found) != 1:
        allowed = f"words of one paragraph of the document, not of {len(found)}"
        raise InputError("anchor", question.anchor, allowed)
    if _stated(question, paragraphs[found[0]]) is None:
        raise InputError("answers", question.answers, f"words of “{paragraphs[found[0]][:60]}…”")
    return found[0]


def _stated(question: Question, paragraph: str) -> str | None:
    """The form of the answer that the paragraph has."""
    return next((words for words in question.answers if find_words(words, paragraph)), None)


def cases(
    prose: str, tokenizer: Any, lengths: Sequence[int], questions: Sequence[Question], seed: int
) -> Iterator[Case]:
    """Every question at each of `lengths` (tokens of the context), depths spread evenly.

    The depth of a question is the same at every length. seed: of the random baseline.
    """
    paragraphs = prose.split("\n\n")
    places = [locate(paragraphs, question) for question in questions]
    for tokens in lengths:
        for i, (question, place) in enumerate(zip(questions, places, strict=True)):
            depth = (i + 0.5) / len(questions)
            answer = _stated(question, paragraphs[place])
            assert answer is not None
            yield Case(
                context="\n\n".join(passage_around(paragraphs, place, tokenizer, tokens, depth)),
                fact=paragraphs[place],
                question=question.question,
                lead="",
                answer=answer,
                tokens=tokens,
                depth=depth,
                seed=seed + 1000 * tokens + i,
                accepted=question.answers,
            )


def passage_around(
    paragraphs: Sequence[str], place: int, tokenizer: Any, tokens: int, depth: float
) -> list[str]:
    """Consecutive paragraphs of at most about `tokens` tokens with `place` at `depth` among them.

    What lies before it takes `depth` of the tokens that it leaves, what lies behind the others.
    The end of the document is followed by its beginning.
    """

    def neighbours(step: int, room: int) -> tuple[list[str], int]:
        taken: list[str] = []
        for i in range(1, len(paragraphs)):
            paragraph = paragraphs[(place + step * i) % len(paragraphs)]
            cost = _cost(paragraph, tokenizer)
            if cost > room:
                return taken, room
            room -= cost
            taken.append(paragraph)
        raise InputError("lengths", tokens, "fewer tokens than the document has")

    room = tokens - _cost(paragraphs[place], tokenizer)
    before, unused = neighbours(-1, round(depth * room))
    behind, _ = neighbours(1, room - round(depth * room) + unused)
    return [*before[::-1], paragraphs[place], *behind]


def _cost(paragraph: str, tokenizer: Any) -> int:
    return len(encode(tokenizer, paragraph, special=False)) + 1


def retention(rows: Sequence[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """What each pruned arm keeps of the full prompt's right answers, by length and over all.

    both, only_full, only_pruned, neither: cases that were answered right so. retention: right
    pruned by right in full; interval: its central 95 % over questions drawn again with
    replacement, one question with all its lengths. still_right: both by right in full, with the
    95 % of Wilson, which is not of width 0 where all or none are. All four are None where none is
    right in full. A case that is too long for the target in full does not count.
    """
    table = []
    asked = [r for r in rows if r["results"][FULL]["reason"] != Reason.CONTEXT_TOO_LONG.value]
    lengths: list[int | None] = [*sorted({r["tokens"] for r in asked}), None]
    for tokens in lengths:
        chosen = [r for r in asked if tokens in (None, r["tokens"])]
        questions = sorted({r["question"] for r in chosen})
        owner = np.array([questions.index(r["question"]) for r in chosen], dtype=np.int64)
        for arm in chosen[0]["results"] if chosen else ():
            if arm == FULL:
                continue
            full, pruned = (
                np.array([r["results"][name]["right"] for r in chosen], dtype=np.bool_)
                for name in (FULL, arm)
            )
            by_question = (
                np.bincount(owner, weights=right, minlength=len(questions)).astype(np.float64)
                for right in (full, pruned)
            )
            table.append(
                {
                    "tokens": tokens,
                    "arm": arm,
                    "cases": len(chosen),
                    "both": int((full & pruned).sum()),
                    "only_full": int((full & ~pruned).sum()),
                    "only_pruned": int((~full & pruned).sum()),
                    "neither": int((~full & ~pruned).sum()),
                    "retention": float(pruned.sum() / full.sum()) if full.any() else None,
                    "interval": _interval(*by_question, seed=seed),
                    "still_right": float(pruned[full].mean()) if full.any() else None,
                    "still_right_interval": _wilson(int((full & pruned).sum()), int(full.sum())),
                }
            )
    return table


def _interval(
    full: NDArray[np.float64], pruned: NDArray[np.float64], *, seed: int
) -> tuple[float, float] | None:
    """Percentiles 2.5 and 97.5 of the ratio of the sums, of resampled pairs."""
    drawn = np.random.default_rng(seed).integers(full.size, size=(_RESAMPLES, full.size))
    bottom = full[drawn].sum(axis=1)
    if not full.any():
        return None
    ratio = pruned[drawn].sum(axis=1)[bottom > 0] / bottom[bottom > 0]
    low, high = np.percentile(ratio, (2.5, 97.5))
    return round(float(low), 3), round(float(high), 3)


def _wilson(right: int, count: int) -> tuple[float, float] | None:
    """Interval of the share `right` of `count` (E. B. Wilson, 1927)."""
    if count == 0:
        return None
    share = right / count
    middle = share + _Z**2 / (2 * count)
    reach = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    low, high = ((middle + side * reach) / (1 + _Z**2 / count) for side in (-1, 1))
    return round(max(low, 0.0), 3), round(min(high, 1.0), 3)
