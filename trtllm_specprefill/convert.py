"""A GGUF file turned, once, into a folder in Hugging Face format.

Reading a GGUF through transformers takes minutes, and passes over some of what the file
says of itself; the folder loads in seconds and says it all.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from trtllm_specprefill.errors import InputError
from trtllm_specprefill.fetch import FetchFailed, Progress

NO_LICENCE = "not stated"
SOURCE = "source.json"
"""The file in which a converted folder remembers its licence."""

# Goes into the key of a converted GGUF. transformers 4 misreads what transformers 5 saves
# (the rope base among it), so each major version has its own.
FORMAT = f"v1-transformers{transformers.__version__.split('.')[0]}"


_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def check_magic(file: Path, name: str) -> None:
    """Raise `InputError` unless the first bytes are those of a GGUF of a known version."""
    with file.open("rb") as stream:
        head = stream.read(8)
    if head[:4] != b"GGUF" or int.from_bytes(head[4:], "little") not in (2, 3):
        raise InputError("model", name, "a GGUF file (little-endian, format version 2 or 3)")


def convert_gguf(file: Path, name: str, licence: str | None, out: Path, progress: Progress) -> Path:
    """Dequantise a GGUF into the new folder `out`, in Hugging Face format, and return it.

    Kept in float32, since the values a 4-bit block stands for are not exact in 16 bits.
    `licence` is the one to remember; `None` means the one the file states.

    Raises:
        InputError: transformers cannot read the file, or not faithfully.
        FetchFailed: the disk is full.
    """
    progress(f"converting {name} (once; minutes on a slow machine)")
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        header = _read_header(file)
        if header.scales_positions:
            raise ValueError("it scales its rotary positions, which transformers drops from a GGUF")
        with quiet(), contextlib.redirect_stderr(io.StringIO()):  # a bar no setting turns off
            tokenizer = AutoTokenizer.from_pretrained(**where)
            _check_algorithm(tokenizer, header)
            _restore_special_tokens(tokenizer, header)
            module, report = AutoModelForCausalLM.from_pretrained(
                **where, **_dequantised(file), dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:  # the readers raise what they like
        allowed = f"a whole GGUF of an architecture transformers reads ({said(error)})"
        raise InputError("model", name, allowed) from error
    check_complete(report, name)
    if header.end_ids:
        module.generation_config.eos_token_id = list(header.end_ids)
    progress(f"writing {name} to the cache")
    with quiet():
        try:
            module.save_pretrained(out)
        except SafetensorError as error:  # a full disk, in safetensors' own words
            raise FetchFailed(f"cannot store {name}: {error}") from error
        tokenizer.save_pretrained(out)
    (out / SOURCE).write_text(json.dumps({"licence": licence or header.licence}))
    return out


@dataclass(frozen=True)
class _Header:
    """What a GGUF says of itself that transformers drops, or in some versions misreads."""

    licence: str
    tokenizer_model: str | None
    special_ids: dict[str, int]
    """By transformers' attribute, such as `eos_token`."""
    end_ids: tuple[int, ...]
    """End of text and, where there is one, end of turn."""
    adds_bos: bool | None
    scales_positions: bool


def _read_header(file: Path) -> _Header:
    reader = gguf.GGUFReader(file)

    def value(key: str) -> Any:
        field = reader.fields.get(key)
        return None if field is None else field.parts[field.data[0]]

    def text(key: str) -> str | None:
        return None if (raw := value(key)) is None else bytes(raw).decode()

    def number(key: str) -> int | None:
        return None if (raw := value(f"tokenizer.ggml.{key}")) is None else int(raw[0])

    architecture = text("general.architecture")
    scaling = text(f"{architecture}.rope.scaling.type") or "none"
    factors = {"rope_freqs.weight", "rope_factors_long.weight"}
    special = {name: number(key) for name, key in _SPECIAL_TOKENS.items()}
    adds_bos = number("add_bos_token")
    ends = {number("eos_token_id"), number("eot_token_id")}
    return _Header(
        licence=text("general.license") or NO_LICENCE,
        tokenizer_model=text("tokenizer.ggml.model"),
        special_ids={name: one for name, one in special.items() if one is not None},
        end_ids=tuple(sorted(one for one in ends if one is not None)),
        adds_bos=None if adds_bos is None else bool(adds_bos),
        # Of all architectures, transformers reads the scaling of gpt-oss alone.
        scales_positions=architecture != "gpt-oss"
        and (scaling != "none" or any(tensor.name in factors for tensor in reader.tensors)),
    )


def _check_algorithm(tokenizer: Any, header: _Header) -> None:
    # "llama" is SentencePiece's BPE; transformers 4 makes a unigram model of a Gemma's,
    # which cuts many words elsewhere.
    made = type(tokenizer.backend_tokenizer.model).__name__
    if header.tokenizer_model == "llama" and made != "BPE":
        version = transformers.__version__
        raise ValueError(f"transformers {version} reads its tokenizer as {made}; 5 reads it right")


def _restore_special_tokens(tokenizer: Any, header: _Header) -> None:
    """Make the tokenizer say what the file says.

    transformers 4 makes `<|im_start|>` the end of text of a SmolLM2, and prepends it.
    """
    for attribute, token_id in header.special_ids.items():
        setattr(tokenizer, attribute, tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.clean_up_tokenization_spaces = False  # decoding gives back what was encoded
    if header.adds_bos is not None and _adds_bos(tokenizer) != header.adds_bos:
        tokenizer.add_bos_token = header.adds_bos
        if _adds_bos(tokenizer) != header.adds_bos:
            raise ValueError("its tokenizer's beginning-of-text rule cannot be set")


def _adds_bos(tokenizer: Any) -> bool:
    return bool(tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id])


def _dequantised(file: Path) -> dict[str, Any]:
    # transformers 4 always dequantises, and knows no GgufConfig.
    if (kind := getattr(transformers, "GgufConfig", None)) is None:
        return {}
    return {"quantization_config": kind(str(file), dequantize=True)}


def check_complete(report: dict[str, Any], name: str) -> None:
    """Raise `InputError` if transformers' loading report misses any weights."""
    # transformers fills what a file lacks with random values and only warns.
    if lacking := sorted(map(str, report["missing_keys"])):
        raise InputError("model", name, f"a model with all its weights (no {lacking[0]})")


def said(error: BaseException) -> str:
    """The first line of what an error says."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars for what takes seconds, or is announced in a line."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
