"""PTX and machine code for every target, made in processes where the compiler is on."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(
    "arguments",
    [
        ("--dim", "128", "--fp8-keys", "--causal"),
        ("--dim", "256", "--query-heads", "4", "--kv-heads", "1", "--pool", "17"),
        ("--dim", "80", "--query-type", "fp16", "--queries", "64", "--pool", "33"),
    ],
)
def test_other_shapes_keep_within_the_same_limits(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    for figure in figures(tmp_path, *arguments):
        assert figure["spilled_bytes_per_thread"] == 0
        assert figure["shared_memory_bytes"] <= SHARED_MEMORY_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("types", [("fp16",), ("bf16",), ("fp16", "--fp8-keys")])
def test_every_head_size_group_and_type_keeps_within_the_limits(
    tmp_path: Path, dim: int, group: int, types: tuple[str, ...]
) -> None:
    heads = ("--query-heads", str(2 * group), "--kv-heads", "2", "--dim", str(dim))
    built = figures(tmp_path, *heads, "--query-type", *types, "--queries", "64", "--sm", "80", "90")
    for figure in built:
        assert figure["spilled_bytes_per_thread"] == 0
        assert figure["shared_memory_bytes"] <= SHARED_MEMORY_LIMIT


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
