"""What is kept between requests: a hit gives what a miss gives, and memory is bounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.test_windows import fresh_ids, random_model
from trtllm_specprefill.cache import CACHED, Recent, RememberingDraft, key_of, remembering
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.models import Model
from trtllm_specprefill.pipeline import Generation, SpecPrefill
from trtllm_specprefill.settings import Settings
from trtllm_specprefill.target.torch import TorchTarget

ASKED = Settings(draft_window=200, draft_layers=2, draft_tail=32)
ROOM = 1 << 24


@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=60),
    most=st.integers(0, 100),
)
def test_what_was_used_last_is_kept_and_never_more_than_there_is_room_for(
    sizes: list[tuple[int, int]], most: int
) -> None:
    recent: Recent[bytes] = Recent(most, len)
    model: dict[int, bytes] = {}  # the least recently used first
    for key, size in sizes:
        if key in model:
            model[key] = model.pop(key)
        assert recent.get(key_of(b"%d" % key)) == model.get(key)
        recent.put(key_of(b"%d" % key), bytes(size))
        if key not in model and size <= most:
            model[key] = bytes(size)
        while sum(map(len, model.values())) > most:
            del model[next(iter(model))]
    for key in range(10):
        assert recent.get(key_of(b"%d" % key)) == model.get(key)


def test_room_for_less_than_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="-1048576 bytes"):
        TorchDraft(random_model("llama"), -1 << 20)


def test_keys_tell_apart_what_is_divided_otherwise() -> None:
    assert len({key_of(b"ab", b"c"), key_of(b"a", b"bc"), key_of(b"abc"), key_of(b"abc", b"")}) == 4


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_windows_that_are_kept_score_as_windows_read_at_once(family: str) -> None:
    model, ids = random_model(family), fresh_ids(1500)
    once = TorchDraft(model).score(ids, ASKED)
    keeping = TorchDraft(model, ROOM)
    missed, hit = keeping.score(ids, ASKED), keeping.score(ids, ASKED)
    np.testing.assert_allclose(missed.scores, once.scores, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(hit.scores, missed.scores)
    assert (hit.layers, hit.queries, hit.heads) == (once.layers, once.queries, once.heads)


def fed_by(model: Model, run: Any) -> int:
    """How many tokens went through the model's first layer during `run`."""
    seen: list[int] = []
    layer = model.module.get_submodule("model.layers.0")
    hook = layer.register_forward_pre_hook(lambda _, x: seen.append(x[0].shape[0] * x[0].shape[1]))
    run()
    hook.remove()
    return sum(seen)


def test_of_a_conversation_that_grows_only_the_new_windows_are_read() -> None:
    model, before = random_model("llama"), fresh_ids(2100)
    after = np.concatenate((before, fresh_ids(150)))
    first, second = np.arange(2070, 2100), np.arange(2220, 2250)
    cold, warm = TorchDraft(model, ROOM), TorchDraft(model, ROOM)
    expected = cold.score(after, ASKED, second)
    warm.score(before, ASKED, first)
    known: list[Any] = []
    read = fed_by(model, lambda: known.append(warm.score(after, ASKED, second)))
    np.testing.assert_array_equal(known[0].scores, expected.scores)
    windows = cold.windows(2250, ASKED, second)
    tails = windows.tail * len(windows.tokens)
    stretch = windows.tokens.shape[1] - windows.tail
    assert read <= tails + 3 * stretch  # the one at the old end, the new one and the last
    assert read < 0.5 * windows.tokens.size


def test_a_marker_that_changes_every_turn_costs_the_windows_that_hold_it() -> None:
    """19: a token budget told near the end makes each prompt new, and must not make it cold."""
    model, ids = random_model("llama"), fresh_ids(2200)
    other = ids.copy()
    other[2140:2160] = fresh_ids(20)
    question = np.arange(2170, 2200)
    cold, warm = TorchDraft(model, ROOM), TorchDraft(model, ROOM)
    expected = cold.score(other, ASKED, question)
    whole = cold.windows(2200, ASKED, question).tokens.size
    warm.score(ids, ASKED, question)
    known: list[Any] = []
    read = fed_by(model, lambda: known.append(warm.score(other, ASKED, question)))
    np.testing.assert_array_equal(known[0].scores, expected.scores)
    assert read < 0.5 * whole


def test_a_draft_keeps_no_more_than_it_is_told_to() -> None:
    model, ids = random_model("llama"), fresh_ids(2100)
    expected = TorchDraft(model, ROOM).score(ids, ASKED).scores
    roomy = TorchDraft(model, ROOM)
    roomy.score(ids, ASKED)
    assert roomy._known is not None
    most = roomy._known._used // 3
    draft = TorchDraft(model, most)
    for _ in range(2):
        np.testing.assert_array_equal(draft.score(ids, ASKED).scores, expected)
        assert draft._known is not None
        assert 0 < draft._known._used <= most


class Counting(TorchDraft):
    """A draft that counts how often it is asked."""

    asked = 0

    def score(self, *args: Any) -> Any:
        self.asked += 1
        return super().score(*args)


def test_a_prompt_that_comes_again_is_not_scored_again() -> None:
    inner = Counting(random_model("llama"))
    draft, ids = RememberingDraft(inner, ROOM), fresh_ids(500)
    question = np.arange(400, 420)
    first = draft.score(ids, ASKED, question)
    again = draft.score(ids.copy(), ASKED, question.copy())
    assert inner.asked == 1
    np.testing.assert_array_equal(again.scores, first.scores)
    assert again.seconds == {CACHED: 0.0}
    assert again.layers == first.layers
    other = ids.copy()
    other[250] += 1
    for asked in (
        (other, ASKED, question),
        (ids, ASKED, question[1:]),
        (ids, ASKED, None),
        (ids, ASKED.model_copy(update={"pool": 15}), question),
    ):
        before = inner.asked
        assert "draft_prefill" in draft.score(*asked).seconds
        assert inner.asked == before + 1


def test_known_scores_cannot_be_changed_by_whoever_gets_them() -> None:
    draft, ids = RememberingDraft(TorchDraft(random_model("llama")), ROOM), fresh_ids(300)
    with pytest.raises(ValueError, match="read-only"):
        draft.score(ids, ASKED).scores[0] = 1.0


def test_half_precision_windows_are_kept_as_well() -> None:
    model = replace(random_model("llama"), dtype=torch.bfloat16)
    model.module.to(torch.bfloat16)
    ids = fresh_ids(900)
    keeping = TorchDraft(model, ROOM)
    np.testing.assert_array_equal(
        keeping.score(ids, ASKED).scores, keeping.score(ids, ASKED).scores
    )


@pytest.mark.model
def test_a_second_turn_reads_what_is_new_and_selects_what_a_cold_draft_selects(
    smollm2: Model, prose: str
) -> None:
    """6: a system prompt's secret word, cold and warm, and the turn after it."""
    target = TorchTarget(smollm2)

    def pair() -> SpecPrefill:
        return SpecPrefill(remembering(TorchDraft(smollm2, 1 << 28), 1 << 28), target)

    def read(model: SpecPrefill, turns: list[dict[str, str]]) -> tuple[int, Generation]:
        answers: list[Generation] = []
        knobs = {"keep": 0.3, "threshold": 0, "min_keep_tokens": 0, "max_tokens": 12}

        tokens = fed_by(smollm2, lambda: answers.append(model.generate(turns, **knobs)))
        return tokens - answers[0].plan.input_ids.size, answers[0]

    turns = [
        {"role": "system", "content": "The secret word is 'marzipan'. Tell it when asked."},
        {"role": "user", "content": prose[:9000] + "\n\nWhat is the secret word?"},
    ]
    warm = pair()
    cold_read, first = read(warm, turns)
    again_read, again = read(warm, turns)
    assert (again.text, again.stages["draft_cached"]) == (first.text, 0.0)
    assert again_read < 64  # the answer's own tokens
    turns += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And which word was secret, once more?"},
    ]
    warm_read, warm_answer = read(warm, turns)
    full_read, cold_answer = read(pair(), turns)
    np.testing.assert_array_equal(warm_answer.plan.input_ids, cold_answer.plan.input_ids)
    assert warm_answer.text == cold_answer.text
    for one in (first, again, warm_answer, cold_answer):
        assert turns[0]["content"] in target.tokenizer.decode(one.plan.input_ids)
    assert warm_read < 0.6 * full_read
    assert cold_read > 1500
