"""Measured position policies: found by the weights they were measured on."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_build.description import describe
from tests.contracts import engine
from tests.target.conftest import KINDS, install, manifest_of
from tests.target.evidence import measured
from trtllm_specprefill import SpecPrefill
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.measured import read, write
from trtllm_specprefill.models import Model, load_model, local_fingerprint
from trtllm_specprefill.plan import PositionSupport, resolve_positions
from trtllm_specprefill.target import evidence
from trtllm_specprefill.target.evidence import FOLDER, PositionEvidence, evidence_for
from trtllm_specprefill.target.load import load_target
from trtllm_specprefill.target.manifest import Manifest
from trtllm_specprefill.target.torch import TorchTarget


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(evidence, "own_folder", lambda _: tmp_path / "own")
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


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
    assert evidence_for(None) is None


def test_what_lies_elsewhere_is_found_after_ones_own(own: Path, tmp_path: Path) -> None:
    beside = tmp_path / "engine"
    write(beside / "1.json", measured("abc", 3, 20))
    assert evidence_for("abc") is None
    assert evidence_for("abc", beside) == measured("abc", 3, 20)
    write(own / "1.json", measured("abc", 20, 3))
    assert evidence_for("abc", beside) == measured("abc", 20, 3)


def chosen(support: PositionSupport) -> str:
    plan = {"prompt_tokens": 1000, "max_tokens": 10, "shared_tokenizer": True}
    return resolve_positions("auto", support, **plan)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["own", "engine"])
def test_an_engine_goes_by_what_was_measured_of_the_model_it_was_built_from(
    own: Path,
    folder: Path,
    tmp_path: Path,
    kind: str,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(KINDS[kind], monkeypatch)
    monkeypatch.setattr(engine, "setup", engine.Setup(load_model(str(folder), "float32", "cpu")))
    built = tmp_path / "engine"
    built.mkdir()
    manifest_of(kind, model=str(folder)).write(built)
    describe(built)
    fingerprint = Manifest.read(built).fingerprint
    assert fingerprint is not None
    backend, *_ = kind.split()
    assert chosen(load_target(backend, str(built), timeout_s=60).position_support) == "original"
    for original, contiguous, expected in ((1, 2, "contiguous"), (2, 1, "original")):
        one = measured(fingerprint, original, contiguous)
        write((own if where == "own" else built / FOLDER) / "1.json", one)
        target = load_target(backend, str(built), timeout_s=60)
        assert target.position_support.honoured
        assert chosen(target.position_support) == expected
        assert target.position_support.evidence == one.words()
        target.close()


def test_an_endpoint_has_the_evidence_of_its_model_where_the_weights_are_here(
    own: Path, folder: Path
) -> None:
    url = "http://127.0.0.1:9/v1"
    assert load_target("endpoint", str(folder), url=url).position_support.better is None
    one = measured(local_fingerprint(str(folder)) or "", 3, 20)
    write(own / "1.json", one)
    support = load_target("endpoint", str(folder), url=url).position_support
    assert (support.better, support.evidence) == ("contiguous", one.words())


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
