"""Floating-point operations of a decoder, from its config: what a prefill will cost.

Counts the matrix products (2 operations a multiply-add): projections and MLP by their weights,
attention by the keys each query sees, sliding windows included. Mixture-of-experts layers
count the experts a token uses. Embeddings, norms and rotations are left out.
"""

from __future__ import annotations

from typing import Any


def layer_windows(config: Any) -> list[int | None]:
    """Per layer, the sliding or chunked window it attends through; None for full attention."""
    layers = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or getattr(
        config, "attention_chunk_size", None
    )
    if kinds is None:
        uses = getattr(config, "use_sliding_window", True)
        return [int(window) if window and uses else None] * layers
    return [int(window) if window and kind != "full_attention" else None for kind in kinds]


def shortest_window(config: Any) -> int | None:
    """The shortest window any layer attends through; None when all attend fully."""
    return min((w for w in layer_windows(config) if w is not None), default=None)


def _heads(config: Any) -> tuple[int, int, int]:
    """Query heads, key heads, and the size of one."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    dim = int(getattr(config, "head_dim", None) or int(config.hidden_size) // heads)
    return heads, kv_heads, dim


def _weights_per_layer(config: Any) -> float:
    hidden = int(config.hidden_size)
    heads, kv_heads, dim = _heads(config)
    attention = hidden * dim * (2 * heads + 2 * kv_heads)
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    width = int(
        getattr(config, "moe_intermediate_size", None)
        or getattr(config, "intermediate_size", None)
        or 4 * hidden
    )
    return attention + 3.0 * hidden * width * experts


def _visible(queries: int, past: int, window: int | None) -> float:
    """Sum over `queries` causal queries after `past` keys of the keys each one sees."""
    full = queries * past + queries * (queries + 1) / 2
    if window is None or past + queries <= window:
        return full
    ramp = max(min(window - past, queries), 0)
    return ramp * past + ramp * (ramp + 1) / 2 + (queries - ramp) * float(window)


def prefill_operations(config: Any, tokens: int, past: int = 0) -> float:
    """Operations of running `tokens` tokens behind `past` cached ones, and one row of logits."""
    heads, _, dim = _heads(config)
    dense = 2.0 * tokens * _weights_per_layer(config) * int(config.num_hidden_layers)
    attention = sum(
        4.0 * heads * dim * _visible(tokens, past, window) for window in layer_windows(config)
    )
    return dense + attention + 2.0 * int(config.hidden_size) * int(config.vocab_size)


def reading_operations(config: Any, tokens: int, layers: int) -> float:
    """Operations of running `tokens` tokens through the first `layers` layers up to their keys.

    Of the last of these layers only the projections to queries, keys and values are run.
    """
    heads, kv_heads, dim = _heads(config)
    projections = int(config.hidden_size) * dim * (heads + 2 * kv_heads)
    weights = _weights_per_layer(config) * (layers - 1) + projections
    attention = sum(
        4.0 * heads * dim * _visible(tokens, 0, window)
        for window in layer_windows(config)[: layers - 1]
    )
    return 2.0 * tokens * weights + attention


def parameters(config: Any) -> float:
    """Weights of the decoder: every layer, all experts, embeddings and head; no norms or biases."""
    experts = int(getattr(config, "num_local_experts", None) or 0) or int(
        getattr(config, "num_experts", None) or 1
    )
    active = int(getattr(config, "num_experts_per_tok", None) or 1)
    width = int(
        getattr(config, "moe_intermediate_size", None)
        or getattr(config, "intermediate_size", None)
        or 4 * int(config.hidden_size)
    )
    idle = 3.0 * int(config.hidden_size) * width * max(experts - active, 0)
    vocabulary = float(int(config.hidden_size) * int(config.vocab_size))
    tied = bool(getattr(config, "tie_word_embeddings", False))
    layers = int(config.num_hidden_layers) * (_weights_per_layer(config) + idle)
    return layers + vocabulary * (1 if tied else 2)
