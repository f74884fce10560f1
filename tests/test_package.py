"""What is built from this checkout works outside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_public_name_is_found_where_it_is_said_to_be() -> None:
    import trtllm_specprefill as library

    assert {n for names in library._HOMES.values() for n in names} == set(library.__all__)
    for name in library.__all__:
        assert getattr(library, name).__module__.startswith("trtllm_specprefill.")
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        library.Nothing  # noqa: B018


def test_the_op_needs_nothing_beside_torch_and_numpy() -> None:
    """`perf/gpu_check.py` runs where the library's other requirements are not installed."""
    code = """
import sys
for name in ("pydantic", "transformers", "regex", "gguf", "typer", "jinja2.sandbox"):
    sys.modules[name] = None
import plugins.importance, trtllm_specprefill.importance
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


def test_a_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    # Setuptools leaves `build/` in the folder that it builds from.
    source = tmp_path / "source"
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "shared")
    shutil.copytree(ROOT, source, ignore=left_out)
    subprocess.run([*build, str(source)], check=True, capture_output=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("trtllm_specprefill-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert "trtllm_specprefill/py.typed" in names
    assert "trtllm_specprefill/evaluation/questions.json" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests", "perf")) for name in names)

    environment = {**os.environ, "PYTHONPATH": str(site)}
    assert "plugins/importance/kernels.py" in names
    where = (
        "import trtllm_specprefill as s, plugins.importance.launch as p;"
        "print(s.__file__); print(p.__file__); s.Settings.of(keep_rate=0.1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", where],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert all(line.startswith(str(site)) for line in done.stdout.split())
    assert len(done.stdout.split()) == 2
    command = [sys.executable, "-m", "trtllm_specprefill.cli", "run", "--keep", "2"]
    done = subprocess.run(
        [*command, "--prompt", "x"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 2
    assert "keep_rate" in done.stderr
