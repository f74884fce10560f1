"""The fast draft: windows and early exit, against the plain form and a judge in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.test_judges import random_model
from trtllm_specprefill.draft import torch as draft_torch
from trtllm_specprefill.draft.capture import capturing
from trtllm_specprefill.draft.reading import ReadingDraft
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.draft.windows import Windows, cut, shared, whole
from trtllm_specprefill.errors import ContextTooLong, DraftFailed, InputError
from trtllm_specprefill.importance import Importance, reference_importance
from trtllm_specprefill.models import Model, load_model
from trtllm_specprefill.operations import prefill_operations
from trtllm_specprefill.settings import Settings, Votes


def fresh_ids(n: int) -> NDArray[np.int32]:
    return np.random.default_rng().integers(2, 211, n).astype(np.int32)


# --- how a prompt is cut


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, NDArray[np.int64], dict[str, int]]:
    n = draw(st.integers(1, 600))
    reach = draw(st.sampled_from([0, 1, 6]))
    overlap = shared(draw(st.integers(0, 40)), 2 * reach + 1)
    count = draw(st.integers(1, min(n, 70)))
    if draw(st.booleans()):
        tail = np.arange(n - count, n)
    else:
        tail = np.sort(np.random.default_rng(draw(st.integers(0, 99))).choice(n, count, False))
    sizes = {
        "head": draw(st.integers(0, 9)),
        "window": draw(st.integers(overlap + 1, 300)),
        "overlap": overlap,
        "reach": reach,
    }
    return n, tail, sizes


@given(case=cuts())
def test_every_token_gets_its_score_from_the_window_that_owns_it(case: Any) -> None:
    n, tail, sizes = case
    windows = cut(n, tail, **sizes)
    # Each window says of each token: the token's own index, which is then found at its place.
    found = windows.gather(windows.tokens.astype(np.float32), n)
    np.testing.assert_array_equal(found, np.arange(n))


@given(case=cuts())
def test_windows_are_equally_long_no_longer_than_asked_and_begin_and_end_alike(case: Any) -> None:
    n, tail, sizes = case
    windows = cut(n, tail, **sizes)
    count, length = windows.tokens.shape
    assert length <= sizes["head"] + sizes["window"] + tail.size
    np.testing.assert_array_equal(
        windows.tokens[:, length - tail.size :], np.tile(tail, (count, 1))
    )
    head = [i for i in range(min(sizes["head"], n)) if i not in set(tail.tolist())]
    np.testing.assert_array_equal(windows.tokens[:, : windows.head], np.tile(head, (count, 1)))
    stretch = windows.tokens[:, windows.head : length - tail.size]
    assert (np.diff(stretch, axis=1) > 0).all()  # in the prompt's order
    # One window fewer, of the same length, would not reach over the body.
    assert count == 1 or (count - 1) * (sizes["window"] - sizes["overlap"]) < (
        windows.body.size - sizes["overlap"]
    )


@given(case=cuts())
def test_pooling_never_reaches_over_the_edge_of_a_window_that_has_a_neighbour(case: Any) -> None:
    n, tail, sizes = case
    windows = cut(n, tail, **sizes)
    count, length = windows.tokens.shape
    stretch = length - windows.head - tail.size
    for i in range(count):
        start, stop = windows.own[i] - windows.first[i], windows.own[i + 1] - windows.first[i]
        assert start < stop or windows.body.size == 0
        if i > 0:  # read before it is owned: all of the overlap but the neighbour's pooling
            assert start >= sizes["overlap"] - sizes["reach"]
        if i < count - 1:
            assert stretch - stop >= sizes["reach"]


def test_tokens_that_every_window_reads_get_the_mean_over_windows() -> None:
    windows = cut(50, np.arange(44, 50), head=2, window=20, overlap=4, reach=2)
    assert windows.tokens.shape[0] == 3
    scores = np.random.default_rng().random(windows.tokens.shape).astype(np.float32)
    found = windows.gather(scores, 50)
    np.testing.assert_allclose(found[:2], scores[:, :2].mean(0), rtol=1e-6)
    np.testing.assert_allclose(found[44:], scores[:, -6:].mean(0), rtol=1e-6)


# --- the judge


class Seen:
    """Queries and keys of every layer of one forward pass."""

    def __init__(self) -> None:
        self.queries: list[Any] = []
        self.keys: list[Any] = []
        self.scale = 0.0

    def see(self, layer: int, q: Any, k: Any, scale: float, mask: Any) -> None:
        self.queries.append(q[0].numpy())
        self.keys.append(k[0].numpy())
        self.scale = scale


def judged(model: Model, ids: Any, layers: int, width: int, pool: int, votes: Votes) -> Any:
    """Importance in float64 of one reading of `ids` by the whole, untouched model."""
    seen = Seen()
    with torch.inference_mode(), capturing(seen):
        model.module(torch.from_numpy(np.asarray(ids)).long()[None], use_cache=False)
    queries = [q[:, -width:] for q in seen.queries[:layers]]
    return reference_importance(queries, seen.keys[:layers], seen.scale, pool, True, votes)


def judged_by_windows(
    model: Model, ids: Any, tail: int, layers: int, width: int, votes: Votes, s: Settings
) -> Any:
    """The definition, one window after the other, with borders found by hand."""
    n, reach = ids.size, s.pool // 2
    overlap = max(s.draft_overlap, s.pool - 1)
    front, back = list(range(s.draft_head)), list(range(n - tail, n))
    body = list(range(s.draft_head, n - tail))
    count = 1
    while count * s.draft_window - (count - 1) * overlap < len(body):
        count += 1
    stretch = min(s.draft_window, len(body))
    out = np.zeros(n)
    for i in range(count):
        start = min(i * (stretch - overlap), len(body) - stretch)
        read = body[start : start + stretch]
        scores = judged(model, ids[front + read + back], layers, width, s.pool, votes)
        out[front] += scores[: len(front)] / count
        out[back] += scores[-len(back) :] / count
        # A later window overwrites what it owns: the last `reach` tokens of the overlap.
        own = 0 if i == 0 else overlap - reach
        out[read[own:]] = scores[len(front) + own : len(front) + stretch]
    return out


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("votes", "pool"), [("max", 13), ("mean", 5)])
@pytest.mark.parametrize("n", [437, 700])
def test_windows_score_what_the_judge_scores(family: str, votes: Votes, pool: int, n: int) -> None:
    model, ids = random_model(family), fresh_ids(n)
    asked = Settings.of(
        draft_window=130, draft_overlap=20, draft_tail=24, draft_layers=2, window=16,
        votes=votes, pool=pool,
    )  # fmt: skip
    importance = TorchDraft(model).score(ids, asked)
    assert importance.layers == (0, 1)
    assert importance.queries == 16
    expected = judged_by_windows(model, ids, 24, 2, 16, votes, asked)
    np.testing.assert_allclose(importance.scores, expected, rtol=2e-5)


@settings(max_examples=12)
@given(n=st.integers(1, 500), layers=st.integers(1, 4), votes=st.sampled_from(["mean", "max"]))
def test_one_window_around_everything_is_the_plain_form(n: int, layers: int, votes: Votes) -> None:
    model, ids = ONE_MODEL(), fresh_ids(n)
    draft = TorchDraft(model)
    knobs = {"draft_layers": layers, "votes": votes, "window": 24}
    windowed = draft.score(ids, Settings.of(draft_window=600, **knobs))
    plain = draft.score(ids, Settings.of(draft_window=0, **knobs))
    expected = judged(model, ids, layers, min(24, n), 13, votes)
    np.testing.assert_allclose(windowed.scores, expected, rtol=2e-5)
    np.testing.assert_allclose(plain.scores, expected, rtol=2e-5)


def ONE_MODEL(made: list[Model] = []) -> Model:  # noqa: B006, N802
    """A model that hypothesis' examples share."""
    if not made:
        made.append(random_model("llama"))
    return made[0]


@settings(max_examples=12)
@given(n=st.integers(1, 1500), window=st.integers(60, 400))
def test_windows_in_a_batch_are_windows_one_by_one(n: int, window: int) -> None:
    draft, ids = TorchDraft(ONE_MODEL()), fresh_ids(n)
    asked = Settings.of(draft_window=window, draft_tail=40, draft_layers=2)
    alone = draft.score(ids, asked).scores
    assert alone.shape == (n,)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_torch, "_CPU_BATCH", 1100)
        together = draft.score(ids, asked).scores
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-9)


# --- what is run, and what is not


def test_no_later_layer_norm_or_head_is_run() -> None:
    model, ids = random_model("llama"), fresh_ids(400)
    draft = TorchDraft(model)
    before = draft.score(ids, Settings(draft_layers=2, draft_window=150)).scores
    layers = model.module.model.layers
    # Of the second layer only what makes queries and keys; of the rest nothing.
    unused = [
        layers[1].self_attn.o_proj, layers[1].mlp, *layers[2:],
        model.module.model.norm, model.module.lm_head,
    ]  # fmt: skip

    def refuse(module: torch.nn.Module, _: Any) -> None:
        raise AssertionError(f"{type(module).__name__} was run")

    for module in unused:
        module.register_forward_pre_hook(refuse)
    after = draft.score(ids, Settings(draft_layers=2, draft_window=150)).scores
    np.testing.assert_array_equal(after, before)
    with pytest.raises(AssertionError, match="was run"):
        draft.score(ids, Settings(draft_layers=3, draft_window=150))


@contextmanager
def lengths_fed(model: Model) -> Iterator[list[NDArray[np.int64]]]:
    """The ids of every forward pass."""
    fed: list[NDArray[np.int64]] = []
    hook = model.module.register_forward_pre_hook(
        lambda _, __, named: fed.append(named["input_ids"].numpy()), with_kwargs=True
    )
    yield fed
    hook.remove()


def test_a_prompt_far_longer_than_the_drafts_context_is_scored_within_it() -> None:
    model = replace(random_model("llama"), context_length=200)
    draft, ids = TorchDraft(model), fresh_ids(2100)
    with lengths_fed(model) as fed:
        importance = draft.score(ids, Settings(draft_layers=2))
    assert importance.scores.shape == (2100,)
    assert (importance.scores > 0).all()
    assert max(part.shape[1] for part in fed) == 200
    with pytest.raises(ContextTooLong, match="draft_window=0"):
        draft.score(ids, Settings(draft_window=0))
    with pytest.raises(ContextTooLong, match="200"):
        draft.score(ids, Settings(draft_tail=190))


def test_the_question_stands_behind_every_window_wherever_it_was() -> None:
    model = random_model("llama")
    ids = fresh_ids(900)
    question = np.r_[10:30, 895:900]
    draft = TorchDraft(model)
    with lengths_fed(model) as fed:
        importance = draft.score(ids, Settings(draft_window=200, draft_layers=1), question)
    assert len(fed) > 3
    for part in fed:
        np.testing.assert_array_equal(part[0, -25:], ids[question])
        np.testing.assert_array_equal(part[0, :4], ids[:4])
    assert importance.queries == 25
    with lengths_fed(model) as fed:
        draft.score(ids, Settings(draft_window=200, draft_layers=1, draft_tail=8), question)
    np.testing.assert_array_equal(fed[0][0, -8:], ids[question[-8:]])


def test_layers_that_slide_vote_in_windows_short_enough_for_them() -> None:
    draft = TorchDraft(random_model("gemma3"))  # windows of 64 in layers 0 and 2
    ids = fresh_ids(300)
    long = Settings(draft_window=100, draft_tail=20, draft_layers=4)
    assert draft.score(ids, long).layers == (1, 3)
    short = Settings(draft_window=40, draft_overlap=13, draft_tail=20, draft_layers=3)
    assert draft.score(ids, short).layers == (0, 1, 2)
    with pytest.raises(DraftFailed, match="no layer"):
        draft.score(ids, long.model_copy(update={"draft_layers": 1}))


def test_memory_of_a_window_is_gone_when_the_next_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only scores, `[N]`, outlive a window: no keys, no queries, no weights."""
    import weakref

    held: list[int] = []
    alive: list[weakref.ref[torch.Tensor]] = []
    original = draft_torch._FirstLayers.see

    def see(self: Any, layer: int, q: Any, k: Any, scale: float, mask: Any) -> None:
        if layer == 0:
            held.append(sum(ref() is not None for ref in alive))
        alive.extend((weakref.ref(q), weakref.ref(k)))
        original(self, layer, q, k, scale, mask)

    monkeypatch.setattr(draft_torch._FirstLayers, "see", see)
    TorchDraft(random_model("llama")).score(
        fresh_ids(1500), Settings(draft_window=200, draft_layers=3)
    )
    assert len(held) > 5
    assert max(held) == 0


# --- what it costs


def test_operations_are_linear_in_the_prompt_and_a_fraction_of_a_whole_pass() -> None:
    model = random_model("llama", num_hidden_layers=8)
    draft = TorchDraft(replace(model, context_length=100_000))
    asked = Settings(draft_layers=2)
    one, four = draft.operations(8_000, asked), draft.operations(32_000, asked)
    assert four == pytest.approx(4 * one, rel=0.05)
    assert one < 0.2 * prefill_operations(model.config, 8_000)
    paper = draft.operations(8_000, Settings(scoring="lookahead"))
    assert paper > prefill_operations(model.config, 8_000)


def test_reading_everything_at_once_is_one_window_in_the_prompts_order() -> None:
    windows = whole(7)
    assert isinstance(windows, Windows)
    np.testing.assert_array_equal(windows.tokens, [range(7)])
    scores = np.random.default_rng().random((1, 7)).astype(np.float32)
    np.testing.assert_array_equal(windows.gather(scores, 7), scores[0])


def test_as_many_layers_run_as_reach_one_that_sees_the_whole_window() -> None:
    """Gemma 3 begins with five layers that slide: a quarter of them would see nothing."""

    class Known(ReadingDraft):
        def __init__(self, kinds: list[str]) -> None:
            self.config = SimpleNamespace(
                num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=512
            )

        def score(self, ids: Any, settings: Any, question: Any = None) -> Importance:
            raise AssertionError("only its config is asked")

    gemma = Known((["sliding_attention"] * 5 + ["full_attention"]) * 3)
    usual = Settings().in_force()
    assert gemma.depth(usual) == 6
    assert gemma.depth(Settings(draft_window=300).in_force()) == 5
    assert gemma.depth(Settings(draft_window=0).in_force()) == 6
    assert gemma.depth(Settings(draft_layers=3).in_force()) == 3
    assert Known(["full_attention"] * 30).depth(usual) == 8


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_a_draft_that_stops_early_holds_only_the_layers_it_runs(name: str) -> None:
    whole_draft = TorchDraft(load_model(name, "float32", "cpu"))
    in_force = Settings().in_force()
    depth = whole_draft.depth(in_force)
    part = TorchDraft(load_model(name, "float32", "cpu", layers=depth))
    assert part.depth(in_force) == depth == part.model.layers
    ids = np.random.default_rng().integers(1000, 9000, 700).astype(np.int32)
    seen, judged = part.score(ids, in_force), whole_draft.score(ids, in_force)
    np.testing.assert_array_equal(seen.scores, judged.scores)
    assert (seen.layers, seen.heads) == (judged.layers, judged.heads)

    count = int(part.config.num_hidden_layers)
    weights = [sum(p.numel() for p in one.model.module.parameters()) for one in (part, whole_draft)]
    one_layer = sum(p.numel() for p in part.model.module.model.layers[0].parameters())
    assert weights[1] - weights[0] == (count - depth) * one_layer
    assert part.operations(700, in_force) == whole_draft.operations(700, in_force)

    for more in (Settings(draft_layers=depth + 1), Settings(scoring="lookahead")):
        with pytest.raises(DraftFailed, match=f"the first {depth} were loaded"):
            part.score(ids, more)
    with pytest.raises(InputError, match=f"1 to {count}"):
        load_model(name, "float32", "cpu", layers=count + 1)
