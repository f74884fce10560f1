"""Needle in a haystack: is a planted fact still answered after pruning?

One sentence with a random number is planted at a known depth of real prose, and asked for.
Each prompt is scored by the draft once; every keep rate then selects from the same scores, so
the rows of the table differ in nothing but what was kept. `random` keeps the same protected
spans and as many tokens, chosen by a seeded die instead of the draft: the baseline that says
how much is the draft's doing.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_specprefill.draft.base import Draft
from trtllm_specprefill.errors import ContextTooLong, InputError
from trtllm_specprefill.evaluation.words import find_words
from trtllm_specprefill.importance import Importance
from trtllm_specprefill.pipeline import SpecPrefill
from trtllm_specprefill.plan import (
    PrunePlan,
    Reason,
    check_fits,
    dense_plan,
    make_plan,
    resolve_positions,
)
from trtllm_specprefill.prompt import Prompt, ask, encode, prepare
from trtllm_specprefill.selection import Kept, select
from trtllm_specprefill.settings import Sampling, Settings

# Fact, question, and the words a base model is given to complete.
TEMPLATES = (
    (
        "The access code of the {place} is {number}.",
        "What is the access code of the {place}?",
        "The access code of the {place} is",
    ),
    (
        "Remember that the secret number for the {place} is {number}.",
        "What is the secret number for the {place}?",
        "The secret number for the {place} is",
    ),
    (
        "The registration number of the {place} is {number}.",
        "What is the registration number of the {place}?",
        "The registration number of the {place} is",
    ),
    (
        "In the {place}, the serial number on the door reads {number}.",
        "What does the serial number on the door of the {place} read?",
        "The serial number on the door of the {place} reads",
    ),
)
PLACES = ("lighthouse", "old mill", "harbour office", "glass house", "north tower", "bakery")
FULL, RANDOM = "full", "random"


@dataclass(frozen=True)
class Case:
    """One prompt: `context` holds `fact` at `depth` (0 begin, 1 end) and `question` asks for it.

    lead: the words that a model without a chat template is given to complete; may be empty.
    answer: words of the fact. accepted: other words that are right as well.
    """

    context: str
    fact: str
    question: str
    lead: str
    answer: str
    tokens: int
    depth: float
    seed: int
    accepted: tuple[str, ...] = ()

    def is_right(self, text: str) -> bool:
        """Whether `text` says the answer, in any of its forms, as whole words."""
        return any(find_words(words, text) for words in (self.answer, *self.accepted))


def cases(
    prose: str,
    tokenizer: Any,
    lengths: Sequence[int],
    needles: Sequence[int],
    seed: int,
    templates: Sequence[tuple[str, str, str]] = TEMPLATES,
) -> Iterator[Case]:
    """For each of `lengths` (tokens of the context) so many `needles`, depths spread evenly.

    templates: fact, question and lead, of which each case takes one.
    """
    paragraphs = prose.split("\n\n")
    for tokens, count in zip(lengths, needles, strict=True):
        for i in range(count):
            case_seed = seed + 1000 * tokens + i
            rng = random.Random(case_seed)
            depth = (i + 0.5) / count
            body = _passage(paragraphs, tokenizer, tokens, rng)
            cut = min(range(len(body)), key=lambda j: abs(_share(body, j) - depth))
            fact, question, lead = rng.choice(templates)
            filling = {
                "place": rng.choice(PLACES),
                "number": str(rng.randint(1_000_000, 9_999_999)),
            }
            fact = fact.format(**filling)
            context = "\n\n".join([*body[:cut], fact, *body[cut:]])
            yield Case(
                context,
                fact,
                question.format(**filling),
                lead.format(**filling),
                filling["number"],
                tokens,
                depth,
                case_seed,
            )


def _passage(paragraphs: list[str], tokenizer: Any, tokens: int, rng: random.Random) -> list[str]:
    """Consecutive paragraphs of about `tokens` tokens, from a random place."""
    start = rng.randrange(len(paragraphs))
    body: list[str] = []
    have = 0
    for i in range(len(paragraphs)):
        paragraph = paragraphs[(start + i) % len(paragraphs)]
        have += len(encode(tokenizer, paragraph, special=False)) + 1
        if have > tokens:
            return body or [paragraph]
        body.append(paragraph)
    raise InputError("lengths", tokens, f"at most {have} tokens, the length of the document")


def _share(body: list[str], count: int) -> float:
    """Share of the characters that lie in the first `count` paragraphs."""
    return sum(map(len, body[:count])) / max(sum(map(len, body)), 1)


def run_case(
    model: SpecPrefill,
    case: Case,
    keep_rates: Sequence[float],
    random_rate: float,
    knobs: dict[str, Any],
) -> dict[str, Any]:
    """Answer one case in full, at each keep rate, and from a random choice; JSON values."""
    draft = model.draft
    if draft is None:
        raise InputError("draft", None, "a draft")
    tokenizer = model.target.tokenizer
    source = ask(case.context, case.question, tokenizer)
    if isinstance(source, str) and case.lead:
        source += f" {case.lead}"
    sampling = Sampling(max_tokens=24)
    row: dict[str, Any] = {
        "tokens": case.tokens,
        "depth": case.depth,
        "seed": case.seed,
        "question": case.question,
        "answer": case.answer,
    }
    results: dict[str, Any] = {}

    def prepared(settings: Settings) -> Prompt:
        return prepare(
            source,
            target_tokenizer=tokenizer,
            draft_tokenizer=draft.tokenizer if model.tokenizer_difference else None,
            settings=settings,
        )

    base = {"min_keep_tokens": 0, **knobs}
    prompt = prepared(Settings.of(**base))
    row["prompt_tokens"] = len(prompt.target)
    results[FULL] = answer(model, dense_plan(prompt, Reason.DISABLED), sampling, case)
    importance = _timed_score(draft, prompt, row)
    die = Importance(
        np.random.default_rng(case.seed).random(len(prompt.draft), dtype=np.float32), 0, 0, ()
    )
    arms = [(f"{rate:g}", rate, importance) for rate in keep_rates]
    arms.append((f"{RANDOM} {random_rate:g}", random_rate, die))
    for name, rate, scores in arms:
        prompt = prepared(Settings.of(**base, keep_rate=rate))
        kept = select(prompt, scores)
        if kept.protected_exceeds_budget:  # the pipeline answers such a prompt in full
            results[name] = {**results[FULL], "reason": Reason.PROTECTED_EXCEEDS_BUDGET.value}
            continue
        positions = resolve_positions(
            prompt.settings.positions,
            model.target.position_support,
            prompt_tokens=len(prompt.target),
            max_tokens=sampling.max_tokens,
            shared_tokenizer=prompt.shared_tokenizer,
        )
        plan = make_plan(prompt, kept, positions)
        results[name] = {
            **answer(model, plan, sampling, case),
            "keep_rate": plan.keep_rate,
            "fact_kept": fact_kept(prompt, kept, case),
            "positions": positions,
        }
    return {**row, "results": results}


def _timed_score(draft: Draft, prompt: Prompt, row: dict[str, Any]) -> Importance:
    importance = draft.score(prompt.draft.ids, prompt.settings, prompt.question)
    row["draft_s"] = sum(importance.seconds.values())
    row["queries"] = importance.queries
    return importance


def answer(model: SpecPrefill, plan: PrunePlan, sampling: Sampling, case: Case) -> dict[str, Any]:
    """What the target answers to `plan`, and whether the fact is in it; "" to one too long."""
    try:
        check_fits(plan, model.target.position_support.context, sampling.max_tokens)
    except ContextTooLong:
        reason = Reason.CONTEXT_TOO_LONG.value
        return {"right": False, "text": "", "target_prefill_s": None, "reason": reason}
    begin = time.perf_counter()
    prefill = 0.0
    text = ""
    for step in model.target.stream(plan, sampling):
        prefill = prefill or time.perf_counter() - begin
        text += step.text
    return {
        "right": case.is_right(text),
        "text": text,
        "target_prefill_s": prefill,
        "reason": plan.reason.value,
    }


def fact_kept(prompt: Prompt, kept: Kept, case: Case) -> bool:
    """Whether every character of the answer, where the fact has it first, survived."""
    found = find_words(case.answer, prompt.text, prompt.text.find(case.fact))
    assert found is not None, case
    tokens = prompt.target.overlapping(*found)
    return bool(kept.target_tokens[tokens].all())


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Share of right answers and of kept facts by length and arm, and over all lengths."""
    table = []
    lengths: list[int | None] = [*sorted({r["tokens"] for r in rows}), None]
    for tokens in lengths:
        chosen = [r for r in rows if tokens in (None, r["tokens"])]
        for arm in chosen[0]["results"]:
            results = [r["results"][arm] for r in chosen]
            table.append(
                {
                    "tokens": tokens,
                    "arm": arm,
                    "cases": len(results),
                    "right": float(np.mean([r["right"] for r in results])),
                    "fact_kept": float(np.mean([r.get("fact_kept", True) for r in results])),
                    "keep_rate": float(np.mean([r.get("keep_rate", 1.0) for r in results])),
                }
            )
    return table


def digest(prose: str) -> str:
    """What identifies the haystack: SHA-256 of its text."""
    return hashlib.sha256(prose.encode("utf-8")).hexdigest()
