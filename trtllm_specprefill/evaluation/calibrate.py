"""Which heads of a draft find what a question is about, and after how many layers?

Every head of the first layers scores every prompt by itself. A set of heads scores by the maximum
over them, as the importance does, so any set can be judged from the same passes. Sets are
grown greedily, head by head, by how few chunks are ranked above the fact's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_specprefill.draft.capture import Enough, capturing, mask_to_bool
from trtllm_specprefill.draft.heads import Depth, HeadCalibration
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.evaluation import qa
from trtllm_specprefill.evaluation.forms import FORMS, PARAPHRASED, told
from trtllm_specprefill.evaluation.needle import TEMPLATES, Case, cases, fact_kept
from trtllm_specprefill.evaluation.qa import Question
from trtllm_specprefill.evaluation.words import find_words
from trtllm_specprefill.importance import Importance, combine
from trtllm_specprefill.importance_op import importance_layer
from trtllm_specprefill.prompt import Prompt, prepare
from trtllm_specprefill.selection import select
from trtllm_specprefill.settings import Settings

Head = tuple[int, int]
"""Layer and query head."""

KEEP_RATES = (0.05, 0.1)
GAIN = 0.02  # mean log rank that another head must be worth
MOST_HEADS = 8
_CHUNK = 32
_HELD_OUT = 1_000_000  # added to the seed: other passages and facts


@dataclass(frozen=True)
class Scored:
    """A prompt and what every head thinks of it.

    prompts: the same at each of `KEEP_RATES`. scores: float16 `[layers, heads, N]`. chunks: their
    means over chunks, float32 `[layers, heads, C]`. free: bool `[C]`, chunks that must earn
    their place. fact: the chunks that hold the answer.
    """

    case: Case
    prompts: dict[float, Prompt]
    scores: NDArray[np.float16]
    chunks: NDArray[np.float32]
    free: NDArray[np.bool_]
    fact: tuple[int, ...]


def score_by_head(draft: TorchDraft, case: Case, form: str, layers: int) -> Scored:
    """Let each head of the first `layers` layers score a case, told in one of `forms.FORMS`.

    Heads of a layer that does not see a whole window score nothing.
    """
    source, question = told(case, form)
    prompts = {
        rate: prepare(
            source,
            target_tokenizer=draft.tokenizer,
            settings=Settings.of(keep_rate=rate, min_keep_tokens=0),
            question=question,
        )
        for rate in KEEP_RATES
    }
    prompt = prompts[KEEP_RATES[0]]
    ids, settings = prompt.draft.ids, prompt.settings.in_force()
    windows = draft.windows(ids.size, settings, prompt.question)
    tokens = torch.from_numpy(ids.astype(np.int64)[windows.tokens])
    rows = []
    for row in tokens:
        seen = _EachHead(min(settings.window, windows.tail), layers, settings)
        with torch.inference_mode(), capturing(seen), suppress(Enough):
            draft.model.module(
                input_ids=row[None].to(draft.model.device), use_cache=False, logits_to_keep=1
            )
        rows.append(np.stack(seen.layers))
    by_window = np.stack(rows)
    heads = by_window.shape[2]
    scores = np.stack(
        [
            [windows.gather(by_window[:, layer, head], ids.size) for head in range(heads)]
            for layer in range(layers)
        ]
    )
    count = ids.size // _CHUNK
    chunks = scores[..., : count * _CHUNK].reshape(layers, heads, count, _CHUNK).mean(axis=-1)
    free = np.ones(ids.size, dtype=np.bool_)
    for span in prompt.protected:
        free[prompt.draft.overlapping(span.start, span.end)] = False
    found = find_words(case.answer, prompt.text, prompt.text.find(case.fact))
    assert found is not None, case
    answer = prompt.draft.overlapping(*found)
    fact = sorted({min(i // _CHUNK, count - 1) for i in range(answer.start, answer.stop)})
    free_chunks = free[: count * _CHUNK].reshape(count, _CHUNK).any(axis=1)
    return Scored(case, prompts, scores.astype(np.float16), chunks, free_chunks, tuple(fact))


class _EachHead:
    """The scores of every head by itself, of one window."""

    def __init__(self, width: int, depth: int, settings: Settings) -> None:
        self._width, self._depth, self._settings = width, depth, settings
        self.layers: list[NDArray[np.float32]] = []

    def see(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None,
    ) -> None:
        """See `Capture.see`."""
        votes = self._settings.votes
        assert votes is not None
        if mask is not None and not bool(mask_to_bool(mask)[..., -1, :].all()):
            # A sliding window hides part of what is read.
            self.layers.append(np.zeros((q.shape[1], k.shape[2]), dtype=np.float32))
        else:
            queries = q[:, :, -self._width :]
            scored = [
                importance_layer(
                    queries, k, scale=scale, pool=self._settings.pool, causal=True, heads=[head]
                )
                for head in range(q.shape[1])
            ]
            self.layers.append(np.stack([combine(one, votes)[0] for one in scored]))
        if layer + 1 == self._depth:
            raise Enough


def objective(prompts: Sequence[Scored], heads: Sequence[Head]) -> float:
    """Mean log of the share of chunks ranked above the fact's; lower is better."""
    return float(np.mean([np.log(_rank(one, heads) + 1 / one.free.size) for one in prompts]))


def _rank(one: Scored, heads: Sequence[Head]) -> float:
    best = np.max([one.chunks[layer, head] for layer, head in heads], axis=0)
    best = np.where(one.free, best, -1.0)
    # Chunks of the same score lie above: a head that scores nothing has found nothing.
    others = [int((best >= best[chunk]).sum()) - 1 for chunk in one.fact]
    return max(others) / one.free.size


def choose(prompts: Sequence[Scored], layers: int) -> list[Head]:
    """The best heads of the first `layers` layers, the most telling first."""
    everyone = [(i, j) for i in range(layers) for j in range(prompts[0].chunks.shape[1])]
    chosen: list[Head] = []
    reached = np.inf
    while len(chosen) < MOST_HEADS:
        rest = [head for head in everyone if head not in chosen]
        value, head = min((objective(prompts, [*chosen, head]), head) for head in rest)
        if value > reached - GAIN:
            break
        reached = value
        chosen.append(head)
    return chosen


def recall(prompts: Iterable[Scored], heads: Sequence[Head]) -> dict[str, float]:
    """Share of the facts that selection keeps, by keep rate."""
    kept: dict[str, list[bool]] = {f"{rate:g}": [] for rate in KEEP_RATES}
    for one in prompts:
        scores = np.max([one.scores[layer, head] for layer, head in heads], axis=0)
        importance = Importance(np.maximum(scores.astype(np.float32), 1e-9), 1, 1, (0,))
        for rate, prompt in one.prompts.items():
            kept[f"{rate:g}"].append(fact_kept(prompt, select(prompt, importance), one.case))
    return {rate: round(float(np.mean(found)), 3) for rate, found in kept.items()}


def by_layer(heads: Sequence[Head]) -> tuple[tuple[int, ...], ...]:
    """For each layer up to the last that scores, its heads in order."""
    last = max(layer for layer, _ in heads)
    return tuple(tuple(sorted(h for i, h in heads if i == layer)) for layer in range(last + 1))


def calibrate(
    draft: TorchDraft,
    texts: Sequence[str],
    questions: Sequence[Question],
    tokens: int,
    prompts: int,
    deepest: int,
    *,
    slack: float,
    seed: int,
    command: str,
    say: Callable[[str], None],
) -> HeadCalibration:
    """Choose heads on facts in the first of `texts`, judge them on other facts in all of them.

    questions: on the first of `texts`; every other one joins those that choose, the rest judge.
    tokens: of a prompt. prompts: so many facts choose and about as many judge. deepest: most
    layers to run. slack: recall on the judging prompts that is given up for a shallower pass.
    command: what asked for it. say: told of progress.
    """
    reader, share = draft.tokenizer, -(-prompts // len(texts))
    asked = _told(draft, qa.cases(texts[0], reader, [tokens], questions, seed))
    seen = _told(draft, cases(texts[0], reader, [tokens], [prompts], seed, TEMPLATES)) + asked[::2]
    unseen = asked[1::2]
    for i, text in enumerate(texts):
        own = seed + _HELD_OUT * (i + 1)
        unseen += _told(draft, cases(text, reader, [tokens], [share], own, PARAPHRASED))
    scored = []
    for case, form in [*seen, *unseen]:
        scored.append(score_by_head(draft, case, form, deepest))
        say(f"{len(scored)} of {len(seen) + len(unseen)} prompts")
    choosing, judging = scored[: len(seen)], scored[len(seen) :]
    depths = sorted(_depths(choosing, judging, deepest), key=lambda depth: depth.layers)
    best = max(map(_mean, depths))
    taken = next(depth for depth in depths if _mean(depth) >= best - slack)
    usual = min(draft.usual_depth(Settings().in_force()), deepest)
    everyone = [*product(range(usual), range(scored[0].scores.shape[1]))]
    return HeadCalibration(
        fingerprint=draft.model.fingerprint,
        command=command,
        draft=draft.name,
        layers=taken.layers,
        depths=tuple(depths),
        tokens=tokens,
        prompts=len(choosing),
        seed=seed,
        all_heads=recall(judging, everyone),
    )


def _told(draft: TorchDraft, asked: Iterable[Case]) -> list[tuple[Case, str]]:
    """Each case, and the form it is told in, in turn."""
    forms = [form for form in FORMS if form == "text" or draft.tokenizer.chat_template]
    return [(case, forms[i % len(forms)]) for i, case in enumerate(asked)]


def _depths(choosing: Sequence[Scored], judging: Sequence[Scored], deepest: int) -> Iterator[Depth]:
    """The best heads of each depth at which there are better ones than before."""
    known: set[int] = set()
    for layers in range(1, deepest + 1):
        heads = choose(choosing, layers)
        lists = by_layer(heads)
        if len(lists) not in known:
            known.add(len(lists))
            yield Depth(
                layers=len(lists),
                heads=lists,
                recall=recall(choosing, heads),
                held_out=recall(judging, heads),
            )


def _mean(depth: Depth) -> float:
    return sum(depth.held_out.values()) / len(depth.held_out)
