"""Targets behind a wire: real HTTP on the loopback, a small model behind it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.strategies import WORDS
from tests.target.wire import Behind, plan_of, target_of, text_of
from trtllm_specprefill import SpecPrefill
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.errors import InputError, TargetFailed
from trtllm_specprefill.models import Model
from trtllm_specprefill.plan import PrunePlan, Reason
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.endpoint import connect
from trtllm_specprefill.target.load import load_target
from trtllm_specprefill.target.torch import TorchTarget

# --- OpenAI-compatible


class Handler(BaseHTTPRequestHandler):
    behind: Behind

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.behind.asked.append({"path": self.path, **body})
        if self.behind.instead and self.behind.instead(self):
            return
        self.send_response(200)
        self.end_headers()
        drawn = {k: body[k] for k in ("max_tokens", "temperature", "top_p")}
        drawn |= {k: body[k] for k in ("top_k", "seed", "stop") if k in body}
        drawn["stop"] = tuple(drawn.get("stop", ()))
        try:
            for step in self.behind.answer(body["prompt"], Sampling(**drawn)):
                choice = {"index": 0, "text": step.text, "finish_reason": step.finish_reason}
                self.event(json.dumps({"object": "text_completion", "choices": [choice]}))
            self.event("[DONE]")
        except OSError:
            self.behind.gone.set()

    def event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def openai(model: Model) -> Iterator[tuple[str, Behind]]:
    behind = Behind(model)
    handler = type("Bound", (Handler,), {"behind": behind})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", behind
    server.shutdown()
    server.server_close()


def test_an_openai_server_gives_the_answer_of_the_model_itself(
    openai: tuple[str, Behind], model: Model
) -> None:
    url, behind = openai
    plan = plan_of(model.tokenizer)
    for sampling in (
        Sampling(max_tokens=9),
        Sampling(max_tokens=9, temperature=1.3, top_k=20, top_p=0.9, seed=5),
        Sampling(max_tokens=9, temperature=1.3, seed=0),
    ):
        got = list(target_of(url, model).stream(plan, sampling))
        direct = list(TorchTarget(model).stream(plan, sampling))
        assert text_of(got) == text_of(direct)
        assert got[-1].finish_reason == direct[-1].finish_reason == "length"
    assert behind.asked[0]["path"] == "/v1/completions"
    assert behind.asked[0]["model"] == "served"
    assert behind.asked[0]["prompt"] == plan.input_ids.tolist()
    assert [asked.get("seed") for asked in behind.asked] == [None, 5, 0]
    assert len(got) == 9  # streamed, not gathered


def test_stop_texts_are_the_servers_work(openai: tuple[str, Behind], model: Model) -> None:
    url, behind = openai
    plan = plan_of(model.tokenizer)
    words = text_of(list(TorchTarget(model).stream(plan, Sampling(max_tokens=12))))
    stop = words[4:7]
    got = list(target_of(url, model).stream(plan, Sampling(max_tokens=12, stop=(stop,))))
    assert text_of(got) == words[: words.index(stop)]
    assert got[-1].finish_reason == "stop"
    assert behind.asked[0]["stop"] == [stop]


def test_closing_the_stream_hangs_up(openai: tuple[str, Behind], model: Model) -> None:
    url, behind = openai
    stream = target_of(url, model).stream(plan_of(model.tokenizer), Sampling(max_tokens=3000))
    next(stream)
    stream.close()
    assert behind.gone.wait(30)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("not json", "not a completion: not json"),
        ('{"choices": []}', "not a completion"),
        ("[]", "not a completion"),
        ('{"error": {"message": "out of memory"}}', "out of memory"),
        ('{"choices": [{"text": "x", "finish_reason": "abort"}]}', "ended the request: abort"),
        ("[DONE]", "ended without a finish reason"),
    ],
)
def test_nonsense_from_a_server_is_a_target_failure(
    openai: tuple[str, Behind], model: Model, data: str, words: str
) -> None:
    url, behind = openai

    def instead(handler: Handler) -> bool:
        handler.send_response(200)
        handler.end_headers()
        handler.event(data)
        return True

    behind.instead = instead
    with pytest.raises(TargetFailed, match=words) as failure:
        list(target_of(url, model).stream(plan_of(model.tokenizer), Sampling()))
    assert url in str(failure.value)


def test_a_status_that_is_no_success_is_told_with_its_words(
    openai: tuple[str, Behind], model: Model
) -> None:
    url, behind = openai

    def instead(handler: Handler) -> bool:
        handler.send_response(503)
        handler.end_headers()
        handler.wfile.write(b"the model is loading")
        return True

    behind.instead = instead
    with pytest.raises(TargetFailed, match="503: the model is loading"):
        list(target_of(url, model).stream(plan_of(model.tokenizer), Sampling()))


def test_a_slow_server_and_one_that_is_gone_are_target_failures(
    openai: tuple[str, Behind], model: Model
) -> None:
    url, behind = openai
    waiting = threading.Event()
    behind.instead = lambda handler: waiting.wait(20)
    with pytest.raises(TargetFailed, match="timed out"):
        list(target_of(url, model, 0.2).stream(plan_of(model.tokenizer), Sampling()))
    waiting.set()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(TargetFailed, match="refused"):
            list(target_of(nobody, model).stream(plan_of(model.tokenizer), Sampling()))


def test_a_pruned_prompt_that_the_server_fails_on_is_answered_in_full_unless_strict(
    openai: tuple[str, Behind], model: Model
) -> None:
    url, behind = openai
    text = " ".join(np.random.default_rng().choice(WORDS, size=300)) + ". Where is the key?"
    whole = len(model.tokenizer.encode(text))
    knobs: dict[str, Any] = {"threshold": 64, "min_keep_tokens": 0, "keep": 0.3, "max_tokens": 6}

    def instead(handler: Handler) -> bool:
        if len(behind.asked[-1]["prompt"]) < whole:
            handler.send_response(500)
            handler.end_headers()
            handler.wfile.write(b"no room for the answer")
            return True
        return False

    behind.instead = instead
    pipeline = SpecPrefill(TorchDraft(model), target_of(url, model))
    answer = pipeline.generate(text, **knobs)
    assert answer.plan.reason is Reason.UNSUPPORTED_TARGET
    assert "500: no room for the answer" in answer.plan.detail
    assert answer.text == SpecPrefill(None, TorchTarget(model)).generate(text, max_tokens=6).text
    with pytest.raises(TargetFailed, match="no room for the answer"):
        pipeline.generate(text, strict=True, **knobs)


# --- both


def test_original_positions_are_not_for_an_endpoint(model: Model) -> None:
    target = target_of("http://127.0.0.1:9/v1", model)
    assert not target.position_support.honoured
    ids = np.arange(5, 9, dtype=np.int32)
    gappy = PrunePlan(ids, ids * 2, 30, "original", 30, Reason.PRUNED)
    with pytest.raises(TargetFailed, match="no position ids"):
        next(target.stream(gappy, Sampling()))


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://host/v1", "grpc://host:8001", "grpc://host:8001/other"]
)
def test_a_bad_url_says_which_are_allowed(url: str) -> None:
    with pytest.raises(InputError, match=r"grpc://HOST:PORT/tensorrt_llm"):
        connect(url, "served")


# --- a server from PyPI


@pytest.fixture
def transformers_serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The OpenAI-compatible server of transformers, with a small model, on the loopback."""
    serve = pytest.importorskip("transformers.cli.serve", reason="transformers 5 has the server")
    if not serve.is_serve_available():
        pytest.skip("needs pip install transformers[serving]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    server = serve.Serve(
        str(folder),
        host="127.0.0.1",
        port=port,
        device="cpu",
        dtype="float32",
        log_level="error",
        non_blocking=True,
    )
    yield f"http://127.0.0.1:{port}/v1"
    server.kill_server()


def test_a_server_from_pypi_gives_the_answer_of_the_model_itself(
    transformers_serve: str, folder: Path
) -> None:
    target = load_target(
        "endpoint", str(folder), url=transformers_serve, as_text=True, timeout_s=60
    )
    direct = load_target("torch", str(folder), dtype="float32", device="cpu")
    plan = plan_of(target.tokenizer)
    for sampling in (Sampling(max_tokens=9), Sampling(max_tokens=3)):
        got = list(target.stream(plan, sampling))
        expected = list(direct.stream(plan, sampling))
        assert text_of(got) == text_of(expected)
        assert got[-1].finish_reason == expected[-1].finish_reason
    ids = load_target("endpoint", str(folder), url=transformers_serve, timeout_s=60)
    with pytest.raises(TargetFailed, match=r"400: .*prompt must be a string"):
        list(ids.stream(plan, sampling))
