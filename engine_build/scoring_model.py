"""A draft as one torch module with tensors in and out, ready to be exported.

The decoder layers are transformers' own, weights and code; only the first L are held. What they
attend with is exchanged, as in `trtllm_specprefill.draft.capture`: every attention call writes
the cache, lets its queries vote through the op `specprefill::importance_layer`, and attends with
torch's scaled dot products under masks made from lengths alone. Two modes:

    window      input_ids, position_ids, lengths, voters -> importance
    lookahead   input_ids, position_ids, lengths, prompt_lengths, past_lengths, past_keys.i,
                past_values.i -> importance, next_token, present_keys.i, present_values.i

    input_ids        int64 `[B, S]`  sequences, padded at their ends
    position_ids     int64 `[B, S]`  places for the rotation; causality follows the order
    lengths          int32 `[B]`     tokens of each sequence in this call, at least 1
    voters           int32 `[B]`     how many of a sequence's last tokens vote, at most W
    prompt_lengths   int32 `[B]`     tokens of each whole prompt: only their keys are scored
    past_lengths     int32 `[B]`     tokens that the cache holds of each sequence
    past_keys.i      `[B, Hkv, C, D]` cache of layer i, C at least past_lengths + S; finite
    importance       float32 `[B, S]` or `[B, C]`, 0 past a sequence's end
    next_token       int64 `[B]`     the likeliest token after a sequence's last
    present_keys.i   `[B, Hkv, C, D]` the cache, this call's tokens written behind the past ones

With look-ahead a prompt may be read in one call or in pieces; `importance` is the row of the last
token of the call, so it counts only once the whole prompt has been read. The rows are combined by
whoever makes the calls: then sequences of a batch may end at different steps.

A layer whose sliding window hides part of a sequence from its last token does not vote for it,
as in `trtllm_specprefill.importance`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trtllm_specprefill.draft.capture import CHANGES_LOGITS
from trtllm_specprefill.draft.manifest import Mode
from trtllm_specprefill.errors import InputError, UnsupportedModel
from trtllm_specprefill.importance_op import MAX_QUERIES, check_pool_width, head_table
from trtllm_specprefill.models import Model
from trtllm_specprefill.operations import layer_windows
from trtllm_specprefill.settings import Votes

ATTENTION_NAME = "specprefill_graph"


@dataclass(frozen=True)
class Scoring:
    """How a draft is to score; what is baked into its graph.

    layers: how many of the first layers are run. heads: for each of them the query heads that
    score, all when None. pool: width of the average pooling, in tokens. queries: in window mode
    W, the most last tokens that vote; with look-ahead the most rows, 1 + the tokens decoded.
    votes: how they are combined; with look-ahead by whoever makes the calls.
    """

    mode: Mode
    layers: int
    heads: tuple[tuple[int, ...], ...] | None = None
    pool: int = 13
    queries: int = 32
    votes: Votes = "max"

    def __post_init__(self) -> None:
        check_pool_width(self.pool)
        most = MAX_QUERIES + (self.mode == "lookahead")
        if not 1 <= self.queries <= most:
            raise InputError("queries", self.queries, f"1 to {most}")
        if self.heads is not None and len(self.heads) != self.layers:
            raise InputError("heads", len(self.heads), f"a list for each of {self.layers} layers")
        if self.heads is not None and not any(self.heads):
            raise InputError("heads", self.heads, "at least one head that scores")


class ScoringModel(torch.nn.Module):
    """The module that is exported. Its weights are the model's own, not copies.

    Raises `InputError` for layers or heads the model does not have and for a model on a GPU,
    `UnsupportedModel` for a model whose decoder or attention is not of the usual form.
    """

    def __init__(self, model: Model, scoring: Scoring) -> None:
        super().__init__()
        config = model.config
        most = int(config.num_hidden_layers)
        if not 1 <= scoring.layers <= most:
            raise InputError("layers", scoring.layers, f"1 to {most}, the layers of {model.name}")
        if model.device.type != "cpu":
            raise InputError("device", str(model.device), "cpu: a graph is made there")
        if getattr(config, "attention_chunk_size", None):
            raise UnsupportedModel(f"{config.model_type}: its attention is chunked")
        self.scoring = scoring
        self.windows = layer_windows(config)[: scoring.layers]
        self.decoder = _first_layers(model, scoring.layers)
        module: Any = model.module
        self.head = module.get_output_embeddings() if self.looks_ahead else None
        heads = int(config.num_attention_heads)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self.dtype = model.dtype
        for layer in range(scoring.layers):
            scoring_heads = None if scoring.heads is None else scoring.heads[layer]
            if scoring_heads != ():
                table = head_table(heads, self.kv_heads, scoring_heads)
                self.register_buffer(f"heads_{layer}", torch.tensor(table, dtype=torch.int32))
        self.register_buffer("key_scale", torch.ones(self.kv_heads))

    @property
    def looks_ahead(self) -> bool:
        """Whether it decodes."""
        return self.scoring.mode == "lookahead"

    def votes_after(self, tokens: int) -> bool:
        """Whether any layer votes for a sequence of which `tokens` tokens have been read."""
        return any(
            hasattr(self, f"heads_{layer}") and (window is None or tokens <= window)
            for layer, window in enumerate(self.windows)
        )

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tensors in and out as the module's docstring says, in that order."""
        if not self.looks_ahead:
            return (self._read(*inputs),)
        return self._step(*inputs)

    def _read(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        lengths: torch.Tensor,
        voters: torch.Tensor,
    ) -> torch.Tensor:
        b, s = input_ids.shape
        w = self.scoring.queries
        last = lengths.to(torch.int64)[:, None] - w + torch.arange(w)
        order = torch.arange(s)
        reading = _Reading(
            self,
            running=torch.zeros(b, w, s),
            voting=last.clamp(min=0),
            read=lengths,
            scored=lengths,
            causal=True,
            slots=order[None, :],
            places=order[None, :],
        )
        with reading.active():
            self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        votes = (torch.arange(w) >= w - voters.to(torch.int64)[:, None])[..., None]
        rows = torch.where(votes, reading.running, 0.0)
        if self.scoring.votes == "max":
            return rows.amax(dim=1)
        return rows.sum(dim=1) / voters.to(torch.float32)[:, None]

    def _step(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        lengths: torch.Tensor,
        prompt_lengths: torch.Tensor,
        past_lengths: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        b, s = input_ids.shape
        capacity = past[0].shape[2]
        last = lengths.to(torch.int64)[:, None] - 1
        reading = _Reading(
            self,
            running=torch.zeros(b, 1, capacity),
            voting=last,
            read=past_lengths + lengths,
            scored=prompt_lengths,
            causal=False,
            slots=torch.arange(capacity)[None, :],
            places=past_lengths.to(torch.int64)[:, None] + torch.arange(s),
            cache=past,
        )
        with reading.active():
            out = self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        hidden = out.last_hidden_state
        ends = hidden.gather(1, last[:, :, None].expand(b, 1, hidden.shape[-1]))[:, 0]
        assert self.head is not None
        token = self.head(ends).argmax(dim=-1)
        return reading.running[:, 0], token, *reading.present


class _Reading:
    """One pass through the layers: what their attention calls share and leave behind.

    running: float32 `[B, W, N]`, the maximum over the layers so far. voting: int64 `[B, W]`,
    the tokens of this call that vote. read: int32 `[B]`, tokens read so far, this call's included.
    scored: int32 `[B]`, keys that are scored. slots: int64 `[1, N]`, places of the keys; places:
    int64 `[B or 1, S]`, of the queries. cache: keys and values, layer by layer.
    """

    def __init__(
        self,
        owner: ScoringModel,
        *,
        running: torch.Tensor,
        voting: torch.Tensor,
        read: torch.Tensor,
        scored: torch.Tensor,
        causal: bool,
        slots: torch.Tensor,
        places: torch.Tensor,
        cache: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self.running, self.present = running, list(cache)
        self._owner, self._voting, self._read = owner, voting, read
        self._scored, self._causal = scored, causal
        self._places = places
        self._rows, self._columns = places[:, None, :, None], slots[:, None, None, :]
        self._masks: dict[int | None, torch.Tensor] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, attention calls of this context are this reading's."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One layer: queries `[B, Hq, S, D]` -> `[B, S, Hq, D]`."""
        if self.present:
            index = self._places[:, None, :, None].expand(k.shape)
            k = self.present[2 * layer].scatter(2, index, k)
            v = self.present[2 * layer + 1].scatter(2, index, v)
            self.present[2 * layer : 2 * layer + 2] = k, v
        self._vote(layer, q, k, scale)
        if layer + 1 == self._owner.scoring.layers and not self._owner.looks_ahead:
            return q.transpose(1, 2).contiguous()  # nobody reads it: an export leaves out the rest
        mask = self._mask(self._owner.windows[layer])
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).contiguous()

    def _mask(self, window: int | None) -> torch.Tensor:
        """bool `[B or 1, 1, S, N]`, true where a key is seen; the same for every such layer."""
        if window not in self._masks:
            # Compared, not subtracted: whole numbers of that size would be eight times the mask.
            seen = self._columns <= self._rows
            if window is not None:
                seen = seen & (self._columns > self._rows - window)
            self._masks[window] = seen
        return self._masks[window]

    def _vote(self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float) -> None:
        table = getattr(self._owner, f"heads_{layer}", None)
        if table is None:
            return
        b, heads, _, dim = q.shape
        w = self._voting.shape[1]
        index = self._voting[:, None, :, None].expand(b, heads, w, dim)
        raised: torch.Tensor = torch.ops.specprefill.importance_layer(
            q.gather(2, index),
            k,
            self._scored,
            table,
            self._owner.key_scale,
            self.running,
            scale,
            self._owner.scoring.pool,
            self._causal,
        )
        window = self._owner.windows[layer]
        if window is not None:  # it votes for those whose first token it still sees
            raised = torch.where((self._read <= window)[:, None, None], raised, self.running)
        self.running = raised


_active: ContextVar[_Reading] = ContextVar("specprefill_reading")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    changed = [name for name in CHANGES_LOGITS if kwargs.get(name) is not None]
    if changed or attention_mask is not None:
        raise UnsupportedModel(f"its attention uses {', '.join(changed) or 'a mask of its own'}")
    scale = kwargs.get("scaling")
    out = _active.get().attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query,
        key,
        value,
        query.shape[-1] ** -0.5 if scale is None else float(scale),
    )
    return out, None


def _first_layers(model: Model, layers: int) -> Any:
    """The decoder with its first layers alone and our attention; parameters are shared."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    count = int(model.config.num_hidden_layers)
    family = str(model.config.model_type)
    modules: list[Any] = list(model.module.modules())
    stacks = [
        module
        for module in modules
        if isinstance(getattr(module, "layers", None), torch.nn.ModuleList)
        and len(module.layers) == count
    ]
    if len(stacks) != 1:
        raise UnsupportedModel(f"{family}: {len(stacks)} stacks of {count} layers, not one")
    cut = copy.copy(stacks[0])
    cut._modules = {**cut._modules, "layers": torch.nn.ModuleList([*cut.layers][:layers])}
    tensors = [*cut.parameters(), *cut.buffers()]
    # Modules and configs anew, so that the model's own attention stays as it is.
    decoder: Any = copy.deepcopy(cut, {id(tensor): tensor for tensor in tensors})
    try:
        decoder.set_attn_implementation(ATTENTION_NAME)
    except (AttributeError, ValueError) as error:
        raise UnsupportedModel(f"{family}: its attention cannot be exchanged ({error})") from None
    return decoder
