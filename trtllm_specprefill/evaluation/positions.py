"""With which positions does a target answer better? The same kept tokens, told both ways."""

from __future__ import annotations

from typing import Any

from trtllm_specprefill.draft.base import Draft
from trtllm_specprefill.evaluation.needle import Case, answer
from trtllm_specprefill.pipeline import SpecPrefill
from trtllm_specprefill.plan import Positions, Reason, dense_plan, make_plan
from trtllm_specprefill.prompt import ask, prepare
from trtllm_specprefill.selection import select
from trtllm_specprefill.settings import Sampling, Settings

POLICIES: tuple[Positions, ...] = ("original", "contiguous")


def compare_positions(model: SpecPrefill, draft: Draft, case: Case, keep: float) -> dict[str, bool]:
    """Whether one case is answered right: `dense`, and pruned to `keep` under each policy."""
    sampling = Sampling(max_tokens=24)
    source: Any = ask(case.context, case.question, model.target.tokenizer)
    if isinstance(source, str):
        source += f" {case.lead}"
    prompt = prepare(
        source,
        target_tokenizer=model.target.tokenizer,
        draft_tokenizer=draft.tokenizer if model.tokenizer_difference else None,
        settings=Settings.of(keep_rate=keep, min_keep_tokens=0),
    )
    kept = select(prompt, draft.score(prompt.draft.ids, prompt.settings, prompt.question))
    plans = {"dense": dense_plan(prompt, Reason.DISABLED)}
    plans |= {policy: make_plan(prompt, kept, policy) for policy in POLICIES}
    return {
        name: bool(answer(model, plan, sampling, case)["right"]) for name, plan in plans.items()
    }
