"""What a built draft takes of a GPU: from its folder and its model's config, before it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtllm_specprefill.capacity import Guest
from trtllm_specprefill.draft.manifest import DraftManifest
from trtllm_specprefill.draft.memory import cache_bytes, tensor_bytes
from trtllm_specprefill.errors import InputError

WIDEST_FUSED = 128  # head size up to which attention is one kernel, but for float32


def footprint_of(folder: str | Path, manifest: DraftManifest, config: Any) -> Guest:
    """Bytes that the engine in `folder` takes, a draft of the model with this `config`.

    Its weights are its files, which hold all of them in the types that run, and the programs. Its
    keys and values, and its buffers, are what `draft.memory` takes. Only the workspace is an
    estimate, of the largest call that the engine was built for. Raises `InputError` for a file
    that is missing.
    """
    files = [Path(folder) / name for name in manifest.files]
    for file in files:
        if not file.is_file():
            raise InputError("engine", str(file), "a file, which the engine's manifest names")
    return Guest(
        weights=sum(file.stat().st_size for file in files),
        kv=cache_bytes(manifest),
        work=tensor_bytes(manifest) + _workspace(manifest, config),
    )


def _workspace(manifest: DraftManifest, config: Any) -> float:
    """Bytes that one layer's tensors take at once; no layer keeps any for the next but one.

    Of each token the residual stream, queries, keys and values, and the MLP's three rows; the mask;
    the logits of the queries that vote, in float32, and what softmax and pooling make of them; and
    where no fused kernel fits, the logits of all queries and their softmax.
    """
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    dim = int(getattr(config, "head_dim", None) or hidden // heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    wide = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    single = manifest.precision == "fp32" or manifest.runtime == "onnx"
    size = 4 if single else 2
    tokens = manifest.max_tokens
    row = 2 * hidden + (heads + 2 * kv_heads) * dim + 3 * wide
    pairs = tokens * tokens
    voting = 1 if manifest.mode == "lookahead" else manifest.queries
    of_one = size * (row * tokens + pairs) + 3 * 4 * heads * voting * tokens
    if single or dim > WIDEST_FUSED:
        of_one += 2 * size * heads * pairs
    return float(manifest.max_batch * of_one)
