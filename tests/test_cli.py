"""The command line: a mistake is one line and exit code 2, an answer is one JSON object."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trtllm_specprefill import SpecPrefill, cli
from trtllm_specprefill.endings import EXIT_CODES
from trtllm_specprefill.errors import TargetFailed, UnsupportedModel


def specprefill(
    *arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["specprefill", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: specprefill(*arguments, monkeypatch=monkeypatch, capsys=capsys)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text("A short document about a lighthouse. Its keeper is called Ada.\n" * 12)
    return path


def write(tmp_path: Path, name: str, value: Any) -> str:
    path = tmp_path / name
    if isinstance(value, bytes):
        path.write_bytes(value)
    else:
        path.write_text(json.dumps(value))
    return str(path)


def assert_one_line(code: int, out: str, err: str, *words: str) -> None:
    lines = [line for line in err.splitlines() if line.startswith("specprefill: ")]
    assert code == 2, err
    assert len(lines) == 1, err
    assert "Traceback" not in err
    assert out == ""
    for word in (*words, "allowed"):
        assert word in lines[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--keep", "0"), ("keep_rate", "0.0", "> 0 and <= 1")),
        (("--keep", "1.5"), ("keep_rate", "1.5", "> 0 and <= 1")),
        (("--keep", "nan"), ("keep_rate",)),
        (("--keep", "0.1", "--keep-tokens", "9"), ("keep_rate and keep_tokens", "only one")),
        (("--keep-tokens", "0"), ("keep_tokens", ">= 1")),
        (("--coverage", "-1"), ("coverage", "-1.0")),
        (("--positions", "absolute"), ("positions", "absolute", "auto, original or contiguous")),
        (("--max-tokens", "0"), ("max_tokens", ">= 1")),
        (("--temperature", "-0.1"), ("temperature", "-0.1")),
        (("--top-p", "0"), ("top_p",)),
        (("--stop", ""), ("stop",)),
        (("--set", "chunk_tokens=0"), ("chunk_tokens", ">= 1")),
        (("--set", "pool=4"), ("pool", "odd")),
        (("--set", "chunks=4"), ("chunks", "chunk_tokens")),
        (("--set", "pool"), ("--set", "NAME=VALUE")),
        (("--set", "separator=...", "--positions", "original"), ("separator",)),
    ],
)
def test_a_bad_setting_is_named_before_any_model_is_loaded(
    run: Any,
    document: Path,
    options: tuple[str, ...],
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SpecPrefill, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    assert_one_line(*run("run", "--prompt", str(document), *options), *words)


@pytest.mark.parametrize("command", ["run", "score"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ("prompt", "--messages, --prompt, or --context")),
        (("--context", "x"), ("--question",)),
        (("--prompt", "x", "--context", "y"), ("--prompt and --context",)),
        (("--prompt", "/no/such/file"), ("--prompt", "/no/such/file")),
        (("--messages", "/no/such/file"), ("--messages", "/no/such/file")),
    ],
)
def test_a_missing_or_doubled_prompt_is_named(
    run: Any, command: str, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_one_line(*run(command, *options), *words)


def test_a_file_that_is_not_utf8_is_named(run: Any, tmp_path: Path) -> None:
    bad = write(tmp_path, "latin1.txt", "naïve".encode("latin-1"))
    assert_one_line(*run("run", "--prompt", bad), "--prompt", "latin1.txt", "UTF-8")
    assert_one_line(*run("run", "--messages", bad), "--messages", "latin1.txt", "UTF-8")


def test_stdin_that_is_not_utf8_is_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\xfa")))
    assert_one_line(*run("run", "--prompt", "-"), "--prompt", "UTF-8")


def test_messages_that_are_not_json_are_named(run: Any, tmp_path: Path) -> None:
    assert_one_line(
        *run("run", "--messages", write(tmp_path, "m.json", b"[{]")), "--messages", "JSON"
    )
    assert_one_line(*run("run", "--messages", write(tmp_path, "m.json", {"role": "user"})), "list")


def test_an_unknown_model_is_named(run: Any, document: Path) -> None:
    assert_one_line(
        *run("run", "--prompt", str(document), "--target", "smollm3"), "target: ", "smollm3"
    )


def test_a_gguf_that_is_not_one_is_named(run: Any, document: Path, tmp_path: Path) -> None:
    fake = write(tmp_path, "weights.gguf", b"not a model at all")
    assert_one_line(*run("run", "--prompt", str(document), "--target", fake), "target: ", "GGUF")


CONFIG = next((Path(__file__).parent / "engine_build" / "configs").iterdir())


@pytest.mark.parametrize("name", ["draft", "target"])
@pytest.mark.parametrize(
    ("command", "field"),
    [
        (("run", "--prompt", "DOCUMENT"), "{}: "),
        (("score", "--prompt", "DOCUMENT", "--draft", str(CONFIG)), "{}: "),
        (("plan-capacity", "--draft", str(CONFIG), "--target", str(CONFIG)), "{}: "),
        (("serve", "--dry-run"), "{}.model: "),
    ],
)
def test_a_wrong_model_is_named_by_its_option_or_setting(
    run: Any, document: Path, command: tuple[str, ...], field: str, name: str
) -> None:
    arguments = [str(document) if part == "DOCUMENT" else part for part in command]
    told = run(*arguments, f"--{name}", "nonsense")
    assert_one_line(*told, f"specprefill: {field.format(name)}got 'nonsense', allowed: ")


def test_wrong_settings_of_a_draft_alone_are_named_as_its_own(run: Any) -> None:
    options = ("plan-capacity", "--draft", str(CONFIG), "--target", str(CONFIG))
    for option, value in (("draft_gpus", "-1"), ("draft_precision", "int4")):
        told = run(*options, f"--{option.replace('_', '-')}", value)
        assert_one_line(*told, f"specprefill: {option}: got ")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("run", "--keep", "much"), "--keep: got 'much', allowed: a number"),
        (("run", "--max-tokens", "1.5"), "--max-tokens: got '1.5', allowed: a whole number"),
        (("calibrate-heads", "--tokens", "3"), "--tokens: got '3', allowed: a whole number >= 500"),
        (("calibrate-heads", "--slack", "-1"), "--slack: got '-1', allowed: a number >= 0.0"),
        (("serve", "--http-port", "x"), "--http-port: got 'x', allowed: a whole number"),
    ],
)
def test_an_option_of_a_wrong_type_or_range_is_told_as_a_setting_is(
    run: Any, options: tuple[str, ...], line: str
) -> None:
    assert_one_line(*run(*options), f"specprefill: {line}")


@pytest.mark.parametrize(
    "options", [("nonsense",), ("run", "--nonsense"), ("plan-capacity",), ("settings", "nonsense")]
)
def test_a_misused_command_ends_with_2_and_a_hint(run: Any, options: tuple[str, ...]) -> None:
    code, out, err = run(*options)
    assert (code, out) == (2, "")
    assert "--help' for help" in err


PROMPT = ("--prompt", "/no/such/file")


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (("run", *PROMPT), "--prompt", "/no/such/file"),
        (("run", *PROMPT, "--keep", "2"), "keep_rate", 2.0),
        (("run", *PROMPT, "--keep", "nan"), "keep_rate", "nan"),  # JSON has no NaN
        (("run", *PROMPT, "--keep", "much"), "--keep", "much"),
        (("run", *PROMPT, "--stop", ""), "stop", [""]),
        (("run", *PROMPT, "--nonsense"), "--nonsense", None),
        (("score", *PROMPT, "--keep-tokens", "0"), "keep_tokens", 0),
        (("plan-capacity", "--draft", "nonsense", "--target", "nonsense"), "target", "nonsense"),
        (("plan-capacity",), "--draft", None),
        (("client", *PROMPT), "--prompt", "/no/such/file"),
        (("client",), "prompt", None),
        (("settings", "nonsense"), None, None),
        (("nonsense",), None, None),
    ],
)
def test_with_json_an_error_is_an_object_on_stdout_with_the_same_exit_code(
    run: Any, options: tuple[str, ...], field: str | None, value: Any
) -> None:
    code, out, err = run(*options, "--json")
    error = json.loads(out)["error"]
    assert (code, err) == (2, "")
    assert set(error) == {"field", "value", "allowed", "message"}
    assert (error["field"], error["value"]) == (field, value)
    assert error["message"]
    assert run(*options)[0] == code
    if error["allowed"]:
        assert error["message"].endswith(f"allowed: {error['allowed']}")


def test_a_failure_while_working_ends_with_1(
    run: Any, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(error: Exception) -> Any:
        def load(*_: Any, **__: Any) -> None:
            raise error

        return load

    options = ("run", "--prompt", str(document))
    for error in (TargetFailed("out of memory"), OSError(28, "No space left")):
        monkeypatch.setattr(SpecPrefill, "from_pretrained", failing(error))
        assert run(*options) == (1, "", f"specprefill: {error}\n")
        code, out, err = run(*options, "--json")
        told = {"field": None, "value": None, "allowed": None, "message": str(error)}
        assert (code, json.loads(out), err) == (1, {"error": told}, "")
    monkeypatch.setattr(SpecPrefill, "from_pretrained", failing(UnsupportedModel("mamba")))
    assert run(*options)[0] == 2  # another model mends it


def test_a_fault_of_ours_shows_its_traceback_and_is_an_object_with_json(
    document: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(SpecPrefill, "from_pretrained", load)
    for as_json in ((), ("--json",)):
        monkeypatch.setattr(
            sys, "argv", ["specprefill", "run", "--prompt", str(document), *as_json]
        )
        with pytest.raises(ZeroDivisionError):  # which Python shows, and ends with 1
            cli.main()
    assert json.loads(capsys.readouterr().out)["error"]["message"] == "a fault"


def test_the_help_and_the_docs_state_the_exit_codes(run: Any) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert EXIT_CODES in " ".join(out.split())
    page = (Path(__file__).parent.parent / "docs" / "commands.md").read_text("utf-8")
    for number in ("0", "1", "2"):
        assert f"| {number} | " in page


@pytest.mark.parametrize("command", ["run", "score"])
def test_every_command_has_help_with_an_example(run: Any, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"Example: specprefill {command}" in " ".join(out.split())


@pytest.mark.model
class TestWithModels:
    def test_an_empty_prompt_and_one_of_a_single_token_are_named(
        self, run: Any, tmp_path: Path
    ) -> None:
        for text in (b"", b"a"):
            path = write(tmp_path, "prompt.txt", text)
            assert_one_line(*run("run", "--prompt", path), "prompt", "at least 2 tokens")

    @pytest.mark.parametrize(
        ("message", "field"),
        [
            ({"role": "user"}, "messages[0].content"),
            ({"role": "user", "content": 7}, "messages[0].content"),
            (
                {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
                "messages[0].content[0]",
            ),
            (
                {"role": "assistant", "tool_calls": [{"function": "look_up"}]},
                "messages[0].tool_calls[0].function",
            ),
            (
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                },
                "messages[0].tool_calls[0].function.arguments",
            ),
            (
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
                "messages[0].tool_calls",  # SmolLM2's template drops tool calls without a word
            ),
        ],
    )
    def test_a_malformed_message_is_named(
        self, run: Any, tmp_path: Path, message: dict[str, Any], field: str
    ) -> None:
        path = write(tmp_path, "m.json", [message])
        assert_one_line(*run("run", "--messages", path), f"{field}: ")

    def test_an_unknown_role_is_named(self, run: Any, tmp_path: Path) -> None:
        path = write(tmp_path, "m.json", [{"role": "robot", "content": "hello"}])
        assert_one_line(*run("run", "--messages", path), "messages[0].role", "robot", "assistant")

    def test_a_prompt_too_long_even_after_pruning_is_named(
        self, run: Any, tmp_path: Path, prose: str
    ) -> None:
        path = write(tmp_path, "long.txt", prose[:60_000].encode())
        assert_one_line(
            *run("run", "--prompt", path, "--keep", "0.1", "--set", "scoring=lookahead"),
            *("prompt", "8192", "draft smollm2-135m"),
        )

    def test_run_prints_one_json_object_with_everything_in_it(
        self, run: Any, document: Path
    ) -> None:
        code, out, err = run(
            "run",
            *("--context", str(document), "--question", "Who keeps the lighthouse?"),
            *("--keep", "0.7", "--threshold", "0", "--set", "min_keep_tokens=0"),
            *("--max-tokens", "8", "--compare", "--json"),
        )
        assert code == 0, err
        report = json.loads(out)
        assert report["reason"] == "pruned"
        assert report["finish_reason"] in ("stop", "length")
        assert 0 < report["kept_tokens"] <= 0.7 * report["prompt_tokens"]
        assert report["keep_rate"] == report["kept_tokens"] / report["prompt_tokens"]
        assert report["settings"]["keep_rate"] == 0.7
        assert report["settings"]["chunk_tokens"] == 32
        assert report["settings"]["max_tokens"] == 8
        assert report["ttft_s"] > 0
        assert report["decode_tokens_per_s"] > 0
        assert set(report["kept_spans"][0]) == {"start", "end", "rule"}
        assert report["dense"]["text"]
        assert report["speedup"] == report["dense"]["ttft_s"] / report["ttft_s"]
        assert "target_prefill" in report["stages"]

    def test_run_streams_to_a_person(self, run: Any, document: Path) -> None:
        code, out, err = run(
            "run", "--context", str(document), "--question", "Who?", "--max-tokens", "6"
        )
        assert code == 0, err
        assert out.strip()
        assert "below_threshold" in err
        assert "TTFT" in err

    def test_score_gives_every_token_and_span_its_importance(
        self, run: Any, document: Path
    ) -> None:
        options = ("--prompt", str(document), "--keep", "0.6", "--set", "min_keep_tokens=0")
        code, out, err = run("score", *options, "--json")
        assert code == 0, err
        report = json.loads(out)
        assert len(report["tokens"]) == report["prompt_tokens"]
        assert all(token["importance"] >= 0 for token in report["tokens"])
        assert 0 < report["queries"] <= 32  # the question's tokens, at most the default's votes
        text = document.read_text()
        for span in report["kept_spans"]:
            assert span["text"] == text[span["start"] : span["end"]]
        code, out, _ = run("score", *options)
        assert code == 0
        assert "tokens kept" in out


def test_the_installed_command_ends_without_a_traceback(document: Path) -> None:
    command = [sys.executable, "-m", "trtllm_specprefill.cli", "run"]
    done = subprocess.run(
        [*command, "--prompt", str(document), "--keep", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.strip().count("\n") == 0
    assert "keep_rate" in done.stderr


def test_the_reference_of_settings_is_what_the_command_prints(run: Any) -> None:
    code, out, _ = run("settings")
    page = Path(__file__).parent.parent / "docs" / "settings.md"
    assert code == 0
    assert page.read_text("utf-8").split("\n\n", 2)[2].strip() == out.strip()
    _, listed, _ = run("settings", "--json")
    assert {row["name"] for row in json.loads(listed)} >= {"keep_rate", "draft_tail", "top_p"}


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--prompt", "a.txt", "--messages", "b.json"),
        ("--context", "a.txt"),
        ("--question", "Who?"),
        ("--prompt", "a.txt", "--question", "Who?"),
    ],
)
def test_a_client_asks_for_one_prompt(run: Any, options: tuple[str, ...]) -> None:
    assert_one_line(*run("client", *options), "--context")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seed", "-1"), "seed: got -1, allowed: a whole number from 0 to 2**63 - 1"),
        (("--max-tokens", "0"), "max_tokens: got 0, allowed: a whole number >= 1"),
        (("--max-tokens", "3000000000"), "max_tokens: got 3000000000, allowed: at most 2147483647"),
        (("--temperature", "-1"), "temperature: got -1.0, allowed: a number from 0 to 10"),
        (("--stop", ""), "stop: got ('',), allowed: a list of texts, none of them empty"),
        (("--keep", "2"), "keep_rate: got 2.0, allowed: a number > 0 and <= 1"),
        (("--url", "nowhere"), "--url: got 'nowhere', allowed: host:port"),
        (("--url", "http://127.0.0.1:8001"), "--url: got 'http://127.0.0.1:8001', allowed: "),
    ],
)
def test_a_client_refuses_what_no_server_would_take(
    run: Any, document: Path, options: tuple[str, ...], words: str
) -> None:
    pytest.importorskip("tritonclient.grpc")
    assert_one_line(*run("client", "--prompt", str(document), *options), f"specprefill: {words}")


def test_a_client_of_a_server_that_is_down_ends_with_1(run: Any, document: Path) -> None:
    pytest.importorskip("tritonclient.grpc")
    code, out, err = run("client", "--prompt", str(document), "--url", "127.0.0.1:1")
    assert (code, out) == (1, "")
    assert "specprefill: 127.0.0.1:1: " in err


def test_a_place_that_cannot_be_written_to_is_named_before_the_work(
    run: Any, document: Path
) -> None:
    folder = str(document.parent)
    assert_one_line(*run("calibrate-heads", "--out", folder), "out: ", folder)
    assert_one_line(*run("calibrate-heads", "--out", f"{document}/heads.json"), "out: ")
    assert_one_line(*run("serve", "--dry-run", "--repository", str(document)), "repository: ")


def test_a_host_that_does_not_exist_is_named(run: Any) -> None:
    assert_one_line(*run("serve", "--host", "999.1.1.1"), "ports.host: ", "999.1.1.1")


def test_a_dry_run_refuses_a_folder_without_a_model(run: Any, tmp_path: Path) -> None:
    assert_one_line(*run("serve", "--dry-run", "--draft", str(tmp_path)), "config.json")


def test_a_capacity_beyond_the_targets_positions_is_refused(run: Any) -> None:
    configs = Path(__file__).parent / "engine_build" / "configs"
    model = str(next(configs.glob("*llama*8b*"), next(configs.iterdir())))
    options = ("--draft", model, "--target", model, "--prompt", "1000000")
    assert_one_line(*run("plan-capacity", *options), "prompt and output", "1000000")
