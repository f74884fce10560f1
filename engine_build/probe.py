"""The figures an engine must reproduce before it is used, and the manifest around them."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine_build.scoring_model import Scoring, ScoringModel
from trtllm_specprefill.draft.engine import Engine, Ids, Lengths, Pass, Scores, look_ahead, read
from trtllm_specprefill.draft.manifest import (
    CacheGeometry,
    DraftManifest,
    Precision,
    Probe,
    Runtime,
    Scorer,
    tokenizer_hash,
)
from trtllm_specprefill.models import Model

# Largest difference that is let through, in units of the largest score. fp32 engines differ by
# the order of their sums; the others by their rounding, which grows from layer to layer.
TOLERANCE: dict[Precision, float] = {"fp32": 1e-3, "bf16": 0.15, "fp8": 0.5}
PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "nvidia-modelopt", "trtllm-specprefill")
_TEXT = (
    "The archive keeps a ledger of every key. The key to the cellar lies under the third stone"
    " of the garden wall; the key to the attic was lost in the flood of 1893. Visitors may read"
    " the ledger on Thursdays. 寿司 café, Привет!\nQuestion: where is the key to the cellar?\nAnswer:"
)
_STEPS = 4


class ModuleEngine(Engine):
    """The scoring module itself under torch: the judge of what is made from it."""

    batch, piece = 1 << 10, 1 << 20

    def __init__(self, module: ScoringModel) -> None:
        self._module = module

    @torch.inference_mode()
    def read(
        self, input_ids: Ids, position_ids: Ids, lengths: Lengths, voters: Lengths
    ) -> Scores:
        """See `Engine.read`."""
        (scores,) = self._module(*_tensors(input_ids, position_ids, lengths, voters))
        found: Scores = scores.numpy()
        return found

    def begin(self, batch: int, capacity: int) -> Pass:
        """See `Engine.begin`."""
        return _ModulePass(self._module, batch, capacity)


class _ModulePass(Pass):
    def __init__(self, module: ScoringModel, batch: int, capacity: int) -> None:
        size = (batch, module.kv_heads, capacity, module.head_dim)
        layers = 2 * module.scoring.layers
        self._module = module
        self._past = [torch.zeros(size, dtype=module.dtype) for _ in range(layers)]

    @torch.inference_mode()
    def step(self, *inputs: np.ndarray[Any, Any]) -> tuple[Scores, Ids]:
        """See `Pass.step`."""
        rows, tokens, *self._past = self._module(*_tensors(*inputs), *self._past)
        return rows.numpy(), tokens.numpy()


def _tensors(*arrays: np.ndarray[Any, Any]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]


def probe_ids(tokenizer: Any, max_tokens: int) -> tuple[int, ...]:
    """Ids of the shipped probe prompt: its last `max_tokens` where it has more."""
    ids: Sequence[int] = tokenizer(_TEXT)["input_ids"]
    return tuple(ids[-max_tokens:])


def make_probe(model: Model, scoring: Scoring, ids: Sequence[int], precision: Precision) -> Probe:
    """What `model`, as it is under torch on a CPU, says of `ids`; float32 weights serve best."""
    module = ScoringModel(model, scoring).eval()
    engine, prompt = ModuleEngine(module), np.array(ids, dtype=np.int64)
    tolerance = TOLERANCE[precision]
    if scoring.mode == "window":
        (scores,) = read(engine, [prompt], [min(scoring.queries, prompt.size)])
        return Probe(ids=tuple(ids), importance=_rounded(scores), tolerance=tolerance)
    (one,) = look_ahead(engine, [prompt], _STEPS, scoring.votes, sees=module.votes_after)
    return Probe(
        ids=tuple(ids),
        importance=_rounded(one.scores),
        tolerance=tolerance,
        next_tokens=one.tokens,
    )


def draft_manifest(
    model: Model,
    scoring: Scoring,
    *,
    runtime: Runtime,
    precision: Precision,
    scorer: Scorer,
    max_tokens: int,
    max_batch: int,
    probe: Probe,
    **others: Any,
) -> DraftManifest:
    """The manifest of what was made of `model`; others: further fields of it by name."""
    module = ScoringModel(model, scoring)
    cache = None
    if scoring.mode == "lookahead":
        cache = CacheGeometry(
            layers=scoring.layers,
            kv_heads=module.kv_heads,
            head_dim=module.head_dim,
            dtype=str(model.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        )
    return DraftManifest(
        model=model.name,
        model_hash=model.fingerprint,
        tokenizer_hash=tokenizer_hash(model.tokenizer),
        versions=installed(PACKAGES) | others.pop("versions", {}),
        runtime=runtime,
        precision=precision,
        scorer=scorer,
        mode=scoring.mode,
        layers=scoring.layers,
        heads=scoring.heads,
        pool=scoring.pool,
        queries=scoring.queries,
        votes=scoring.votes,
        max_tokens=max_tokens,
        max_batch=max_batch,
        cache=cache,
        probe=probe,
        **others,
    )


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those of the packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _rounded(scores: Scores) -> tuple[float, ...]:
    # Six digits: a manifest is read by people too.
    return tuple(json.loads(f"[{','.join(f'{score:.6g}' for score in scores)}]"))
