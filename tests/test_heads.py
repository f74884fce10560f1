"""Calibrated heads: found where they are, used as they were found, and nothing else is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.test_windows import Seen, fresh_ids, random_model
from trtllm_specprefill.draft import heads as shipped
from trtllm_specprefill.draft.capture import capturing
from trtllm_specprefill.draft.heads import Depth, HeadCalibration, calibration_for
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.evaluation.calibrate import Scored, by_layer, choose, objective
from trtllm_specprefill.importance import reference_importance
from trtllm_specprefill.measured import own_folder, read, write
from trtllm_specprefill.models import Model, load_model
from trtllm_specprefill.settings import Settings

ONE_WINDOW = {"draft_window": 500, "draft_tail": 24, "window": 16}


def calibration(*depths: Depth, layers: int, fingerprint: str = "f") -> HeadCalibration:
    return HeadCalibration(
        fingerprint=fingerprint,
        command="specprefill calibrate-heads",
        draft="some-draft",
        layers=layers,
        depths=depths,
        tokens=3000,
        prompts=24,
        seed=0,
        all_heads={"0.1": 0.9},
    )


def depth(*heads: tuple[int, ...]) -> Depth:
    return Depth(layers=len(heads), heads=heads, recall={"0.1": 1.0}, held_out={"0.1": 0.95})


def test_only_the_heads_that_were_found_score_and_no_layer_beyond_them_is_run() -> None:
    model, ids = random_model("llama"), fresh_ids(300)
    draft = TorchDraft(model)
    draft.calibration = calibration(depth((), (0, 3)), layers=2)
    asked = Settings.of(**ONE_WINDOW).in_force()
    found = draft.score(ids, asked)
    assert (found.layers, found.heads, found.queries) == ((1,), 2, 16)
    seen = Seen()
    with torch.inference_mode(), capturing(seen):
        model.module(torch.from_numpy(ids).long()[None], use_cache=False)
    group = seen.queries[1].shape[0] // seen.keys[1].shape[0]
    expected = reference_importance(
        [seen.queries[1][[0, 3], -16:]],
        [seen.keys[1][[0 // group, 3 // group]]],
        seen.scale,
        asked.pool,
        True,
        "max",
    )
    np.testing.assert_allclose(found.scores, expected, rtol=2e-5)


def test_asking_for_layers_takes_the_heads_found_for_them_or_all_where_none_were() -> None:
    draft = TorchDraft(random_model("llama"))
    draft.calibration = calibration(depth((1,)), depth((), (0, 3)), layers=2)

    def heads(**knobs: Any) -> Any:
        return draft.scoring_heads(Settings.of(**ONE_WINDOW | knobs).in_force())

    assert heads() == ((), (0, 3))
    assert heads(draft_layers=1) == ((1,),)
    assert heads(draft_layers=3) is None
    assert heads(draft_window=0) is None  # found on windows, not on whole prompts
    ids = fresh_ids(400)
    everyone = draft.score(ids, Settings.of(**ONE_WINDOW, draft_layers=3))
    assert (everyone.layers, everyone.heads) == ((0, 1, 2), draft.config.num_attention_heads)


def test_heads_whose_layer_slides_over_less_than_a_window_are_not_used() -> None:
    draft = TorchDraft(random_model("gemma3"))  # windows of 64 in layers 0 and 2
    draft.calibration = calibration(depth((1,)), depth((), (), (), (1,)), layers=1)
    wide = Settings(draft_window=100, draft_tail=20).in_force()
    narrow = Settings(draft_window=40, draft_overlap=13, draft_tail=20).in_force()
    assert draft.scoring_heads(narrow) == ((1,),)
    assert draft.scoring_heads(wide) is None
    assert draft.depth(wide) == 2  # as without a calibration
    deep = wide.model_copy(update={"draft_layers": 4})
    assert draft.scoring_heads(deep) == ((), (), (), (1,))
    assert draft.score(fresh_ids(300), deep).layers == (3,)


def test_kept_windows_and_calibrated_heads_go_together() -> None:
    model, ids = random_model("llama"), fresh_ids(900)
    drafts = [TorchDraft(model), TorchDraft(model, 1 << 24)]
    for draft in drafts:
        draft.calibration = calibration(depth((), (2,)), layers=2)
    once, kept = (d.score(ids, Settings(draft_window=200, draft_tail=24)).scores for d in drafts)
    np.testing.assert_allclose(kept, once, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "bad",
    [
        {"layers": 2, "heads": ((1,),)},
        {"layers": 2, "heads": ((1,), ())},
        {"layers": 0, "heads": ()},
    ],
)
def test_a_depth_whose_last_layer_says_nothing_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Depth(**bad, recall={}, held_out={})


def test_depths_must_rise_and_hold_the_one_that_is_taken() -> None:
    one, two = depth((1,)), depth((), (2,))
    assert calibration(one, two, layers=2).at(2) == two
    for depths, layers in (((two, one), 1), ((one, two), 3), ((), 1)):
        with pytest.raises(ValidationError):
            calibration(*depths, layers=layers)


# --- how they are found


def scored(layers: int, heads: int, telling: dict[tuple[int, int], int]) -> Scored:
    """A prompt of 100 chunks. telling: how many chunks a head ranks above the fact's."""
    rng = np.random.default_rng()
    chunks = rng.random((layers, heads, 100)).astype(np.float32)
    fact = int(rng.integers(100))
    for (layer, head), above in telling.items():
        order = np.argsort(-chunks[layer, head])
        order = np.concatenate((order[order != fact][:above], [fact], order[order != fact][above:]))
        chunks[layer, head, order] = np.sort(chunks[layer, head])[::-1]
        chunks[layer, head] += 1.0  # it speaks louder than those that know nothing
    nothing: Any = None
    return Scored(nothing, nothing, nothing, chunks, np.ones(100, dtype=np.bool_), (fact,))


def test_the_heads_that_rank_facts_high_are_chosen_and_the_best_first() -> None:
    prompts = [scored(4, 3, {(1, 2): 6, (3, 0): 0}) for _ in range(12)]
    assert choose(prompts, 2) == [(1, 2)]
    assert choose(prompts, 4)[0] == (3, 0)
    assert objective(prompts, [(3, 0)]) < objective(prompts, [(1, 2)]) < -1


def test_heads_that_know_different_facts_are_chosen_together() -> None:
    both = [scored(2, 4, {(0, 1): 0, (1, 3): 60}) for _ in range(8)]
    both += [scored(2, 4, {(0, 1): 60, (1, 3): 0}) for _ in range(8)]
    assert set(choose(both, 2)) >= {(0, 1), (1, 3)}


def test_heads_that_score_nothing_are_not_chosen() -> None:
    # Those of Gemma 3's sliding layers do not see a whole window.
    prompts = [scored(3, 2, {(2, 1): 3}) for _ in range(12)]
    for one in prompts:
        one.chunks[:2] = 0.0
    assert choose(prompts, 3)[0] == (2, 1)


def test_lists_of_heads_end_with_the_last_layer_that_scores() -> None:
    assert by_layer([(3, 5), (1, 2), (3, 0)]) == ((), (2,), (), (0, 5))


# --- where they are found


def test_a_calibration_of_ones_own_comes_before_the_one_that_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "own_folder", lambda _: tmp_path)
    known = next(read(HeadCalibration, Path(shipped.__file__).parent))
    assert calibration_for(known.fingerprint) == known
    own = calibration(depth((1,)), layers=1, fingerprint=known.fingerprint)
    write(tmp_path / "mine.json", own)
    assert calibration_for(known.fingerprint) == own
    assert own_folder("heads").name == "heads"


@pytest.mark.model
def test_the_demo_draft_has_a_calibration_that_ships(smollm2: Model) -> None:
    found = TorchDraft(smollm2).calibration
    assert found is not None
    assert found.draft == "smollm2-135m"
    assert found.layers < smollm2.config.num_hidden_layers // 2
    half = load_model("smollm2-135m", "bfloat16", "cpu")
    assert half.fingerprint == smollm2.fingerprint
