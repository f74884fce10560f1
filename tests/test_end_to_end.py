"""The whole way on real weights. Numbers in comments are those of method_and_peers.md, part E."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trtllm_specprefill import SpecPrefill
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.errors import DegenerateScores, TargetFailed
from trtllm_specprefill.evaluation.needle import cases
from trtllm_specprefill.models import Model
from trtllm_specprefill.plan import Reason
from trtllm_specprefill.prompt import ask
from trtllm_specprefill.target.torch import TorchTarget

pytestmark = pytest.mark.model
ALL = {"threshold": 0, "min_keep_tokens": 0}


@pytest.fixture(scope="module")
def pair(smollm2: Model) -> SpecPrefill:
    """SmolLM2 scores for itself."""
    return SpecPrefill(TorchDraft(smollm2), TorchTarget(smollm2))


@pytest.fixture(scope="module")
def across(smollm2: Model, gemma3: Model) -> SpecPrefill:
    """SmolLM2 scores for Gemma: another family, another tokenizer, sliding windows."""
    return SpecPrefill(TorchDraft(smollm2), TorchTarget(gemma3))


def passage(prose: str, characters: int, seed: int | None = None) -> str:
    paragraphs = prose.split("\n\n")
    start = random.Random(seed).randrange(len(paragraphs) - 60)
    return "\n\n".join(paragraphs[start : start + 60])[:characters]


def planted(model: SpecPrefill, prose: str, tokens: int, seed: int) -> Any:
    case = next(cases(prose, model.target.tokenizer, [tokens], [1], seed))
    source = ask(case.context, case.question, model.target.tokenizer)
    return case, source if isinstance(source, list) else f"{source} {case.lead}"


def test_a_planted_fact_survives_pruning_to_a_third(pair: SpecPrefill, prose: str) -> None:
    case, source = planted(pair, prose, 1200, seed=1)
    answer = pair.generate(source, keep=0.3, max_tokens=20, **ALL)
    assert case.answer in answer.text
    assert answer.plan.reason is Reason.PRUNED
    assert answer.plan.positions == "original"
    assert answer.plan.keep_rate <= 0.3
    assert answer.plan.position_ids[-1] == answer.plan.prompt_tokens - 1


def test_a_planted_fact_survives_across_families(across: SpecPrefill, prose: str) -> None:
    case, source = planted(across, prose, 900, seed=2)
    answer = across.generate(source, keep=0.3, max_tokens=16, **ALL)
    assert case.answer in answer.text
    assert answer.plan.positions == "contiguous"  # 17: original positions answer 0 of 8
    assert len(answer.plan.input_ids) <= 0.3 * answer.plan.prompt_tokens


def test_keeping_everything_gives_the_dense_greedy_text(pair: SpecPrefill, prose: str) -> None:
    source = [{"role": "user", "content": passage(prose, 1500) + "\n\nSum this up."}]
    whole = pair.generate(source, keep=1.0, max_tokens=24, **ALL)
    dense = pair.generate(source, enabled=False, max_tokens=24)
    assert whole.plan.reason is Reason.PRUNED
    assert whole.token_ids == dense.token_ids
    assert whole.text == dense.text


def test_a_pruned_request_leaves_nothing_behind_for_the_next(pair: SpecPrefill, prose: str) -> None:
    """8: a rotary wrapper left behind broke the next turn."""
    source = [{"role": "user", "content": passage(prose, 2500)}]
    alone = pair.generate(source, enabled=False, max_tokens=12)
    assert pair.generate(source, keep=0.3, max_tokens=4, **ALL).plan.reason is Reason.PRUNED
    assert pair.generate(source, enabled=False, max_tokens=12).token_ids == alone.token_ids


def test_streaming_and_not_streaming_select_the_same_and_say_what_was_used(
    pair: SpecPrefill, prose: str
) -> None:
    """12, 13: one path dropped the keep rate; another used 20 % where 10 % was asked."""
    source = [{"role": "user", "content": passage(prose, 4000)}]
    at_once = pair.generate(source, keep=0.37, max_tokens=6, **ALL)
    *_, last = pair.stream(source, keep=0.37, max_tokens=6, **ALL)
    assert last.generation is not None
    np.testing.assert_array_equal(at_once.plan.input_ids, last.generation.plan.input_ids)
    assert last.generation.text == at_once.text
    assert at_once.report()["settings"]["keep_rate"] == 0.37
    budget = round(0.37 * at_once.plan.prompt_tokens)
    assert budget - 32 <= at_once.plan.input_ids.size <= budget


def test_an_answer_is_not_empty_at_the_smallest_keep_rate(pair: SpecPrefill, prose: str) -> None:
    """14: a prompt pruned to nothing answered with nothing; the floor prevents it."""
    source = [{"role": "user", "content": passage(prose, 5000) + "\n\nWhat is this about?"}]
    answer = pair.generate(source, keep=0.001, max_tokens=8, threshold=0)
    assert answer.text.strip()
    assert answer.plan.reason is Reason.PRUNED
    assert 256 - 32 <= answer.plan.input_ids.size <= 256
    assert "min_keep_tokens raises" in answer.plan.detail  # 13: and it is not done in silence


def test_a_system_prompts_secret_word_is_known_cold_and_warm(pair: SpecPrefill, prose: str) -> None:
    """6: on a cache hit the system prompt was lost without a word."""
    messages = [
        {"role": "system", "content": "The secret word is 'marzipan'. Tell it when asked."},
        {"role": "user", "content": passage(prose, 4000, seed=5) + "\n\nWhat is the secret word?"},
    ]
    for _ in range(2):
        # A model this small answers better from contiguous positions.
        answer = pair.generate(messages, keep=0.2, max_tokens=16, positions="contiguous", **ALL)
        assert answer.plan.reason is Reason.PRUNED
        read = pair.target.tokenizer.decode(answer.plan.input_ids)
        assert messages[0]["content"] in read
        assert "marzipan" in answer.text.lower()


def test_original_positions_on_a_sliding_window_are_refused(
    across: SpecPrefill, prose: str
) -> None:
    """17: honoured by the model, useless to it: every far token lies outside its windows."""
    text = passage(prose, 3500)
    planned = across.plan(text, positions="original", keep=0.2, **ALL)
    prompt, plan = planned.prompt, planned.plan
    assert plan.reason is Reason.UNSUPPORTED_TARGET
    assert "512" in plan.detail
    np.testing.assert_array_equal(plan.input_ids, prompt.target.ids)


def test_no_gain_is_predicted_where_the_draft_costs_what_the_target_saves(
    pair: SpecPrefill, prose: str
) -> None:
    """11, 17: a sparse prefill slower than the dense one is not started when asked not to."""
    source = [{"role": "user", "content": passage(prose, 6000)}]
    plan = pair.plan(source, keep=0.9, min_gain=1.0, **ALL).plan
    assert plan.reason is Reason.PREDICTED_NO_GAIN


def test_scores_do_not_depend_on_what_was_scored_before(smollm2: Model, prose: str) -> None:
    """33: in a batch, later prompts were scored with an earlier prompt's query."""
    draft = TorchDraft(smollm2)
    texts = [passage(prose, n) for n in (900, 1700, 1300)]
    prompts = [np.asarray(smollm2.tokenizer(t)["input_ids"], dtype=np.int32) for t in texts]
    from trtllm_specprefill.settings import Settings

    for settings in (Settings(), Settings(scoring="lookahead")):
        together = [draft.score(ids, settings).scores for ids in prompts]
        alone = [draft.score(ids, settings).scores for ids in reversed(prompts)]
        for first, second in zip(together, reversed(alone), strict=True):
            np.testing.assert_array_equal(first, second)


def test_a_prompt_past_the_drafts_context_goes_to_the_target_in_full(
    smollm2: Model, prose: str
) -> None:
    """31: a drafter past its trained window gives NaN; it is not asked."""
    short = TorchDraft(replace(smollm2, context_length=256))
    model = SpecPrefill(short, TorchTarget(smollm2))
    source = [{"role": "user", "content": passage(prose, 2500)}]
    planned = model.plan(source, scoring="lookahead", **ALL)
    prompt, plan = planned.prompt, planned.plan
    assert plan.reason is Reason.CONTEXT_TOO_LONG
    assert "256" in plan.detail
    np.testing.assert_array_equal(plan.input_ids, prompt.target.ids)


def test_in_windows_a_prompt_past_the_drafts_context_is_scored(smollm2: Model, prose: str) -> None:
    short = TorchDraft(replace(smollm2, context_length=256))
    model = SpecPrefill(short, TorchTarget(smollm2))
    case, source = planted(model, prose, 2000, seed=4)
    plan = model.plan(source, keep=0.2, **ALL).plan
    assert plan.reason is Reason.PRUNED
    assert case.answer in smollm2.tokenizer.decode(plan.input_ids)


@pytest.fixture
def poisoned(smollm2: Model) -> Any:
    """The demo model with NaN in the middle of it, mended afterwards."""
    weight = smollm2.module.model.layers[3].mlp.up_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[5] = float("nan")
    yield smollm2
    with torch.no_grad():
        weight.copy_(kept)


def test_nan_in_the_draft_is_a_reason_and_in_the_target_an_error(
    pair: SpecPrefill, poisoned: Model, prose: str
) -> None:
    """22: NaN logits became a page of '!', the token with id 0."""
    source = [{"role": "user", "content": passage(prose, 1500)}]
    plan = pair.plan(source, keep=0.3, **ALL).plan
    assert plan.reason is Reason.DEGENERATE_SCORES
    with pytest.raises(DegenerateScores):
        pair.plan(source, keep=0.3, strict=True, **ALL)
    with pytest.raises(TargetFailed, match="not finite"):
        pair.generate(source, keep=0.3, max_tokens=4, **ALL)


def test_the_target_decodes_what_transformers_decodes(across: SpecPrefill, prose: str) -> None:
    """On a prompt longer than Gemma's sliding windows, dense and as a contiguous plan alike."""
    text = passage(prose, 4000)
    dense = across.generate(text, enabled=False, max_tokens=12)
    assert dense.plan.prompt_tokens > 600
    ids = torch.from_numpy(dense.plan.input_ids).long()[None]
    module = across.target.model.module
    expected = module.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert list(dense.token_ids) == expected.tolist()[: len(dense.token_ids)]

    pruned = across.generate(text, keep=0.8, positions="contiguous", max_tokens=8, **ALL)
    assert pruned.plan.reason is Reason.PRUNED
    ids = torch.from_numpy(pruned.plan.input_ids).long()[None]
    expected = module.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert list(pruned.token_ids) == expected.tolist()[: len(pruned.token_ids)]


def test_sampling_repeats_with_a_seed_and_stop_texts_end_the_answer(
    pair: SpecPrefill, prose: str
) -> None:
    source = [{"role": "user", "content": passage(prose, 600)}]
    drawn = {"temperature": 1.2, "top_p": 0.95, "top_k": 40, "max_tokens": 16, "enabled": False}
    first = pair.generate(source, seed=7, **drawn)
    assert pair.generate(source, seed=7, **drawn).token_ids == first.token_ids
    assert pair.generate(source, seed=8, **drawn).token_ids != first.token_ids
    unseeded = pair.generate(source, **drawn)
    assert pair.generate(source, seed=unseeded.sampling.seed, **drawn).text == unseeded.text
    assert first.finish_reason in ("length", "stop")

    greedy = pair.generate(source, max_tokens=16, enabled=False)
    middle = greedy.text[len(greedy.text) // 2 :][:4]
    cut = pair.generate(source, max_tokens=16, enabled=False, stop=(middle,))
    assert cut.finish_reason == "stop"
    assert cut.text == greedy.text[: greedy.text.index(middle)]


def test_the_answer_ends_at_the_models_own_eos(pair: SpecPrefill) -> None:
    answer = pair.generate([{"role": "user", "content": "Say only: yes"}], max_tokens=200)
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] in {2}  # <|im_end|>
    assert "<|im_end|>" not in answer.text
    assert answer.plan.reason is Reason.BELOW_THRESHOLD  # LLMLingua 196: and it says so


def test_stage_times_add_up_to_ttft(pair: SpecPrefill, prose: str) -> None:
    source = [{"role": "user", "content": passage(prose, 3000)}]
    stages = {"prepare", "draft_prefill", "select", "plan", "target_prefill"}
    for scoring, own in (("lookahead", {"look_ahead"}), ("window", set())):
        answer = pair.generate(source, scoring=scoring, keep=0.3, max_tokens=3, **ALL)
        before = sum(s for name, s in answer.stages.items() if name != "decode")
        assert before <= answer.ttft_s
        assert before >= 0.95 * answer.ttft_s
        assert stages | own <= set(answer.stages)
