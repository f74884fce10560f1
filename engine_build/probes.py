"""What torch answers to the probes of the start-up check, kept in the manifest."""

from __future__ import annotations

from pathlib import Path

from trtllm_specprefill.models import Model, load_model
from trtllm_specprefill.plan import PrunePlan
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.manifest import Manifest, ProbeTokens
from trtllm_specprefill.target.positions import ENDED, probe_plans
from trtllm_specprefill.target.torch import TorchTarget


def probe_tokens(model: Model) -> ProbeTokens:
    """Its first greedy token for every probe, at scattered and at contiguous positions."""
    target = TorchTarget(model)

    def first(plan: PrunePlan) -> int:
        (token,) = next(target.stream(plan, Sampling(max_tokens=1))).token_ids
        return ENDED if token in model.eos_token_ids else token

    pairs = probe_plans(int(model.config.vocab_size))
    return ProbeTokens(
        scattered=tuple(first(far) for far, _ in pairs),
        contiguous=tuple(first(near) for _, near in pairs),
    )


def record_probes(engine: Path) -> None:
    """Let the model of the manifest in `engine` answer the probes, and write them into it."""
    manifest = Manifest.read(engine)
    probes = probe_tokens(load_model(manifest.model))
    manifest.model_copy(update={"probes": probes}).write(engine)
