"""Measured position policies: found by the weights they were measured on."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_specprefill import SpecPrefill
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.measured import read
from trtllm_specprefill.models import Model
from trtllm_specprefill.target import evidence
from trtllm_specprefill.target.evidence import PositionEvidence, Right, evidence_for
from trtllm_specprefill.target.torch import TorchTarget


def measured(fingerprint: str, original: int, contiguous: int) -> PositionEvidence:
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


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(evidence, "own_folder", lambda _: tmp_path)
    return tmp_path


def test_the_policy_with_more_right_answers_is_better_and_even_ones_leave_the_methods_own() -> None:
    assert measured("a", 15, 17).better == "contiguous"
    assert measured("a", 17, 15).better == "original"
    assert measured("a", 17, 17).better == "original"


def test_a_measurement_of_ones_own_is_found_and_a_broken_file_is_passed_over(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (own / "0.json").write_text("{")
    (own / "1.json").write_text(measured("abc", 3, 20).model_dump_json())
    found = evidence_for("abc")
    assert found is not None
    assert found.words() == (
        "of 24 needles at keep 0.1 some-target answered 20 with contiguous positions,"
        " 3 with original ones and 23 unpruned"
    )
    assert "0.json" in caplog.text
    assert evidence_for("another") is None


@pytest.mark.model
def test_the_report_says_what_auto_went_by(own: Path, smollm2: Model, prose: str) -> None:
    for original, contiguous, chosen in ((1, 2, "contiguous"), (2, 1, "original")):
        one = measured(smollm2.fingerprint, original, contiguous)
        (own / "1.json").write_text(one.model_dump_json())
        pair = SpecPrefill(TorchDraft(smollm2), TorchTarget(smollm2))
        knobs = {"keep": 0.3, "threshold": 64, "min_keep_tokens": 0, "max_tokens": 1}
        report = pair.generate(prose[:3000], **knobs).report()
        assert report["positions"] == chosen
        assert one.words() in report["detail"]
        asked = pair.generate(prose[:3000], positions="original", **knobs).report()
        assert (asked["positions"], asked["detail"]) == ("original", "")


def test_what_ships_can_be_read() -> None:
    folder = Path(evidence.__file__).parent
    assert len([*read(PositionEvidence, folder)]) == len([*folder.glob("*.json")]) > 0
