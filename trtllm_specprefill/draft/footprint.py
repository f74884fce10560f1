"""What a built draft takes of a GPU: from its folder and its model's config, before it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtllm_specprefill.capacity import Guest
from trtllm_specprefill.draft.manifest import DraftManifest
from trtllm_specprefill.draft.memory import cache_bytes, tensor_bytes
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.operations import layer_windows

WIDEST_FUSED = 256  # head size up to which attention is one kernel, but for float32


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
    """Bytes of what the largest call holds at once, which is one layer's.

    Of each token: the residual stream, queries, keys and values, the MLP's three rows, and a norm's
    two in float32; of look-ahead the keys and values anew, and where they are written. The masks, a
    number for each pair of tokens. The logits of the queries that vote, in float32, and what
    softmax and pooling make of them; where attention is not one kernel, the logits of all queries
    and their softmax.
    TensorRT for RTX states 0.6 to 1.0 of it for SmolLM2 and Gemma 3 (docs/capacity.md).
    """
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    dim = int(getattr(config, "head_dim", None) or hidden // heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    wide = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    single = manifest.precision == "fp32" or manifest.runtime == "onnx"
    ahead = manifest.mode == "lookahead"
    size = 4 if single else 2
    batch, tokens = manifest.max_batch, manifest.max_tokens
    row = size * (2 * hidden + (heads + 2 * kv_heads) * dim + 3 * wide) + 2 * 4 * hidden
    if ahead:
        row += kv_heads * dim * (2 * size + 8)
    voting = 3 * 4 * heads * (1 if ahead else manifest.queries)
    masks = len(set(layer_windows(config)[: manifest.layers])) * (batch if ahead else 1)
    all_logits = 2 * heads * batch if single or dim > WIDEST_FUSED else 0
    return float(batch * tokens * (row + voting) + size * tokens**2 * (masks + all_logits))
