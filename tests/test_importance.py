from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trtllm_specprefill import importance_op
from trtllm_specprefill.errors import DegenerateScores, DraftFailed, InputError
from trtllm_specprefill.importance import Importance, RunningImportance, reference_importance

Layers = list[tuple[torch.Tensor, torch.Tensor]]


def fresh_layers(layers: int, heads: int, kv_heads: int, width: int, n: int, dim: int) -> Layers:
    """Random Q `[Hq, W, D]` and K `[Hkv, N, D]`, other ones each time the test is run."""
    generator = torch.Generator().manual_seed(int(np.random.default_rng().integers(2**62)))
    return [
        (
            torch.randn(heads, width, dim, generator=generator),
            torch.randn(kv_heads, n, dim, generator=generator) * 1.5,
        )
        for _ in range(layers)
    ]


def running(
    layers: Layers,
    scale: float,
    causal: bool = False,
    *,
    pool: int = 13,
    key_block: int | None = None,
) -> NDArray[Any]:
    gather = RunningImportance(layers[0][1].shape[1], pool=pool)
    with blocks_of(key_block):
        for q, k in layers:
            gather.add(0, q, k, scale, causal)
    return gather.scores()


@contextmanager
def blocks_of(keys: int | None) -> Iterator[None]:
    """The op working through `keys` keys at a time."""
    with pytest.MonkeyPatch.context() as patch:
        if keys is not None:
            patch.setattr(importance_op, "_key_block", lambda rows, device: keys)
        yield


def judged(layers: Layers, scale: float, **knobs: Any) -> NDArray[Any]:
    qs, ks = zip(*layers, strict=True)
    return reference_importance([q.numpy() for q in qs], [k.numpy() for k in ks], scale, **knobs)


def by_the_letter(layers: Layers, scale: float, pool: int, causal: bool) -> list[float]:
    """The paper's two lines, one number at a time."""
    width, n = layers[0][0].shape[1], layers[0][1].shape[1]
    total = [0.0] * n
    for j in range(width):
        best = [0.0] * n
        for q, k in layers:
            group = q.shape[0] // k.shape[0]
            for h in range(q.shape[0]):
                seen = n - width + j + 1 if causal else n
                logits = [
                    scale * math.fsum((q[h, j].double() * k[h // group, i].double()).tolist())
                    for i in range(seen)
                ]
                top = max(logits)
                powers = [math.exp(x - top) for x in logits]
                whole = math.fsum(powers)
                weights = [p / whole for p in powers] + [0.0] * (n - seen)
                half = pool // 2
                for i in range(n):
                    pooled = math.fsum(weights[max(i - half, 0) : i + half + 1]) / pool
                    best[i] = max(best[i], pooled)
        total = [t + b for t, b in zip(total, best, strict=True)]
    return [t / width for t in total]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "pool"), [(4, 2, 3, 5), (3, 3, 1, 13)])
def test_the_judge_is_the_papers_text(
    heads: int, kv_heads: int, width: int, pool: int, causal: bool
) -> None:
    layers = fresh_layers(2, heads, kv_heads, width, 17, 6)
    expected = by_the_letter(layers, 0.4, pool, causal)
    np.testing.assert_allclose(judged(layers, 0.4, pool=pool, causal=causal), expected, rtol=1e-12)


@pytest.mark.parametrize("window", [False, True], ids=["look-ahead", "window"])
@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "n", "dim"),
    [(4, 4, 1009, 64), (9, 3, 613, 64), (8, 1, 257, 80), (24, 3, 97, 32), (3, 1, 31, 16)],
)
def test_streaming_importance_is_the_judges_within_a_hundred_thousandth(
    heads: int, kv_heads: int, n: int, dim: int, width: int, window: bool
) -> None:
    layers = fresh_layers(3, heads, kv_heads, width, n, dim)
    scale = dim**-0.5
    expected = judged(layers, scale, causal=window)
    found = running(layers, scale, window, key_block=100)
    assert found.dtype == np.float32
    assert found.shape == (n,)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("n", [1, 2, 5, 12, 13, 14, 50])
@pytest.mark.parametrize("pool", [1, 3, 13, 61, 255])
@pytest.mark.parametrize("key_block", [1, 7, 4096])
def test_any_pool_width_and_prompt_length_agree_even_a_pool_wider_than_the_prompt(
    n: int, pool: int, key_block: int
) -> None:
    layers = fresh_layers(2, 6, 2, min(n, 3), n, 8)
    expected = judged(layers, 0.3, pool=pool)
    found = running(layers, 0.3, pool=pool, key_block=key_block)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=0)


def test_the_block_of_keys_changes_nothing() -> None:
    layers = fresh_layers(2, 6, 2, 4, 331, 16)
    whole = running(layers, 0.25, True, key_block=331)
    for key_block in (1, 2, 6, 13, 64, 330, 1000):
        found = running(layers, 0.25, True, key_block=key_block)
        np.testing.assert_allclose(found, whole, rtol=2e-6, atol=0)


def test_a_prompt_of_one_token_has_all_the_importance() -> None:
    layers = fresh_layers(2, 4, 2, 1, 1, 8)
    np.testing.assert_allclose(running(layers, 0.3, pool=1), [1.0], rtol=1e-6)
    np.testing.assert_allclose(running(layers, 0.3, pool=13), [1 / 13], rtol=1e-6)


def test_the_order_of_layers_and_of_query_rows_does_not_matter() -> None:
    layers = fresh_layers(3, 6, 3, 5, 120, 16)
    expected = running(layers, 0.25)
    gather = RunningImportance(120)
    for row in (4, 2, 0, 3, 1):  # one look-ahead token at a time, as decoding gives them
        for q, k in reversed(layers):
            gather.add(row, q[:, row : row + 1], k, 0.25)
    np.testing.assert_allclose(gather.scores(), expected, rtol=2e-6, atol=0)


def test_only_the_queries_that_voted_are_averaged() -> None:
    layers = fresh_layers(2, 4, 2, 3, 90, 16)
    gather = RunningImportance(90)
    for q, k in layers:
        for row in (4, 0, 7):  # rows in between saw no vote
            gather.add(row, q[:, [(4, 0, 7).index(row)]], k, 0.25)
    assert gather.queries == 3
    np.testing.assert_allclose(gather.scores(), judged(layers, 0.25), rtol=1e-5, atol=0)


def test_keys_after_the_prompts_take_no_part() -> None:
    layers = fresh_layers(2, 4, 2, 1, 90, 16)
    gather = RunningImportance(90)
    for q, k in layers:
        gather.add(0, q, torch.cat([k, torch.randn(2, 5, 16) * 9], 1), 0.25)
    np.testing.assert_allclose(gather.scores(), judged(layers, 0.25), rtol=1e-5, atol=0)


def test_large_logits_do_not_overflow() -> None:
    # One head: with several, each gives its own best token the same weight of almost 1.
    layers = [(q * 40, k * 40) for q, k in fresh_layers(1, 1, 1, 1, 60, 16)]
    found = running(layers, 0.25, pool=1, key_block=9)
    np.testing.assert_allclose(found, judged(layers, 0.25, pool=1), rtol=0, atol=1e-2)
    assert np.isfinite(found).all()


def test_half_precision_inputs_are_scored_in_float32() -> None:
    layers = fresh_layers(2, 4, 2, 2, 200, 32)
    halved = [(q.bfloat16(), k.bfloat16()) for q, k in layers]
    exact = [(q.float(), k.float()) for q, k in halved]
    np.testing.assert_allclose(
        running(halved, 0.18, key_block=50), judged(exact, 0.18), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["query", "key"])
def test_a_draft_that_gives_nan_is_degenerate_and_not_a_selection(
    poison: float, where: str
) -> None:
    # hipfire 135 (NaN past the trained window), lucebox 121 (only token 0 comes out).
    layers = fresh_layers(3, 4, 2, 2, 70, 16)
    q, k = layers[1]
    (q if where == "query" else k)[0, 1, 3] = poison
    scores = running(layers, 0.25, key_block=16)
    with pytest.raises(DegenerateScores, match="NaN or infinite"):
        Importance(scores, queries=2, heads=4, layers=(0, 1, 2))


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([0.0, 0.0, 0.0], "zero"),
        ([0.5, math.nan], "1 of 2"),
        ([math.inf, 1.0, math.inf], "2 of 3"),
        ([0.5, -1e-6], "negative"),
        ([], "0 importance scores"),
    ],
)
def test_scores_that_rank_nothing_are_degenerate(scores: list[float], words: str) -> None:
    with pytest.raises(DegenerateScores, match=words):
        Importance(np.asarray(scores, np.float32), queries=1, heads=1, layers=(0,))
    assert issubclass(DegenerateScores, DraftFailed)


@pytest.mark.parametrize("pool", [0, 2, 12, -3])
def test_an_even_pool_is_refused_since_it_would_shift_the_scores(pool: int) -> None:
    layers = fresh_layers(1, 2, 1, 1, 9, 4)
    with pytest.raises(InputError, match="pool"):
        RunningImportance(9, pool=pool)
    with pytest.raises(InputError, match="pool"):
        judged(layers, 1.0, pool=pool)


class Sizes(TorchDispatchMode):
    """The largest tensor torch makes but those of `result` elements, in float32 elements."""

    def __init__(self, result: int) -> None:
        super().__init__()
        self.largest, self._result = 0, result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if _is(t)}
        for tensor in tree_leaves(out):
            if _is(tensor) and tensor.untyped_storage().data_ptr() not in given:
                elements = tensor.untyped_storage().nbytes() // 4
                if elements != self._result:
                    self.largest = max(self.largest, elements)
        return out


def _is(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@pytest.mark.parametrize("window", [False, True], ids=["look-ahead", "window"])
def test_nothing_larger_than_one_layers_logits_for_one_block_of_keys_is_ever_made(
    window: bool,
) -> None:
    key_block, heads, kv_heads, width, half = 64, 9, 3, 8, 6
    bound = heads // kv_heads * width * (key_block + 2 * half)
    table = torch.tensor(importance_op.head_table(heads, kv_heads), dtype=torch.int32)
    for n in (700, 2100):
        ((q, k),) = fresh_layers(1, heads, kv_heads, width, n, 16)
        running = torch.zeros(1, width, n)
        length = torch.tensor([n], dtype=torch.int32)
        # The plain form itself: a dispatch mode does not see into an op.
        with blocks_of(key_block), Sizes(result=width * n) as sizes:
            importance_op.plain_layer(
                q[None], k[None], length, table, torch.ones(kv_heads), running, 0.25, 13, window
            )
        assert bound / 2 < sizes.largest <= bound, n


@pytest.mark.parametrize("window", [False, True], ids=["look-ahead", "window"])
def test_memory_of_scoring_does_not_grow_with_layers_or_prompt(window: bool) -> None:
    def allocated(layers: int, n: int) -> int:
        """Most bytes torch's CPU allocator held at once beyond the inputs and `[W, N]` twice."""
        inputs = fresh_layers(layers, 9, 3, 8, n, 16)
        gather = RunningImportance(n)
        with blocks_of(64), torch.profiler.profile(profile_memory=True) as profile:
            for q, k in inputs:
                gather.add(0, q, k, 0.25, window)
        held = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        return peak - 2 * 4 * 8 * n

    block = 4 * 3 * 8 * (64 + 12)
    first = allocated(1, 700)
    assert block <= first <= 6 * block
    for layers, n in ((5, 700), (1, 3500), (5, 3500)):
        # Besides the block there is one number a query for each block of keys.
        assert allocated(layers, n) <= first + 4 * 3 * 8 * 3 * (n // 64 + 1)
