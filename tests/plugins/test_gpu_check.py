"""The GPU script on a CPU: everything that it does but the timing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from perf import gpu_check
from tests.plugins.layers import ROOT
from trtllm_specprefill.importance import reference_importance


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pool", [1, 5, 13])
def test_its_float64_form_is_the_definition_of_importance(causal: bool, pool: int) -> None:
    torch.manual_seed(1)
    queries, keys = torch.randn(1, 6, 5, 64), torch.randn(1, 2, 40, 64)
    rows = gpu_check.reference(
        queries, keys, torch.zeros(1, 5, 40), [40], 0.125, pool, causal, None, torch.ones(2)
    )
    expected = reference_importance(
        [queries[0].numpy()], [keys[0].numpy()], 0.125, pool=pool, causal=causal
    )
    assert np.allclose(rows[0].mean(0).numpy(), expected, rtol=1e-12, atol=0)


def test_without_a_gpu_it_checks_small_cases_and_holds_no_time(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "perf/gpu_check.py", "--out", str(tmp_path)],
        cwd=ROOT,
        env=dict(os.environ, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert len(report["results"]) == len(gpu_check.SMALL) * len(gpu_check.TYPES)
    assert all(result["passed"] for result in report["results"])
    assert {result["types"] for result in report["results"]} == set(gpu_check.TYPES)
    assert "no GPU" in report["skipped"][0]
    assert "seconds" in report
    assert not [r for r in report["results"] if "milliseconds" in r]
    assert done.stdout.strip().splitlines()[-1].startswith("not run:")


def test_without_a_gpu_or_the_interpreter_it_says_what_to_set() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "perf/gpu_check.py"],
        cwd=ROOT,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "TRITON_INTERPRET=1" in done.stderr


def test_its_table_shows_failures_times_and_what_did_not_run() -> None:
    check = {"check": "correctness", "types": "bf16", "relative_error": 0.5, "passed": False}
    others = [
        {"check": "correctness", "types": types, "relative_error": 1e-7, "passed": True}
        for types in ("fp32", "fp16", "fp8")
    ]
    time = {
        "check": "time",
        "draft": "Llama-3.2-1B",
        "types": "bf16",
        "tokens": 8192,
        "milliseconds": 0.01,
        "share_of_floor": 0.5,
        "times_plain": 7.0,
    }
    text = gpu_check.table_of(
        {
            "device": "a GPU",
            "torch": "2",
            "triton": "3",
            "skipped": ["compute-sanitizer: not installed"],
            "results": [check, *others, time],
        }
    )
    lines = text.splitlines()
    assert any(line.startswith("bf16  0/1 cases") for line in lines)
    assert any(line.startswith("FAILED") for line in lines)
    assert any("Llama-3.2-1B" in line and "50%" in line and "7.0" in line for line in lines)
    assert lines[-1] == "not run: compute-sanitizer: not installed"
