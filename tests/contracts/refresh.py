"""Compare the recorded APIs with what is installed of them: `python -m tests.contracts.refresh`.

Prints one line for each recorded argument or field that the installed version does not have, and
one for each that it has and the recording has not; exits with 1 when something recorded is gone.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Recorded:
    """One recorded class. methods: public ones, by name, with their arguments."""

    module: str
    name: str
    fields: frozenset[str]
    methods: dict[str, tuple[str, ...]] = field(default_factory=dict)


def recorded(version: str) -> Iterator[Recorded]:
    """Every class of a recorded package, read from its text: nothing is imported."""
    root = HERE / version
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield _class(module, node)


def _class(module: str, node: ast.ClassDef) -> Recorded:
    fields, methods = set(), {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            fields.add(item.target.id)
        elif isinstance(item, ast.Assign):
            fields.update(t.id for t in item.targets if isinstance(t, ast.Name))
        elif isinstance(item, ast.FunctionDef):
            marks = item.decorator_list
            if any(isinstance(d, ast.Name) and d.id == "property" for d in marks):
                fields.add(item.name)
                continue
            if any(isinstance(d, ast.Attribute) and d.attr == "stand_in" for d in marks):
                continue
            given = item.args
            rest = [a for a in (given.vararg, given.kwarg) if a is not None]
            names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs, *rest)]
            methods[item.name] = tuple(n for n in names if n != "self")
    return Recorded(module, node.name, frozenset(fields - {"model_config"}), methods)


def arguments(function: Any) -> set[str] | None:
    """Names of a function's arguments; of a native one, from the signature in its docstring."""
    try:
        names = {n for n in inspect.signature(function).parameters if n != "self"}
        if not {"args", "kwargs"} <= names:
            return names
    except (TypeError, ValueError):
        pass
    stated = re.findall(r"(\w+)\s*:", (function.__doc__ or "").split("->")[0])
    return {name for name in stated if name != "self"} if stated else None


def differences(version: str) -> Iterator[tuple[str, bool]]:
    """Lines of what differs from the installed package; true where something recorded is gone."""
    for entry in recorded(version):
        where = f"{entry.module}.{entry.name}"
        try:
            found = getattr(importlib.import_module(entry.module), entry.name)
        except (ImportError, AttributeError) as error:
            yield f"{where}: {error}", True
            continue
        known = set(dir(found)) | set(getattr(found, "model_fields", ()))
        known |= set(getattr(found, "__annotations__", ()))
        known |= set(getattr(found, "__dataclass_fields__", ()))
        for name in sorted(entry.fields - known):
            yield f"{where}.{name}: gone", True
        for name, wanted in entry.methods.items():
            installed = arguments(getattr(found, name, None))
            if installed is None:
                yield f"{where}.{name}: not there, or without a signature to read", True
                continue
            for gone in sorted(set(wanted) - installed):
                yield f"{where}.{name}({gone}=): gone", True
            for new in sorted(installed - set(wanted)):
                yield f"{where}.{name}({new}=): new", False


def installed() -> Iterator[tuple[str, str]]:
    """What is installed of what is recorded: name and version, and the folder it is held to."""
    with contextlib.suppress(ImportError):
        version = importlib.import_module("tensorrt_llm").__version__
        old = tuple(map(int, re.findall(r"\d+", version)[:2])) <= (1, 2)
        yield f"TensorRT-LLM {version}", "recorded_1_2" if old else "recorded_1_4"
    with contextlib.suppress(ImportError):
        version = importlib.import_module("tensorrt").__version__
        yield f"TensorRT {version}", "recorded_tensorrt"


def main() -> int:
    """See the module."""
    gone = False
    for name, folder in installed():
        print(f"{name} against {folder}")
        for line, is_gone in differences(folder):
            print(line)
            gone |= is_gone
    return int(gone)


if __name__ == "__main__":
    sys.exit(main())
