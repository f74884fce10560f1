"""The target as a transformers model under torch, on a CPU or a GPU."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    DynamicCache,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trtllm_specprefill.cache import Recent
from trtllm_specprefill.errors import TargetFailed
from trtllm_specprefill.forward import last_logits, new_cache, watch_layers
from trtllm_specprefill.models import Model
from trtllm_specprefill.operations import prefill_operations, shortest_window
from trtllm_specprefill.plan import PositionSupport, PrunePlan
from trtllm_specprefill.settings import GREEDY_BELOW, Sampling
from trtllm_specprefill.target.base import Step, Target
from trtllm_specprefill.target.evidence import evidence_for, informed
from trtllm_specprefill.target.positions import check_positions
from trtllm_specprefill.target.steps import Chunk, assemble

SHORTEST_HEAD = 64  # tokens; reading fewer by themselves costs what is saved later


class TorchTarget(Target):
    """Answers with any causal language model that transformers can load.

    Whether the model rotates by the position ids it is given is found out at load: a probe
    at scattered positions must give other logits than at contiguous ones.
    """

    def __init__(self, model: Model, keep: int = 0) -> None:
        """Check how it treats positions.

        keep: bytes of keys and values of heads (see `PrunePlan.head`) kept between prompts. Unless
        0, a head is read by itself whether it is known or not, so that both give the same.
        """
        self.name, self.tokenizer = model.name, model.tokenizer
        self._heads: Recent[DynamicCache] | None = Recent(keep, _bytes_of) if keep else None
        self._too_long = sys.maxsize  # tokens of the shortest head that there was no room for
        self.model, self.fingerprint = model, model.fingerprint
        watch_layers(model)
        support = PositionSupport(
            honoured=check_positions(self._logits, int(model.config.vocab_size)).honoured,
            window=shortest_window(model.config),
            context=model.context_length,
        )
        self.position_support = informed(support, evidence_for(model.fingerprint))

    @torch.inference_mode()
    def stream(self, plan: PrunePlan, sampling: Sampling) -> Generator[Step, None, None]:
        """See `Target.stream`. A KV cache per call; none of it but a head outlives the iterator."""
        ends = self.model.eos_token_ids
        yield from assemble(self._chunks(plan, sampling), self.tokenizer, sampling, ends)

    @torch.inference_mode()
    def read_ahead(self, head: NDArray[np.int32]) -> None:
        """See `Target.read_ahead`. Without a place to keep it, nothing is read."""
        if self._heads is not None and SHORTEST_HEAD <= head.size < self._too_long:
            with suppress(TargetFailed):
                self._head(head, self._heads)

    def operations(self, tokens: int) -> float:
        """See `Target.operations`."""
        return prefill_operations(self.model.config, tokens)

    def _chunks(self, plan: PrunePlan, sampling: Sampling) -> Generator[Chunk, None, None]:
        """Token by token, for as long as it is asked for another."""
        draw = _sampler(sampling, self.model.device)
        read, cache = 0, new_cache(self.model)
        if self._heads is not None and SHORTEST_HEAD <= plan.head < plan.input_ids.size:
            read = plan.head
            cache = copy.deepcopy(self._head(plan.input_ids[:read], self._heads))
        ids = torch.from_numpy(plan.input_ids[read:]).long()
        positions = torch.from_numpy(plan.position_ids[read:]).long()
        for position in count(plan.next_position):
            token = draw(self._forward(ids, positions, cache))
            yield Chunk((token,))
            ids, positions = torch.tensor([token]), torch.tensor([position])

    def _head(self, ids: NDArray[np.int32], heads: Recent[DynamicCache]) -> DynamicCache:
        """The KV cache of a head, known or read now; not to be fed."""
        key = ids.tobytes()
        cache = heads.get(key)
        if cache is None:
            cache = new_cache(self.model)
            self._forward(torch.from_numpy(ids).long(), torch.arange(ids.size), cache)
            if not heads.put(key, cache):
                self._too_long = min(self._too_long, ids.size)
        return cache

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Logits `[vocab]` after the last of `ids`; `TargetFailed` unless all are finite."""
        try:
            logits = last_logits(self.model, ids, positions, cache)
        except Exception as error:  # out of memory, a kernel that fails, an id out of range
            raise TargetFailed(f"target {self.name}: {error}") from error
        if not bool(torch.isfinite(logits).all()):
            raise TargetFailed(f"target {self.name} gave logits that are not finite")
        return logits

    @torch.inference_mode()
    def _logits(self, plan: PrunePlan) -> NDArray[np.float32]:
        """Logits `[vocab]` of the first token, for the check of positions."""
        ids, positions = torch.from_numpy(plan.input_ids), torch.from_numpy(plan.position_ids)
        logits = self._forward(ids.long(), positions.long(), new_cache(self.model))
        return logits.cpu().numpy()


def _bytes_of(cache: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _sampler(sampling: Sampling, device: torch.device) -> Callable[[torch.Tensor], int]:
    """How the next token is drawn from logits `[vocab]`."""
    if sampling.temperature < GREEDY_BELOW:
        return lambda logits: int(logits.argmax())
    generator = torch.Generator(device=device)
    generator.manual_seed(generator.seed() if sampling.seed is None else sampling.seed)
    warpers = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))

    def draw(logits: torch.Tensor) -> int:
        scores = logits[None]
        for warper in warpers:
            scores = warper(None, scores)
        return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=generator))

    return draw
