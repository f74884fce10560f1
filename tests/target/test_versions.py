"""An engine that the installed TensorRT-LLM cannot run is refused before it is asked anything."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contracts import engine
from tests.target.conftest import KINDS, Maker, install, manifest_of
from trtllm_specprefill.errors import InputError, TargetFailed


@pytest.mark.parametrize(
    ("kind", "built", "installed", "words"),
    [
        ("trtllm_executor", "1.2.1", "1.2.1", None),
        ("trtllm_executor", "1.2.1", "1.2.1.post1+cu13", None),
        ("trtllm_executor", "1.2.1", "1.2.0", r"1\.2\.0.*1\.2\.1, which built"),
        ("trtllm_executor", "1.2.1", "1.3.0rc12", r"1\.3\.0rc12.*1\.2\.1, which built"),
        ("trtllm_executor", "1.3.0rc12", "1.3.0rc12", None),
        ("trtllm_executor", "1.2", "1.2.1", r"1\.2, which built"),  # says too little
        ("trtllm_llm", "1.2", "1.2.0", None),
        ("trtllm_llm", "1.2", "1.3.0rc29", None),
        ("trtllm_llm", "1.2.1", "1.2.0", None),
        ("trtllm_llm", "1.2", "1.4.0rc1", None),
        ("trtllm_llm", "1.2", "1.1.0", r"1\.1\.0.*1\.2 to 1\.4"),
        ("trtllm_llm", "1.3.0rc4", "1.2.1", r"1\.2\.1.*1\.3\.0rc4 to 1\.4"),
        ("trtllm_llm", "1.2", "1.5.0rc1", r"1\.5\.0rc1.*1\.2 to 1\.4"),
        ("trtllm_llm", "1.2", "2.0", r"2\.0.*1\.2 to 1\.4"),
        ("trtllm_llm", "1.2", "local", r"local.*1\.2 to 1\.4"),
    ],
)
def test_the_manifest_says_in_which_versions_it_runs(
    kind: str, built: str, installed: str, words: str | None
) -> None:
    manifest = manifest_of(kind, tensorrt_llm=built)
    if words is None:
        manifest.check_version(installed)
        return
    with pytest.raises(InputError, match=rf"^tensorrt_llm: .*{words}"):
        manifest.check_version(installed)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_of_another_version_is_never_started(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install(KINDS[kind], monkeypatch), "__version__", "1.1.0")
    monkeypatch.setattr("tests.target.conftest.install", lambda *_: None)  # it stays that one
    maker = Maker(kind, monkeypatch)
    with pytest.raises(InputError, match=r"^tensorrt_llm: .*1\.1\.0"):
        maker()
    assert engine.setup is not None
    assert not engine.setup.engines


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_does_not_start_is_a_target_failure_in_its_own_words(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("Serialization assertion stdVersionRead == kSERIALIZATION_VERSION")

    monkeypatch.setattr(engine, "started", fails)
    with pytest.raises(TargetFailed, match=r"^target llama: .*stdVersionRead") as failed:
        Maker(kind, monkeypatch)()
    assert isinstance(failed.value.__cause__, RuntimeError)
