"""What stands at the other end of a wire, and how a test asks it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trtllm_specprefill.models import EngineModel, Model
from trtllm_specprefill.plan import PrunePlan, Reason
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.base import Step
from trtllm_specprefill.target.endpoint import EndpointTarget, connect
from trtllm_specprefill.target.torch import TorchTarget


@dataclass
class Behind:
    """What a server does, and what it was asked."""

    model: Model
    asked: list[dict[str, Any]] = field(default_factory=list)
    instead: Callable[[Any], bool] | None = None
    gone: threading.Event = field(default_factory=threading.Event)

    def answer(self, ids: list[int], sampling: Sampling) -> Iterator[Step]:
        n = len(ids)
        at = np.arange(n, dtype=np.int32)
        plan = PrunePlan(np.asarray(ids, np.int32), at, n, "original", n, Reason.DISABLED)
        return TorchTarget(self.model).stream(plan, sampling)


def plan_of(tokenizer: Any, text: str = "The key to the cellar lies under the third") -> PrunePlan:
    ids = np.asarray(tokenizer.encode(text), dtype=np.int32)
    at = np.arange(ids.size, dtype=np.int32)
    return PrunePlan(ids, at, ids.size, "contiguous", 4 * ids.size, Reason.PRUNED)


def target_of(url: str, model: Model, timeout_s: float = 20.0) -> EndpointTarget:
    described = EngineModel(model.name, model.tokenizer, model.config, model.eos_token_ids)
    return EndpointTarget(connect(url, "served", timeout_s), described)


def text_of(steps: list[Step]) -> str:
    return "".join(step.text for step in steps)
