"""Queries and keys out of any transformers model whose attention goes through its interface.

transformers hands every attention call, after rotary embedding, Q/K norms and the KV cache, to
a function looked up by name. Ours passes the call on to the model's scaled-dot-product form,
mask and all, and shows queries, keys, mask and scale to the `Capture` that is active in the
calling context, if any. So a model is taken by what its attention does, not by its class;
`verify_capture` proves at load that what was seen is what the model attends with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from trtllm_specprefill.errors import UnsupportedModel
from trtllm_specprefill.models import Model
from trtllm_specprefill.operations import shortest_window

ATTENTION_NAME = "specprefill_capture"
# Keyword arguments that change what a layer attends to and that scaled dot products ignore.
CHANGES_LOGITS = ("softcap", "s_aux", "position_bias")


class Capture(Protocol):
    """What wants to see a model's attention calls."""

    def see(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None,
    ) -> None:
        """One call: queries `[B, Hq, L, D]`, keys `[B, Hkv, S, D]`, mask `[B or 1, ...]` or None.

        The mask is `[B or 1, 1 or Hq, L, S]`. Raising `Enough` ends the model's forward pass.
        """


class Enough(Exception):
    """A capture has seen all it wants: no more of the model is to be run."""


_active: ContextVar[Capture | None] = ContextVar("specprefill_capture", default=None)


@contextmanager
def capturing(capture: Capture) -> Iterator[None]:
    """Show every attention call made in this context to `capture`."""
    token = _active.set(capture)
    try:
        yield
    finally:
        _active.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    capture = _active.get()
    if capture is not None:
        changed = [name for name in CHANGES_LOGITS if kwargs.get(name) is not None]
        if changed:
            raise UnsupportedModel(f"its attention uses {', '.join(changed)}")
        scale = kwargs.get("scaling")
        capture.see(
            int(getattr(module, "layer_idx", 0) or 0),
            query,
            key,
            query.shape[-1] ** -0.5 if scale is None else float(scale),
            attention_mask,
        )
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, **kwargs
    )
    return output


def install(module: torch.nn.Module, family: str) -> None:
    """Route `module`'s attention through this file; it computes what it computed before.

    The mask function must be the scaled-dot-product one, registered under our name: without
    it transformers builds no mask at all and sliding windows are lost without a word.
    Raises `UnsupportedModel` when the model has no exchangeable attention.
    """
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        module.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    except (AttributeError, ValueError) as error:
        raise UnsupportedModel(f"{family}: its attention cannot be exchanged ({error})") from None


class _LastRows:
    """Attention of the last query of every layer, computed from captured queries and keys."""

    def __init__(self) -> None:
        self.weights: dict[int, torch.Tensor] = {}

    def see(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None,
    ) -> None:
        # Rounded as eager attention rounds: the question is whether q, k, scale and mask are
        # the model's, not how well a product is computed.
        keys = k[0].repeat_interleave(q.shape[1] // k.shape[1], dim=0)
        logits = (torch.einsum("hd,hsd->hs", q[0, :, -1], keys) * scale).float()
        if mask is not None:
            logits = logits.masked_fill(~mask_to_bool(mask)[0, :, -1], float("-inf"))
        self.weights[layer] = logits.softmax(dim=-1)


def mask_to_bool(mask: torch.Tensor) -> torch.Tensor:
    """A mask as bool, true where a key is seen; additive masks are 0 there."""
    return mask if mask.dtype == torch.bool else mask == 0


@torch.inference_mode()
def verify_capture(model: Model) -> None:
    """Prove on a probe that the captured attention is the model's own, or refuse the family.

    Three runs over random ids: with transformers' eager attention, whose weights are the
    judge of ours; with its scaled dot products and with our function, whose logits must agree
    on a probe longer than the shortest window. Leaves the module routed through our function.
    Raises `UnsupportedModel` naming the family.
    """
    module, family = model.module, str(model.config.model_type)
    window, vocab = shortest_window(model.config), int(model.config.vocab_size)
    generator = torch.Generator().manual_seed(0)
    long = 64 if window is None else min(window + 32, model.context_length)
    ids = torch.randint(0, vocab, (1, max(64, long)), generator=generator).to(model.device)

    def last_row() -> torch.Tensor:
        logits: torch.Tensor = module(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        return logits

    try:
        module.set_attn_implementation("eager")  # type: ignore[operator]
        judged = module(ids[:, :64], output_attentions=True, use_cache=False).attentions
        module.set_attn_implementation("sdpa")  # type: ignore[operator]
        untouched = last_row()
    except (AttributeError, ValueError, TypeError, RuntimeError) as error:
        with suppress(AttributeError, ValueError):
            module.set_attn_implementation("sdpa")  # type: ignore[operator]
        raise UnsupportedModel(f"{family}: its attention cannot be examined ({error})") from None
    install(module, family)
    rows = _LastRows()
    try:
        with capturing(rows):
            module(ids[:, :64], use_cache=False)
        routed = last_row()
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{family}: {error}") from None
    weights = {i: w for i, w in enumerate(judged or ()) if w is not None}
    if not weights or set(weights) != set(rows.weights):
        raise UnsupportedModel(
            f"{family}: {len(rows.weights)} of {len(weights)} attention layers could be captured"
        )
    # Half precision: rounding grows from layer to layer, to 0.04 (SmolLM2, Gemma 3); a scale
    # that is wrong by a quarter moves 0.15.
    tolerance = 1e-4 if model.dtype == torch.float32 else 8e-2
    for layer, expected in weights.items():
        moved = (expected[0, :, -1].float() - rows.weights[layer]).abs().sum(dim=-1) / 2
        off = float(moved.mean())  # share of a head's attention that lies elsewhere
        if not off <= tolerance:
            raise UnsupportedModel(
                f"{family}: captured attention of layer {layer} is off by {off:.2g}"
            )
    drift = float((untouched.float() - routed.float()).abs().max())
    if not drift <= tolerance * max(1.0, float(untouched.abs().max())):
        raise UnsupportedModel(f"{family}: logits change by {drift:.2g} when attention is captured")
