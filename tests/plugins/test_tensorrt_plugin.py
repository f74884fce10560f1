"""The plugin under the decorators of TensorRT's own Python layer, over a stand-in native module."""

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plugins.importance.launch import INPUTS, LSE, OUTPUTS, POOL, SCALARS
from tests.plugins.layers import ROOT, Layer, interpreted, relative_error, run_grids

VERSIONS = ("10.14.1.48.post1", "11.4.0.106")
TENSORS = {
    "queries": "q_ptr",
    "keys": "k_ptr",
    "lengths": "lengths_ptr",
    "heads": "heads_ptr",
    "key_scale": "key_scale_ptr",
    "running": "running_ptr",
}
TYPES = {"FP16": torch.float16, "BF16": torch.bfloat16, "FP8": torch.float8_e4m3fn}
TRT_NAMES = {"FP16": "HALF", "BF16": "BF16", "FP8": "FP8"}
MOST_QUERIES = 12
PROBLEMS = [
    ("BF16", "BF16", 4, 2, 64, 13, False),
    ("FP16", "FP8", 3, 1, 80, 5, True),
    ("BF16", "FP8", 2, 2, 256, 17, False),
]


def fresh_layers(problem: tuple, count: int) -> list[Layer]:
    """Layers of random shapes for one compiled problem."""
    query_type, key_type, query_heads, kv_heads, d, pool, causal = problem
    layers = []
    for _ in range(count):
        b = int(torch.randint(1, 3, ()))
        w = int(torch.randint(1, MOST_QUERIES + 1, ()))
        n = int(torch.randint(1, 75 if d == 256 else 140, ()))  # two tiles of keys and a rest
        layers.append(
            Layer(
                torch.randn(b, query_heads, w, d).to(TYPES[query_type]),
                torch.randn(b, kv_heads, n, d).to(TYPES[key_type]),
                pool=pool,
                causal=causal,
                lengths=torch.randint(0, n + 1, (b,)).tolist(),
            )
        )
    return layers


def request_of(problem: tuple, layers: list[Layer]) -> dict:
    query_type, key_type, query_heads, kv_heads, d, pool, causal = problem
    shapes = [
        dict(zip("BWN", (len(x.lengths), x.queries.shape[2], x.keys.shape[2]), strict=True))
        for x in layers
    ]
    return {
        "query_type": TRT_NAMES[query_type],
        "key_type": TRT_NAMES[key_type],
        "sizes": {
            "Hq": query_heads,
            "Hkv": kv_heads,
            "D": d,
            "R": kv_heads,
            "G": query_heads // kv_heads,
        },
        "attributes": {"scale": d**-0.5, "pool": pool, "causal": causal, "splits": 2},
        "most_queries": MOST_QUERIES,
        "shapes": shapes,
    }


@pytest.fixture(scope="session", params=VERSIONS)
def bindings(request: pytest.FixtureRequest) -> Path:
    """The Python layer of one TensorRT version, from its wheel, kept between runs."""
    version = request.param
    folder = request.config.cache.mkdir("tensorrt-bindings") / version
    if not (folder / "tensorrt_bindings" / "plugin").is_dir():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["-q", "-d", str(folder), f"tensorrt-cu13-bindings=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no tensorrt-cu13-bindings {version} here: {done.stderr[-200:]}")
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder / "tensorrt_bindings"


def drive(bindings: Path, requests: list[dict]) -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.plugins.drive_plugin", str(bindings)],
        cwd=ROOT,
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def cases() -> list[tuple[tuple, list[Layer]]]:
    """Each problem with 17 random layers, the same for every version."""
    return [(problem, fresh_layers(problem, 17)) for problem in PROBLEMS]


@pytest.fixture(scope="session")
def grids_checked() -> list[list]:
    """Launches whose grids have been run; another version's equal ones need not be run again."""
    return []


def impossible() -> list[dict]:
    """Requests that TensorRT or the plugin must refuse."""
    mixed, odd, dynamic = (request_of(PROBLEMS[0], []) for _ in range(3))
    mixed["key_type"] = "HALF"
    odd["attributes"]["pool"] = 12
    dynamic["sizes"]["Hkv"] = "B"
    return [mixed, odd, dynamic]


@pytest.fixture(scope="session")
def answers(bindings: Path, cases: list) -> list[dict]:
    """What TensorRT would launch for the cases and, last, for the impossible requests."""
    return drive(bindings, [*(request_of(*case) for case in cases), *impossible()])


@pytest.fixture(scope="session")
def built(answers: list[dict], cases: list) -> list[tuple[tuple, list[Layer], dict]]:
    """The cases, and what TensorRT would launch for them."""
    return [(*case, found) for case, found in zip(cases, answers, strict=False)]


def test_arguments_are_what_the_compiled_kernels_take(built: list) -> None:
    for _, _, found in built:
        assert [layer["kernel"] for layer in found["layers"]] == [LSE, POOL]
        for layer in found["layers"]:
            kernel = layer["kernel"]
            named = ["parts_ptr" if x == "out0" else TENSORS[x] for x in layer["inputs"]]
            assert tuple(named) == INPUTS[kernel]
            passed = (*named, *SCALARS, *OUTPUTS[kernel])
            # The kernel's own signature, in the source and in the PTX handed to TensorRT.
            assert tuple(layer["source_parameters"]) == passed
            kinds = ["u32" if name in SCALARS else "u64" for name in passed]
            assert layer["parameters"] == kinds
            assert layer["ptx_is_text"]


def test_types_and_shapes_of_the_outputs(built: list) -> None:
    for problem, layers, found in built:
        lse, pool = found["layers"]
        rows, group = problem[3], problem[2] // problem[3]
        assert found["out_shape"] == [-1, -1, -1]
        for i, layer in enumerate(layers):
            b, _, w, _ = layer.queries.shape
            n = layer.keys.shape[2]
            assert lse["launches"][i]["output_shape"][:4] == [b, rows, group, w]
            assert pool["launches"][i]["output_shape"] == [b, w, n]
            for kernel in (lse, pool):
                assert kernel["launches"][i]["scalars"] == [n, w]
                warps = 8 if kernel is pool and problem[4] > 64 else 4
                assert kernel["launches"][i]["block"] == [32 * warps, 1, 1]
                assert 0 < kernel["launches"][i]["shared_memory"] <= 49_152
        expected = [["HALF", "HALF"], ["BF16", "BF16"], ["HALF", "FP8"], ["BF16", "FP8"]]
        assert [c[:2] for c in pool["combinations"]] == expected
        assert {x["output_type"] for x in (lse, pool)} == {"FLOAT"}


def test_tensorrt_refuses_mixed_16_bit_types_and_dynamic_heads(answers: list[dict]) -> None:
    errors = [found["error"] for found in answers[-3:]]
    assert "no implementation" in errors[0]
    assert "pool" in errors[1]
    assert "Hkv is dynamic" in errors[2]


def test_grids_write_every_element_exactly_once(built: list, grids_checked: list) -> None:
    launched = [[kernel["launches"] for kernel in found["layers"]] for _, _, found in built]
    if launched in grids_checked:
        return
    shapes = 0
    for _, layers, found in built:
        for i, layer in enumerate(layers):
            launches = {kernel["kernel"]: kernel["launches"][i] for kernel in found["layers"]}
            splits = launches[LSE]["output_shape"][4]
            problem = replace(layer.problem(), splits=splits, max_queries=MOST_QUERIES)
            out, stores = interpreted(
                run_grids,
                layer,
                problem,
                {kernel: tuple(x["grid"]) for kernel, x in launches.items()},
                {kernel: tuple(x["scalars"]) for kernel, x in launches.items()},
            )
            assert stores == {LSE: (1, 1), POOL: (1, 1)}
            assert relative_error(out, layer.float64()) <= 1e-2
            shapes += 1
    assert shapes >= 50
    grids_checked.append(launched)
