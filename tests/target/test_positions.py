"""Positions on their way to an engine, and the check that they have an effect."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from engine_build.rotary_config import rotate_by_position_ids
from trtllm_specprefill.plan import PrunePlan, Reason
from trtllm_specprefill.target.positions import (
    Recorded,
    check_positions,
    mrope_position_deltas,
    mrope_position_ids,
    probe_plans,
)


@st.composite
def plans(draw: st.DrawFn) -> PrunePlan:
    """Kept tokens of a prompt at either kind of positions; the last one is always kept."""
    n = draw(st.integers(1, 400))
    kept = sorted(draw(st.sets(st.integers(0, n - 1), max_size=n)) | {n - 1})
    at = np.array(kept, dtype=np.int32)
    ids = np.random.default_rng().integers(1, 50_000, at.size).astype(np.int32)
    if draw(st.booleans()):
        return PrunePlan(ids, at, n, "original", n, Reason.PRUNED)
    near = np.arange(at.size, dtype=np.int32)
    return PrunePlan(ids, near, at.size, "contiguous", n, Reason.PRUNED)


@settings(max_examples=50)
@given(plans())
def test_mrope_positions_mean_what_the_runtime_reads(plan: PrunePlan) -> None:
    """What `_prepare_tp_inputs` does with them, step by step, gives the plan's positions."""
    ids, delta = mrope_position_ids(plan), mrope_position_deltas(plan)
    m = plan.input_ids.size
    assert (ids.shape, ids.dtype) == ((3, 1, m), np.int32)
    assert (delta.shape, delta.dtype) == ((1, 1), np.int32)
    chunks = [ids[:, :, at : at + 7] for at in range(0, m, 7)]  # a prompt read in chunks
    for axis in range(3):
        read = np.concatenate([chunk[axis, 0] for chunk in chunks])
        assert read.tolist() == plan.position_ids.tolist()
    for generated in range(4):
        past_seen = m + generated
        following = np.broadcast_to(past_seen + delta, (3, 1, 1))
        assert following.ravel().tolist() == [plan.next_position + generated] * 3
    assert ids.flags.c_contiguous
    assert ids.flags.writeable


@settings(max_examples=50)
@given(plans(), st.sampled_from([16, 64, 80, 128]))
def test_rows_of_mrope_tables_are_those_of_plain_rotation(plan: PrunePlan, dim: int) -> None:
    """cos and sin of the three axes, cut by the sections that `engine_build` writes into a
    checkpoint and put together, are transformers' own rows at the plan's positions."""
    config = Qwen2Config(hidden_size=4 * dim, num_attention_heads=4, head_dim=dim)
    rotation = Qwen2RotaryEmbedding(config)
    stated = {"model_type": "qwen2", "num_attention_heads": 4, "hidden_size": 4 * dim}
    sections = rotate_by_position_ids(stated)["rope_scaling"]["mrope_section"]
    m = plan.input_ids.size
    following = m + mrope_position_deltas(plan) + np.arange(4)  # as tokens are generated
    ids = np.concatenate(
        [mrope_position_ids(plan), np.broadcast_to(following, (3, 1, 4)).astype(np.int32)], axis=2
    )
    angles = torch.from_numpy(ids[:, 0])[..., None].float() * rotation.inv_freq  # [3, M + 4, D/2]
    pieces = angles.split(sections, dim=-1)
    angles = torch.cat([piece[axis] for axis, piece in enumerate(pieces)], dim=-1)
    places = np.append(plan.position_ids, plan.next_position + np.arange(4))
    cos, sin = rotation(torch.zeros(1), torch.from_numpy(places)[None])
    assert angles.shape == (m + 4, dim // 2)
    assert torch.equal(angles.cos(), cos[0, :, : dim // 2])
    assert torch.equal(angles.sin(), sin[0, :, : dim // 2])


def test_probes_are_always_the_same_and_differ_in_positions_alone() -> None:
    for (far, near), (far_again, _) in zip(probe_plans(900), probe_plans(900), strict=True):
        assert np.array_equal(far.input_ids, near.input_ids)
        assert np.array_equal(far.input_ids, far_again.input_ids)
        assert np.array_equal(far.position_ids, far_again.position_ids)
        assert (np.diff(far.position_ids) > 0).all()
        assert far.position_ids[-1] + 1 == far.next_position > 2 * near.next_position
        assert 0 < far.input_ids.min() <= far.input_ids.max() < 900


RIGHT = Recorded(scattered=(10, 11, 12, 13, 14, 15), contiguous=(20, 21, 22, 23, 24, 25))


def answers(scattered: tuple[int, ...], contiguous: tuple[int, ...]):  # type: ignore[no-untyped-def]
    known = {}
    for (far, near), a, b in zip(probe_plans(900), scattered, contiguous, strict=True):
        known[id_of(far)], known[id_of(near)] = a, b
    return lambda plan: np.array([known[id_of(plan)]])


def id_of(plan: PrunePlan) -> bytes:
    return plan.input_ids.tobytes() + plan.position_ids.tobytes()


@pytest.mark.parametrize(
    ("scattered", "contiguous", "honoured"),
    [
        (RIGHT.scattered, RIGHT.contiguous, True),
        ((10, 11, 12, 99, 98, 97), RIGHT.contiguous, True),  # quantised: half of them
        ((10, 11, 96, 99, 98, 97), RIGHT.contiguous, False),
        (RIGHT.contiguous, RIGHT.contiguous, False),  # ignores positions
        ((20, 21, 22, 23, 24, 15), RIGHT.contiguous, False),  # nearly ignores them
        ((30, 31, 32, 33, 34, 35), RIGHT.contiguous, False),  # rotates by something else
    ],
)
def test_only_the_answers_that_torch_recorded_are_believed(
    scattered: tuple[int, ...], contiguous: tuple[int, ...], honoured: bool
) -> None:
    check = check_positions(answers(scattered, contiguous), 900, RIGHT)
    assert check.honoured is honoured
    assert check.detail


def test_an_unsteady_target_is_not_believed() -> None:
    rng = np.random.default_rng()
    check = check_positions(lambda plan: rng.random(5), 900)
    assert not check.honoured
    assert "twice" in check.detail
