"""What a `config.json` says of the rotary embedding, to those who read it by other names.

Transformers 4, with which TensorRT-LLM 1.2 comes, has `rope_scaling` and the theta beside it, and
passes over `rope_parameters`. Transformers 5, which 1.4 has, writes `rope_parameters` with the
theta in them, and reads either; where both are there, `rope_scaling`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtllm_specprefill.errors import InputError
from trtllm_specprefill.target.manifest import Manifest

# Of TensorRT-LLM's PyTorch models, those that can leave the rotation to position ids by config.
MROPE_BY_CONFIG = ("qwen2",)


def for_both(config: dict[str, Any]) -> dict[str, Any]:
    """A `config.json` of which transformers 4 reads what 5 does.

    Parameters for each kind of layer are left as they are: 4 has no one name for them.
    """
    parameters = config.get("rope_parameters")
    if not parameters or any(isinstance(value, dict) for value in parameters.values()):
        return config
    made = {**config, "rope_theta": _theta(config.get("rope_scaling") or {}, parameters, config)}
    if (part := parameters.get("partial_rotary_factor")) is not None:
        made["partial_rotary_factor"] = part
    if _kind(parameters) != "default" and not config.get("rope_scaling"):
        made["rope_scaling"] = {k: v for k, v in parameters.items() if k != "rope_theta"}
    return made


def rotate_by_position_ids(config: dict[str, Any]) -> dict[str, Any]:
    """A Qwen2 `config.json` whose PyTorch model in TensorRT-LLM rotates by position ids.

    MRoPE with three equal axes is ordinary rotary embedding; the kernel that fuses the rotation
    takes positions from the KV index, so it is turned off. As `for_both` has it, the parameters are
    stated twice. Raises `InputError` for a config that cannot say so.
    """
    if config.get("model_type") not in MROPE_BY_CONFIG:
        raise InputError("model", config.get("model_type"), "one of " + ", ".join(MROPE_BY_CONFIG))
    stated = {n: config[n] for n in ("rope_scaling", "rope_parameters") if config.get(n)}
    for name, parameters in stated.items():
        if _kind(parameters) not in ("default", "mrope"):
            allowed = "none: its place is taken by the one for MRoPE"
            raise InputError(name, parameters, allowed)
    heads = int(config["num_attention_heads"])
    half = int(config.get("head_dim") or int(config["hidden_size"]) // heads) // 2
    quarter = half // 4
    sections = [quarter, (half - quarter) // 2, half - quarter - (half - quarter) // 2]
    rotary = {
        "type": "mrope",
        "rope_type": "default",
        "mrope_section": sections,
        "rope_theta": _theta(*stated.values(), config),
    }
    return {
        **config,
        "disable_fuse_rope": True,
        "rope_theta": rotary["rope_theta"],
        "rope_scaling": rotary,
        "rope_parameters": rotary,
    }


def write_rotation(folder: Path) -> None:
    """Let the checkpoint in `folder` rotate by position ids, where its manifest says that it does.

    Either way transformers 4 and 5 read its config alike.
    """
    rotates = Manifest.read(folder).original_positions
    _rewrite(folder, rotate_by_position_ids if rotates else for_both)


def write_for_both(folder: Path) -> None:
    """`for_both` on the config in `folder`."""
    _rewrite(folder, for_both)


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("engine", str(folder), f"a checkpoint's folder ({error})") from error
    path.write_text(json.dumps(change(config), indent=2) + "\n", encoding="utf-8")


def _kind(parameters: dict[str, Any]) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _theta(*stated: dict[str, Any]) -> float:
    """The first that is stated; else that of transformers and TensorRT-LLM."""
    return next((float(one["rope_theta"]) for one in stated if one.get("rope_theta")), 10_000.0)
