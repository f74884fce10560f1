"""The recordings themselves: where they are from, and that a difference from them is found."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contracts import refresh
from tests.target.conftest import install

HERE = Path(__file__).parent
SOURCE = re.compile(r"^(sources: |    )((?:cpp|tensorrt_llm)/[\w/]+\.(?:py|cpp))\b(.*)", re.M)
COMMIT = re.compile(r" @ [0-9a-f]{40}\b")
VERSIONS = ("recorded_1_2", "recorded_1_4")


def without_commit(text: str) -> list[str]:
    """The public files that a module names as its sources, but not at which commit."""
    return [file for _, file, rest in SOURCE.findall(text) if not COMMIT.match(rest)]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_module_that_records_something_names_a_public_file_and_its_commit(
    version: str,
) -> None:
    for path in [*(HERE / version).rglob("*.py"), HERE / "llm_jobs.py"]:
        text = path.read_text(encoding="utf-8")
        if "\nclass " in text or "sources:" in text:
            assert SOURCE.search(text), path
            assert not without_commit(text), path


@pytest.mark.parametrize("rest", ["", " @ 1f064c4", ", stored version 2426014580", " @ main"])
def test_a_source_without_the_whole_commit_is_found(rest: str) -> None:
    file = "tensorrt_llm/llmapi/llm.py"
    assert without_commit(f'"""A class.\n\nsources:\n    {file}{rest}\n"""') == [file]
    assert without_commit(f'"""A class.\n\nsources: {file}{rest}\n"""') == [file]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_recordings_agree_with_themselves(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(version, monkeypatch)
    assert not list(refresh.differences(version))
    assert len(list(refresh.recorded(version))) >= 6


@pytest.mark.parametrize("version", VERSIONS)
def test_what_stands_behind_the_recordings_is_not_compared(version: str) -> None:
    """Constructors that take the engine of these tests, of objects that no adapter makes."""
    found = {entry.name: entry.methods for entry in refresh.recorded(version)}
    assert "_result_step" in found["GenerationResult"]
    assert "__init__" not in found["GenerationResult"]
    assert not found["TorchLlmArgs"]
    assert not [methods for methods in found.values() if "runs" in str(methods)]


def test_the_llm_of_1_2_has_no_front_door_for_positions_and_1_4_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not hasattr(install("recorded_1_2", monkeypatch).llmapi.llm, "PreprocessedInputs")
    assert hasattr(install("recorded_1_4", monkeypatch).llmapi.llm, "PreprocessedInputs")


def test_what_is_gone_and_what_is_new_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trtllm = install("recorded_1_2", monkeypatch)
    executor = trtllm.bindings.executor

    def newer(self: Any, input_token_ids: Any, max_tokens: int, *, priority: int) -> None: ...

    monkeypatch.setattr(executor.Request, "__init__", newer)
    monkeypatch.delattr(executor, "KvCacheConfig")
    assert refresh.main() == 1
    lines = capsys.readouterr().out
    assert "Request.__init__(position_ids=): gone" in lines
    assert "KvCacheConfig" in lines
    monkeypatch.undo()


def test_native_signatures_are_read_from_their_docstrings() -> None:
    class Native:
        """As nanobind documents one."""

        __doc__ = "enqueue_request(self, request: tensorrt_llm.Request) -> int"

        def __call__(self, *args: Any, **kwargs: Any) -> None: ...

    assert refresh.arguments(Native()) == {"request"}


def test_without_tensorrt_llm_the_targets_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.target.conftest import manifest_of
    from tests.test_judges import Spelling, random_model
    from trtllm_specprefill.errors import InputError
    from trtllm_specprefill.models import EngineModel
    from trtllm_specprefill.target.trtllm_executor import ExecutorTarget
    from trtllm_specprefill.target.trtllm_llm import LLMTarget

    for name in [n for n in sys.modules if n.split(".")[0] == "tensorrt_llm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)  # what an import of nothing finds
    small = random_model("llama", Spelling())
    model = EngineModel("small", small.tokenizer, small.config, frozenset({1}))
    with pytest.raises(InputError, match=r"pip install tensorrt-llm==1\.2\.1"):
        ExecutorTarget("engine", model, manifest_of("trtllm_executor"))
    with pytest.raises(InputError, match=r"pip install tensorrt-llm==1\.2\.1"):
        LLMTarget("checkpoint", model, manifest_of("trtllm_llm"))
