"""A measurement of positions, as `evaluation positions` writes one."""

from __future__ import annotations

from trtllm_specprefill.target.evidence import PositionEvidence, Right


def measured(fingerprint: str, original: int, contiguous: int) -> PositionEvidence:
    """That of 24 needles `original` and `contiguous` were found under either policy."""
    return PositionEvidence(
        target="some-target",
        draft="some-draft",
        fingerprint=fingerprint,
        keep_rate=0.1,
        tokens=(1500, 3000),
        needles=24,
        right=Right(dense=23, original=original, contiguous=contiguous),
        command="python -m trtllm_specprefill.evaluation positions",
    )
