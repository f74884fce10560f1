"""Which positions a target answers better with, by measurement.

Original positions are what speculative prefill asks for; small models often answer better with
contiguous ones. Which of the two a target prefers is a fact about its weights, so it is measured
(`python -m trtllm_specprefill.evaluation positions`) and written down: the files in this
package are the demo models', those in the cache folder are the user's own, and those in a built
engine's folder are of the model it was built from.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from trtllm_specprefill.measured import Measurement, find, own_folder
from trtllm_specprefill.plan import Positions, PositionSupport

FOLDER = "positions"  # of the cache folder, and of an engine's


class Right(BaseModel):
    """How many needles were answered right, dense and pruned under each policy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dense: int = Field(ge=0)
    original: int = Field(ge=0)
    contiguous: int = Field(ge=0)


class PositionEvidence(Measurement):
    """One measurement: the same needles, the same kept tokens, both policies.

    keep_rate: share of the prompt kept. tokens: lengths of the prompts.
    """

    target: str
    draft: str
    keep_rate: float
    tokens: tuple[int, ...]
    needles: int
    right: Right

    @property
    def better(self) -> Positions:
        """The policy with more right answers; `original`, the method's own, when they are even."""
        return "contiguous" if self.right.contiguous > self.right.original else "original"

    def words(self) -> str:
        """The figures in a sentence."""
        right = self.right
        return (
            f"of {self.needles} needles at keep {self.keep_rate:g} {self.target} answered"
            f" {right.contiguous} with contiguous positions, {right.original} with original ones"
            f" and {right.dense} unpruned"
        )


def evidence_for(fingerprint: str | None, *folders: Path) -> PositionEvidence | None:
    """What is known of the weights with this fingerprint; None, also where there is none.

    folders: where to look beside the user's own, which comes first, and what the package has.
    """
    if fingerprint is None:
        return None
    places = (own_folder(FOLDER), *folders, Path(__file__).parent)
    return find(PositionEvidence, fingerprint, *places)


def informed(support: PositionSupport, evidence: PositionEvidence | None) -> PositionSupport:
    """`support`, and what was measured of its weights."""
    if evidence is None:
        return support
    return replace(support, better=evidence.better, evidence=evidence.words())
