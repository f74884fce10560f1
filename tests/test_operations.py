from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_specprefill.operations import layer_windows, prefill_operations, shortest_window


def config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "num_hidden_layers": 3,
            "hidden_size": 12,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "intermediate_size": 20,
            "vocab_size": 50,
            **fields,
        }
    )


def counted(of: Any, tokens: int, past: int) -> int:
    """Multiply-adds one by one, as the matrix products of a decoder spell them; times two."""
    heads, kv = of.num_attention_heads, getattr(of, "num_key_value_heads", of.num_attention_heads)
    dim = getattr(of, "head_dim", None) or of.hidden_size // heads
    width = getattr(of, "moe_intermediate_size", None) or of.intermediate_size
    experts = getattr(of, "num_experts_per_tok", 1)
    adds = 0
    for window in layer_windows(of):
        for place in range(past, past + tokens):
            adds += of.hidden_size * dim * heads  # queries
            adds += 2 * of.hidden_size * dim * kv  # keys, values
            adds += dim * heads * of.hidden_size  # output
            adds += 3 * of.hidden_size * width * experts  # gate, up, down
            for key in range(place + 1):
                if window is None or place - key < window:
                    adds += 2 * heads * dim  # query times key, weight times value
    adds += of.hidden_size * of.vocab_size  # logits of the last token
    return 2 * adds


@given(
    tokens=st.integers(1, 40),
    past=st.integers(0, 30),
    window=st.one_of(st.none(), st.integers(1, 50)),
    kinds=st.lists(
        st.sampled_from(["full_attention", "sliding_attention"]), min_size=3, max_size=3
    ),
    kv_heads=st.sampled_from([1, 2, 6]),
    head_dim=st.sampled_from([None, 5]),
    experts=st.sampled_from([1, 4]),
)
def test_operations_are_those_counted_one_by_one_sliding_windows_included(
    tokens: int,
    past: int,
    window: int | None,
    kinds: list[str],
    kv_heads: int,
    head_dim: int | None,
    experts: int,
) -> None:
    of = config(
        sliding_window=window,
        layer_types=kinds,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_experts_per_tok=experts,
        moe_intermediate_size=7 if experts > 1 else None,
    )
    assert prefill_operations(of, tokens, past) == pytest.approx(
        counted(of, tokens, past), rel=1e-12
    )


@given(first=st.integers(1, 30), then=st.integers(1, 30), window=st.integers(1, 40))
def test_a_prefill_in_two_pieces_costs_what_it_does_in_one(
    first: int, then: int, window: int
) -> None:
    of = config(sliding_window=window)
    logits = 2 * of.hidden_size * of.vocab_size
    pieces = prefill_operations(of, first) + prefill_operations(of, then, past=first) - logits
    assert prefill_operations(of, first + then) == pytest.approx(pieces, rel=1e-12)


def test_windows_are_read_by_layer() -> None:
    assert layer_windows(config()) == [None] * 3
    assert shortest_window(config()) is None
    mixed = config(
        sliding_window=512,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    assert layer_windows(mixed) == [512, None, 512]
    assert shortest_window(mixed) == 512
    assert layer_windows(config(sliding_window=64)) == [64] * 3
    # Qwen2 states a window it does not use.
    unused = config(sliding_window=64, use_sliding_window=False)
    assert layer_windows(unused) == [None] * 3
    chunked = config(
        attention_chunk_size=128, layer_types=["chunked_attention", "full_attention"] * 2
    )
    assert shortest_window(chunked) == 128


def test_without_key_value_heads_every_head_has_its_own() -> None:
    plain = config()
    del plain.num_key_value_heads
    assert prefill_operations(plain, 9) == prefill_operations(config(num_key_value_heads=6), 9)
