"""`specprefill settings`: what there is to set, from `settings` itself, as `docs/settings.md`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from trtllm_specprefill.settings import Sampling, Settings

SETTINGS_EXAMPLE = "Example: specprefill settings"
_GROUPS: tuple[tuple[str, type[Settings] | type[Sampling]], ...] = (
    ("How a prompt is scored, selected from and placed", Settings),
    ("How the answer is drawn", Sampling),
)


def rows() -> list[dict[str, Any]]:
    """Group, name, default, meaning and what is allowed of every setting, as JSON values."""
    return [
        {
            "group": title,
            "name": name,
            "default": field.get_default(),
            "meaning": kind.meaning(name),
            "allowed": kind.allowed(name),
        }
        for title, kind in _GROUPS
        for name, field in kind.model_fields.items()
    ]


def tables() -> str:
    """The same as Markdown, a table for each group."""
    lines = []
    for title, _ in _GROUPS:
        lines += [f"## {title}", ""]
        lines += ["| setting | default | meaning | allowed |", "|---|---|---|---|"]
        for row in rows():
            if row["group"] == title:
                default = "" if row["default"] is None else f"`{json.dumps(row['default'])}`"
                cells = (f"`{row['name']}`", default, row["meaning"], row["allowed"])
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def list_settings(
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list instead of tables.")] = False,
) -> None:
    """Every setting of a request: default, meaning and what is allowed."""
    print(json.dumps(rows()) if as_json else tables())
