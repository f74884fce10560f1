"""Measurements of models, found by the fingerprint of the weights they were made on.

Those of the demo models ship with the package; a user's own lie in the cache folder and come
first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from trtllm_specprefill.fetch import cache_folder

_log = logging.getLogger(__name__)


class Measurement(BaseModel):
    """Something measured on one model. fingerprint: of its weights. command: what measured it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fingerprint: str
    command: str


M = TypeVar("M", bound=Measurement)


def own_folder(kind: str) -> Path:
    """Where the user's own measurements of a kind are kept."""
    return cache_folder() / kind


def find(kind: type[M], fingerprint: str, *folders: Path) -> M | None:
    """The first measurement of these weights in `folders`, or None."""
    return next((one for one in read(kind, *folders) if one.fingerprint == fingerprint), None)


def read(kind: type[M], *folders: Path) -> Iterator[M]:
    """Every measurement in `folders`; a file that holds none is passed over with a warning."""
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            try:
                yield kind.model_validate_json(path.read_text("utf-8"))
            except (OSError, ValidationError) as error:
                _log.warning("%s is no %s: %s", path, kind.__name__, error)


def write(path: Path, measured: Measurement) -> None:
    """Write a measurement, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(measured.model_dump_json(indent=1) + "\n", "utf-8")
