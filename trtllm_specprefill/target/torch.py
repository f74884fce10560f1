"""The target as a transformers model under torch, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch
from transformers import (
    DynamicCache,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trtllm_specprefill.errors import TargetFailed
from trtllm_specprefill.forward import last_logits, new_cache, watch_layers
from trtllm_specprefill.models import Model
from trtllm_specprefill.operations import prefill_operations, shortest_window
from trtllm_specprefill.plan import PositionSupport, PrunePlan
from trtllm_specprefill.settings import GREEDY_BELOW, Sampling
from trtllm_specprefill.target.base import Step, Target
from trtllm_specprefill.target.text import TextStream


class TorchTarget(Target):
    """Answers with any causal language model that transformers can load.

    Whether the model rotates by the position ids it is given is found out at load: a probe
    at scattered positions must give other logits than at contiguous ones.
    """

    def __init__(self, model: Model) -> None:
        self.name, self.tokenizer = model.name, model.tokenizer
        self._model = model
        watch_layers(model)
        self.position_support = PositionSupport(
            honoured=self._honours_positions(),
            window=shortest_window(model.config),
            context=model.context_length,
        )

    @torch.inference_mode()
    def stream(self, plan: PrunePlan, sampling: Sampling) -> Generator[Step, None, None]:
        """See `Target.stream`. A fresh KV cache per call; nothing outlives the iterator."""
        draw = _sampler(sampling, self._model.device)
        text = TextStream(self.tokenizer, sampling.stop)
        cache = new_cache(self._model)
        ids = torch.from_numpy(plan.input_ids).long()
        positions = torch.from_numpy(plan.position_ids).long()
        for count in range(1, sampling.max_tokens + 1):
            token = draw(self._forward(ids, positions, cache))
            if token in self._model.eos_token_ids:
                yield Step(text.finish(), (token,), "stop")
                return
            piece = text.push(token)
            if text.stopped:
                yield Step(piece, (token,), "stop")
                return
            if count == sampling.max_tokens:
                piece += text.finish()
                yield Step(piece, (token,), "stop" if text.stopped else "length")
                return
            yield Step(piece, (token,))
            ids = torch.tensor([token])
            positions = torch.tensor([plan.next_position + count - 1])

    def operations(self, tokens: int) -> float:
        """See `Target.operations`."""
        return prefill_operations(self._model.config, tokens)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Logits `[vocab]` after the last of `ids`; `TargetFailed` unless all are finite."""
        try:
            logits = last_logits(self._model, ids, positions, cache)
        except Exception as error:  # out of memory, a kernel that fails, an id out of range
            raise TargetFailed(f"target {self.name}: {error}") from error
        if not bool(torch.isfinite(logits).all()):
            raise TargetFailed(f"target {self.name} gave logits that are not finite")
        return logits

    @torch.inference_mode()
    def _honours_positions(self) -> bool:
        ids = torch.arange(1, 9)
        near, far = torch.arange(8), torch.arange(8) * 3
        return not torch.allclose(
            self._forward(ids, near, new_cache(self._model)),
            self._forward(ids, far, new_cache(self._model)),
            atol=1e-4,
        )


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
