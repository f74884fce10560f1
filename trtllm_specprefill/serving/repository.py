"""The Triton model repository, rendered from the templates of `triton_model_repo`."""

from __future__ import annotations

import json
import shutil
from importlib.resources import as_file, files
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trtllm_specprefill.serving.control import check_folder
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.serving.wire import INPUTS

# In the order in which they are loaded: the orchestrator asks the other two.
MODELS = ("draft", "target", "orchestrator", "specprefill", "specprefill_infer")
CONTROL = "control"  # folder of the models' sockets
_HANDED = ("input_ids", "position_ids", "next_position", "request", "report")


def render(settings: ServeSettings, folder: Path) -> Path:
    """Write the repository to `folder`/models, each model anew, and return it.

    The models' sockets will be in `folder`/control. Raises `InputError` for a path too long.
    """
    out, control = folder / "models", (folder / CONTROL).absolute()
    check_folder(control)
    shutil.rmtree(control, ignore_errors=True)  # sockets of a server that was here before
    control.mkdir(parents=True, exist_ok=True)
    control.chmod(0o700)
    values = {
        # A string in protobuf's text form may be written as JSON writes it.
        "settings": json.dumps(settings.model_dump_json(exclude_defaults=True)),
        "control": json.dumps(str(control)),
        "inputs": [(name, kind, many) for name, (kind, many) in INPUTS.items()],
        "handed": _HANDED,
        "infer_instances": settings.infer_instances,
    }
    with as_file(files("triton_model_repo")) as templates:
        environment = Environment(
            loader=FileSystemLoader(templates),
            undefined=StrictUndefined,
            keep_trailing_newline=True,
            autoescape=False,  # protobuf text, not HTML
        )
        for model in MODELS:
            folder = out / model
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "1").mkdir(parents=True)
            config = environment.get_template(f"{model}/config.pbtxt.j2").render(values)
            (folder / "config.pbtxt").write_text(config, "utf-8")
            code = templates / model / "model.py"
            if code.is_file():
                shutil.copy(code, folder / "1" / "model.py")
    return out
