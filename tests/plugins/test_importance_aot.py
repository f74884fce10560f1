"""PTX and machine code for every target, made in processes where the compiler is on."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.plugins.layers import ROOT, interpreted

TARGETS = (80, 86, 89, 90, 100, 120)
SHARED_MEMORY_LIMIT = 49_152


def build(out: Path, *arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, "-m", "plugins.importance", "build", "--out", str(out), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def figures(out: Path, *arguments: str) -> list[dict]:
    done = build(out, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((out / "figures.json").read_text())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Both kernels in the default shape, Llama-3.2-1B in bf16, for every target."""
    out = tmp_path_factory.mktemp("llama")
    return out, figures(out, "--sm", *map(str, TARGETS))


def test_ptx_and_cubin_for_every_target(llama: tuple[Path, list[dict]]) -> None:
    out, built = llama
    assert {(f["kernel"], f["sm"]) for f in built} == {
        (kernel, sm) for kernel in ("lse_kernel", "pool_kernel") for sm in TARGETS
    }
    for figure in built:
        stem = f"{figure['kernel']}.sm_{figure['sm']}"
        ptx = (out / f"{stem}.ptx").read_text()
        assert f".target sm_{figure['sm']}" in ptx
        assert ".version 8.7" in ptx
        assert (out / f"{stem}.cubin").read_bytes()[:4] == b"\x7fELF"


def test_nothing_spills_and_shared_memory_needs_no_opt_in(
    llama: tuple[Path, list[dict]],
) -> None:
    for figure in llama[1]:
        assert figure["spilled_bytes_per_thread"] == 0
        assert 0 < figure["shared_memory_bytes"] <= SHARED_MEMORY_LIMIT
        assert figure["registers_per_thread"] <= 255


def test_ptx_holds_no_path_of_the_machine_that_built_it(llama: tuple[Path, list[dict]]) -> None:
    for path in llama[0].glob("*.ptx"):
        text = path.read_text()
        assert ".file" not in text
        assert str(ROOT) not in text


BF16, FP16 = ("bf16", "bf16"), ("fp16", "fp16")
BF16_FP8, FP16_FP8 = ("bf16", "fp8"), ("fp16", "fp8")


def compiled(problems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the kernels of these problems use; two processes share the work."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.plugins.compile_problems"]

    def run(share: list[dict[str, Any]]) -> str:
        lines = "\n".join(json.dumps(problem) for problem in share)
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            input=lines,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(run, [problems[::2], problems[1::2]]))
    return [json.loads(line) for output in outputs for line in output.splitlines()]


def assert_within_limits(built: list[dict[str, Any]]) -> None:
    over = [f for f in built if f["stack"] or f["shared_memory"] > SHARED_MEMORY_LIMIT]
    assert not over


def test_other_shapes_keep_within_the_same_limits() -> None:
    llama, default = {"kv_heads": 8, "group": 4}, {"queries": 8, "pool": 13, "causal": False}
    problems: list[dict[str, Any]] = [
        {"sm": [80, 90], "dim": 128, "types": BF16, **llama, **default},
        {"sm": [80, 90], "dim": 256, "types": FP16, "kv_heads": 2, "group": 1, **default},
        {"sm": [90], "dim": 128, "types": BF16_FP8, **llama, **default, "causal": True},
        {"sm": [90], "dim": 256, "types": BF16, "kv_heads": 1, "group": 4, **default, "pool": 17},
        {"sm": [90], "dim": 80, "types": FP16, **llama, "queries": 64, "pool": 33, "causal": False},
        # What spilled once: 256 dimensions on one head a group, and three heads on sm_120.
        {"sm": [80], "dim": 256, "types": FP16_FP8, "kv_heads": 2, "group": 1, **default},
        {"sm": [120], "dim": 96, "types": BF16_FP8, "kv_heads": 2, "group": 3, **default},
    ]
    built = compiled(problems)
    assert len(built) == 2 * 9
    assert_within_limits(built)


FULL = {
    "sm": TARGETS,
    "dim": (64, 80, 96, 128, 256),
    "types": (FP16, BF16, FP16_FP8, BF16_FP8),
}
PAIRWISE = {
    "group": (1, 3, 8, 16),
    "kv_heads": (1, 2, 8),  # which sets the number of splits: 128, 128, 32
    "queries": (1, 8, 64),
    "pool": (1, 13, 0),
    "causal": (False, True),
}


def pairs_of(problem: dict[str, Any]) -> set[tuple[Any, ...]]:
    return {(a, problem[a], b, problem[b]) for a, b in combinations(problem, 2)}


def covering() -> list[dict[str, Any]]:
    """A problem for every triple of the axes in FULL, and one at least for every pair of values.

    Each takes, of some random choices for the other axes, the one with the most pairs that no
    problem before it has.
    """
    rng = Random(4)
    problems: list[dict[str, Any]] = []
    met: set[tuple[Any, ...]] = set()
    for triple in product(*FULL.values()):
        fixed = dict(zip(FULL, triple, strict=True))
        choices = [
            fixed | {axis: rng.choice(values) for axis, values in PAIRWISE.items()}
            for _ in range(40)
        ]
        best = max(choices, key=lambda problem: len(pairs_of(problem) - met))
        met |= pairs_of(best)
        problems.append(best)
    return problems


def test_the_sweep_meets_every_pair_of_values() -> None:
    axes = FULL | PAIRWISE
    wanted = {(a, x, b, y) for a, b in combinations(axes, 2) for x in axes[a] for y in axes[b]}
    assert set().union(*map(pairs_of, covering())) == wanted


@pytest.mark.slow
def test_every_target_head_size_and_type_keeps_within_the_limits() -> None:
    problems = [{**problem, "sm": [problem["sm"]]} for problem in covering()]
    built = compiled(problems)
    assert len(built) == 2 * 6 * 5 * 4
    assert_within_limits(built)


def test_a_kernel_too_big_for_a_plugin_is_refused(tmp_path: Path) -> None:
    done = build(tmp_path, "--dim", "256", "--query-type", "fp32")
    assert done.returncode != 0
    assert "shared memory" in done.stderr


def test_compiling_under_the_interpreter_says_what_to_do(tmp_path: Path) -> None:
    done = build(tmp_path, interpret=True)
    assert done.returncode != 0
    assert "unset" in done.stderr


def without_scratch(ptx: str, count: int) -> str:
    from plugins.importance import aot

    return aot._without_scratch(ptx, count)


PTX = """.version 8.7
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0,
	.param .u32 k_param_1,
	.param .u64 .ptr .global .align 1 k_param_2
)
.reqntid 128
{
	ld.param.b64 	%rd1, [k_param_0];
}
"""


def test_only_parameters_that_the_kernel_leaves_alone_are_taken_off() -> None:
    stripped = interpreted(without_scratch, PTX, 2)
    assert "k_param_1\n)" in stripped
    assert "k_param_2" not in stripped
    used = PTX.replace("[k_param_0]", "[k_param_2]")
    with pytest.raises(RuntimeError, match="scratch"):
        interpreted(without_scratch, used, 2)
