"""What a profile export says, from one that perf_analyzer 2.51 wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from perf.analyzer import Analyzer, AnalyzerFailed, load, read_profile

RECORDED = Path(__file__).with_name("profile_export.json")


def test_a_recorded_export_is_read_as_what_its_clients_saw() -> None:
    seen = read_profile(RECORDED)
    assert [json.loads(one.inputs["messages"])[0]["content"] for one in seen] == [
        "Prompt 0",
        "Prompt 1",
        "Prompt 2",
    ]
    for one in seen:
        assert one.text == "This is a topic that requires a deep"
        assert len(one.arrivals) == one.report["output_tokens"] == 8
        assert one.report["reason"] == "pruned"
        # The client's clock holds the server's and the way there and back.
        assert one.report["ttft_s"] < one.ttft_s < one.report["ttft_s"] + 0.2
        assert one.token_gap_s == pytest.approx((one.arrivals[-1] - one.arrivals[0]) / 7)
    # In nanoseconds since the epoch, as recorded.
    assert seen[0].ttft_s == pytest.approx((6861183563 - 6170564301) / 1e9)


def test_an_answer_of_one_token_has_no_gap(tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text())
    request = recorded["experiments"][0]["requests"][0]
    report = {"ttft_s": 0.1, "output_tokens": 1}
    request["response_outputs"] = [{"text_output": "", "report": json.dumps(report)}]
    request["response_timestamps"] = request["response_timestamps"][:1]
    recorded["experiments"][0]["requests"] = [request]
    path = tmp_path / "one.json"
    path.write_text(json.dumps(recorded))
    (seen,) = read_profile(path)
    assert seen.token_gap_s is None
    assert seen.arrivals == (seen.ttft_s,)


@pytest.mark.parametrize("text", ["", "{}", '{"experiments": []}', '{"experiments": [{}]}'])
def test_a_file_that_is_no_export_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(AnalyzerFailed, match=r"profile\.json: not a profile export"):
        read_profile(path)


def test_a_request_without_an_answer_is_refused(tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text())
    for outputs in recorded["experiments"][0]["requests"][0]["response_outputs"]:
        outputs["report"] = ""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(recorded))
    with pytest.raises(AnalyzerFailed, match="without a report"):
        read_profile(path)


def test_what_perf_analyzer_complains_of_is_passed_on(tmp_path: Path) -> None:
    script = tmp_path / "perf_analyzer"
    script.write_text("#!/bin/sh\necho 'Thread [0] had error: keep_rate: 7'\necho\nexit 99\n")
    script.chmod(0o755)
    with pytest.raises(AnalyzerFailed, match="keep_rate: 7"):
        load(Analyzer(str(script), "2", {}), "127.0.0.1:1", [{"text_input": "a"}], 1, 1)


def test_a_server_that_goes_away_ends_the_wait(tmp_path: Path) -> None:
    """perf_analyzer itself waits for ever."""
    sleep = shutil.which("sleep")
    script = tmp_path / "perf_analyzer"
    script.write_text(f"#!/bin/sh\nexec {sleep} 600\n")
    script.chmod(0o755)
    with pytest.raises(AnalyzerFailed, match="went away"):
        load(Analyzer(str(script), "2", {}), "127.0.0.1:1", [{"text_input": "a"}], 1, 1)
