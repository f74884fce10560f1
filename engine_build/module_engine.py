"""The module that is exported, run by torch: what an exported or built draft is compared with."""

from __future__ import annotations

import numpy as np
import torch

from engine_build.scoring_model import ScoringModel
from trtllm_specprefill.draft.engine import Engine, Ids, Lengths, Pass, Scores


class ModuleEngine(Engine):
    """The module that is exported, run by torch."""

    def __init__(self, module: ScoringModel) -> None:
        self._module = module.eval()
        self.batch, self.piece = 1, 1 << 20

    def read(self, input_ids: Ids, position_ids: Ids, lengths: Lengths, voters: Lengths) -> Scores:
        """See `Engine.read`."""
        with torch.inference_mode():
            (scores,) = self._module(*_tensors(input_ids, position_ids, lengths, voters))
        found: Scores = scores.numpy()
        return found

    def begin(self, batch: int, capacity: int) -> Pass:
        """See `Engine.begin`."""
        return _ModulePass(self._module, batch, capacity)


class _ModulePass(Pass):
    def __init__(self, module: ScoringModel, batch: int, capacity: int) -> None:
        size = (batch, module.kv_heads, capacity, module.head_dim)
        empty = torch.zeros(size, dtype=module.dtype)
        self._module, self._cache = module, (empty,) * (2 * module.scoring.layers)

    def step(
        self,
        input_ids: Ids,
        position_ids: Ids,
        lengths: Lengths,
        prompt_lengths: Lengths,
        past_lengths: Lengths,
    ) -> tuple[Scores, Ids]:
        given = _tensors(input_ids, position_ids, lengths, prompt_lengths, past_lengths)
        with torch.inference_mode():
            scores, tokens, *cache = self._module(*given, *self._cache)
        self._cache = tuple(cache)
        return scores.numpy(), tokens.numpy()


def _tensors(*arrays: Ids | Lengths) -> list[torch.Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
