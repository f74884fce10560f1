"""One forward pass of a transformers model, the same for draft and target.

A pass over a long prompt takes seconds, so it can be interrupted between two layers: see
`interruptible`.

Two things are easy to get wrong here, without a word from the library. Without a KV cache,
transformers reads gaps in the position ids as the borders of packed sequences and lets the
kept spans attend only to themselves; so a cache is always given. And the cache's own name
changes between versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import DynamicCache

from trtllm_specprefill.models import Model

_check: ContextVar[Callable[[], None] | None] = ContextVar("specprefill_check", default=None)


@contextmanager
def interruptible(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` before every layer run in this context; what it raises ends the pass."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def watch_layers(model: Model) -> None:
    """Let `interruptible` reach this model: its decoder layers look at the check when called."""
    for stack in model.module.modules():
        if isinstance(stack, torch.nn.ModuleList) and len(stack) == model.layers:
            for layer in stack:
                if _run_check not in layer._forward_pre_hooks.values():
                    layer.register_forward_pre_hook(_run_check)


def check_interrupted() -> None:
    """Call the check of `interruptible`, if there is one: for work that has no torch layers."""
    check = _check.get()
    if check is not None:
        check()


def _run_check(module: torch.nn.Module, inputs: object) -> None:
    del module, inputs
    check_interrupted()


def new_cache(model: Model) -> DynamicCache:
    """An empty KV cache; layers with a sliding window keep no more than it."""
    return DynamicCache(config=model.config)


def last_logits(
    model: Model, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
) -> torch.Tensor:
    """Feed `ids` `[L]` at `positions` `[L]`; float32 logits `[vocab]` after the last of them.

    Causality follows the order in the cache, rotation follows `positions`.
    """
    logits: torch.Tensor = feed(model, ids[None], positions[None], cache).logits[0, -1].float()
    return logits


def feed(model: Model, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache) -> Any:
    """The model's output for `ids` `[B, L]` at `positions` `[1 or B, L]`, which join `cache`."""
    names = inspect.signature(model.module.forward).parameters
    # transformers 5.2x renamed the argument; the old name warns there and goes away in 5.40.
    keyword = "cache" if "cache" in names else "past_key_values"
    return model.module(
        input_ids=ids.to(model.device),
        position_ids=positions.to(model.device),
        use_cache=True,
        logits_to_keep=1,
        **{keyword: cache},
    )
