"""Which heads of a draft say what matters, and how deep one must go for them, by measurement.

Few heads find what a question asks for (arXiv 2404.15574 calls them retrieval heads), and the
others drown them in a maximum over all. `specprefill calibrate-heads` finds them on planted facts
and writes them down; the files in this package are the demo models'.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from typing_extensions import Self

from trtllm_specprefill.measured import Measurement, find, own_folder

FOLDER = "heads"  # of the cache folder


class Depth(BaseModel):
    """The best heads of the first `layers` layers.

    heads: for each layer the query heads that score, ascending. recall: share of planted facts
    kept, by keep rate; on the prompts that chose the heads, and on others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: int = Field(ge=1)
    heads: tuple[tuple[int, ...], ...]
    recall: dict[str, float]
    held_out: dict[str, float]

    @model_validator(mode="after")
    def _one_list_each(self) -> Self:
        if len(self.heads) != self.layers or not self.heads[-1]:
            raise ValueError(f"heads must be {self.layers} lists, and the last layer must score")
        return self


class HeadCalibration(Measurement):
    """What was found for one draft: `depths` by rising number of layers, `layers` the one taken.

    tokens, prompts, seed: of the prompts that chose. all_heads: held-out recall with every head of
    the usual number of layers, to compare with.
    """

    draft: str
    layers: int
    depths: tuple[Depth, ...]
    tokens: int
    prompts: int
    seed: int
    all_heads: dict[str, float]

    @field_validator("depths")
    @classmethod
    def _rising(cls, depths: tuple[Depth, ...]) -> tuple[Depth, ...]:
        if not depths or [d.layers for d in depths] != sorted({d.layers for d in depths}):
            raise ValueError("depths must rise")
        return depths

    @model_validator(mode="after")
    def _taken_is_there(self) -> Self:
        if self.at(self.layers) is None:
            raise ValueError(f"layers {self.layers} is none of the depths")
        return self

    def at(self, layers: int) -> Depth | None:
        """The heads found for a pass of so many layers."""
        return next((d for d in self.depths if d.layers == layers), None)


def calibration_for(fingerprint: str) -> HeadCalibration | None:
    """What is known of the weights with this fingerprint; the user's own comes first."""
    return find(HeadCalibration, fingerprint, own_folder(FOLDER), Path(__file__).parent)
