"""The target as a server that runs the model unchanged, whatever it is made of.

Such a server places tokens one after another, so the plan's positions are contiguous. Three
kinds: an OpenAI-compatible URL, and the stock Triton models `tensorrt_llm` (token ids) and
`ensemble` (text) of TensorRT-LLM's backend.
"""

from __future__ import annotations

import http.client
import json
import queue
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

import numpy as np

from trtllm_specprefill.errors import InputError, TargetFailed
from trtllm_specprefill.models import EngineModel
from trtllm_specprefill.operations import prefill_operations, shortest_window
from trtllm_specprefill.plan import PositionSupport, PrunePlan
from trtllm_specprefill.settings import GREEDY_BELOW, Sampling
from trtllm_specprefill.target.base import FinishReason, Step, Target
from trtllm_specprefill.target.evidence import PositionEvidence, informed
from trtllm_specprefill.target.steps import Chunk, assemble

if TYPE_CHECKING:
    import tritonclient.grpc as triton

_URLS = (
    "http://HOST[:PORT][/PATH] or https://..., up to and with /v1, of an OpenAI-compatible server;"
    " grpc://HOST:PORT/tensorrt_llm or grpc://HOST:PORT/ensemble of a Triton server"
)


class Connection(ABC):
    """One way to ask a server."""

    url: str

    @abstractmethod
    def steps(
        self, plan: PrunePlan, sampling: Sampling, model: EngineModel
    ) -> Generator[Step, None, None]:
        """The answer to `plan`, step by step. Raises `TargetFailed`, naming the URL."""


def connect(
    url: str, served_name: str, timeout_s: float = 600.0, *, as_text: bool = False
) -> Connection:
    """The connection for `url`; nothing is sent yet. Raises `InputError` for a bad URL.

    as_text: send the prompt as text to an OpenAI-compatible server that takes no token ids.
    """
    parts = urlsplit(url)
    if parts.scheme in ("http", "https") and parts.hostname:
        return OpenAIConnection(parts, served_name, timeout_s, as_text)
    model = parts.path.strip("/")
    if parts.scheme == "grpc" and parts.hostname and model in ("tensorrt_llm", "ensemble"):
        return TritonConnection(parts, model, timeout_s)
    raise InputError("url", url, _URLS)


class EndpointTarget(Target):
    """Answers through a connection.

    context_tokens: positions of the server, where it has fewer than its model. evidence: which
    positions its model answers better with; it has contiguous ones either way.
    """

    def __init__(
        self,
        connection: Connection,
        model: EngineModel,
        context_tokens: int | None = None,
        evidence: PositionEvidence | None = None,
    ) -> None:
        self.name, self.tokenizer = f"{model.name} at {connection.url}", model.tokenizer
        self._connection, self._model = connection, model
        support = PositionSupport(
            honoured=False,
            window=shortest_window(model.config),
            context=context_tokens or int(model.config.max_position_embeddings),
        )
        self.position_support = informed(support, evidence)

    def stream(self, plan: PrunePlan, sampling: Sampling) -> Generator[Step, None, None]:
        """See `Target.stream`. Dense plans are contiguous, so they are taken as they are."""
        if plan.next_position != plan.input_ids.size:
            raise TargetFailed(f"target {self.name} takes no position ids")
        yield from self._connection.steps(plan, sampling, self._model)

    def operations(self, tokens: int) -> float:
        """See `Target.operations`."""
        return prefill_operations(self._model.config, tokens)


class OpenAIConnection(Connection):
    """`POST /v1/completions` with the prompt as token ids or text, streamed as events.

    The server gives text: the token ids of a step are those of its text in the target's own
    tokenizer. Closing the stream closes the socket, which every such server takes for a cancel.
    """

    def __init__(
        self, parts: SplitResult, served_name: str, timeout_s: float, as_text: bool
    ) -> None:
        self.url, self._as_text = parts.geturl().rstrip("/"), as_text
        self._parts, self._served_name, self._timeout = parts, served_name, timeout_s

    def steps(
        self, plan: PrunePlan, sampling: Sampling, model: EngineModel
    ) -> Generator[Step, None, None]:
        """See `Connection.steps`."""
        try:
            with closing(self._open()) as wire:
                wire.request(
                    "POST",
                    self._parts.path.rstrip("/") + "/completions",
                    json.dumps(self._body(plan, sampling, model.tokenizer)),
                    {"Content-Type": "application/json", "Accept": "text/event-stream"},
                )
                reply = wire.getresponse()
                if reply.status != 200:
                    words = reply.read(500).decode("utf-8", "replace")
                    raise TargetFailed(f"{self.url} answered {reply.status}: {words}")
                yield from self._read(reply, model.tokenizer)
        except (OSError, http.client.HTTPException) as error:
            raise TargetFailed(f"{self.url}: {str(error) or type(error).__name__}") from error

    def _open(self) -> http.client.HTTPConnection:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert self._parts.hostname is not None
        return kind(self._parts.hostname, self._parts.port, timeout=self._timeout)

    def _body(self, plan: PrunePlan, sampling: Sampling, tokenizer: Any) -> dict[str, Any]:
        prompt = _text_of(plan, tokenizer) if self._as_text else plan.input_ids.tolist()
        body: dict[str, Any] = {
            "model": self._served_name,
            "prompt": prompt,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature if sampling.temperature >= GREEDY_BELOW else 0,
            "top_p": sampling.top_p,
            "stream": True,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        optional = {"top_k": sampling.top_k, "stop": list(sampling.stop)}
        return body | {name: value for name, value in optional.items() if value}

    def _read(self, reply: http.client.HTTPResponse, tokenizer: Any) -> Iterator[Step]:
        for line in reply:
            event = line.decode("utf-8", "replace").strip()
            if not event.startswith("data:"):
                continue
            data = event.removeprefix("data:").strip()
            if data == "[DONE]":
                break
            text, finish = self._parse(data)
            yield Step(text, _encoded(tokenizer, text), finish)
            if finish is not None:
                return
        raise TargetFailed(f"{self.url}: the answer ended without a finish reason")

    def _parse(self, data: str) -> tuple[str, FinishReason | None]:
        try:
            event = json.loads(data)
            if "error" in event:
                raise TargetFailed(f"{self.url}: {event['error']}")
            choice = event["choices"][0]
            text, finish = str(choice["text"] or ""), choice.get("finish_reason")
        except (ValueError, LookupError, TypeError) as error:
            raise TargetFailed(f"{self.url}: not a completion: {data[:200]}") from error
        if finish not in (None, "stop", "length"):
            raise TargetFailed(f"{self.url}: the server ended the request: {finish}")
        return text, finish


class TritonConnection(Connection):
    """The stock models of TensorRT-LLM's Triton backend, over one gRPC stream a request."""

    def __init__(self, parts: SplitResult, model: str, timeout_s: float) -> None:
        try:
            import tritonclient.grpc
        except ImportError as error:
            raise InputError(
                "url",
                parts.geturl(),
                "with tritonclient installed (pip install tritonclient[grpc])",
            ) from error
        self.url, self._address = parts.geturl(), parts.netloc
        self._model, self._timeout, self._triton = model, timeout_s, tritonclient.grpc

    def steps(
        self, plan: PrunePlan, sampling: Sampling, model: EngineModel
    ) -> Generator[Step, None, None]:
        """See `Connection.steps`."""
        if self._model == "tensorrt_llm":
            end_id = min(model.end_ids, default=None)
            with closing(self._results(self._id_inputs(plan, sampling, end_id))) as results:
                chunks = self._id_chunks(results)
                yield from assemble(chunks, model.tokenizer, sampling, model.end_ids)
            return
        inputs = self._text_inputs(_text_of(plan, model.tokenizer), sampling)
        with closing(self._results(inputs)) as results:
            yield from self._text_steps(results, model.tokenizer, sampling)

    def _results(
        self, inputs: list[triton.InferInput]
    ) -> Generator[triton.InferResult, None, None]:
        """Responses as they come; closing it cancels the request."""
        arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        done = False
        client = self._triton.InferenceServerClient(self._address)
        try:
            client.start_stream(
                callback=lambda result, error: arrived.put((result, error)),
                stream_timeout=self._timeout,
            )
            client.async_stream_infer(self._model, inputs, enable_empty_final_response=True)
            while not done:
                result, error = arrived.get(timeout=self._timeout)
                if error is not None:
                    done = True
                    raise TargetFailed(f"{self.url}: {error}")
                parameters = result.get_response().parameters
                done = parameters["triton_final_response"].bool_param
                if result.get_response().outputs:
                    yield result
        except queue.Empty:
            raise TargetFailed(f"{self.url}: no token within {self._timeout:g} s") from None
        except self._triton.InferenceServerException as error:
            raise TargetFailed(f"{self.url}: {error}") from error
        finally:
            client.stop_stream(cancel_requests=not done)
            client.close()

    def _id_inputs(
        self, plan: PrunePlan, sampling: Sampling, end_id: int | None
    ) -> list[triton.InferInput]:
        ids = plan.input_ids.astype(np.int32)[None]
        inputs = [
            self._input("input_ids", ids, "INT32"),
            self._input("input_lengths", np.array([[ids.size]], np.int32), "INT32"),
            self._input("request_output_len", np.array([[sampling.max_tokens]], np.int32), "INT32"),
            self._input("streaming", np.array([[True]]), "BOOL"),
            self._input("exclude_input_in_output", np.array([[True]]), "BOOL"),
            *self._draws(sampling, "runtime_top_k", "runtime_top_p"),
        ]
        if end_id is not None:
            value = np.array([[end_id]], np.int32)
            inputs += [self._input("end_id", value, "INT32"), self._input("pad_id", value, "INT32")]
        return inputs

    def _text_inputs(self, text: str, sampling: Sampling) -> list[triton.InferInput]:
        inputs = [
            self._input("text_input", np.array([[text.encode()]], np.object_), "BYTES"),
            self._input("max_tokens", np.array([[sampling.max_tokens]], np.int32), "INT32"),
            self._input("stream", np.array([[True]]), "BOOL"),
            *self._draws(sampling, "top_k", "top_p"),
        ]
        if sampling.stop:
            words = np.array([[word.encode() for word in sampling.stop]], np.object_)
            inputs.append(self._input("stop_words", words, "BYTES"))
        return inputs

    def _draws(self, sampling: Sampling, top_k: str, top_p: str) -> list[triton.InferInput]:
        if sampling.temperature < GREEDY_BELOW:
            return [self._input(top_k, np.array([[1]], np.int32), "INT32")]
        inputs = [
            self._input("temperature", np.array([[sampling.temperature]], np.float32), "FP32"),
            self._input(top_p, np.array([[sampling.top_p]], np.float32), "FP32"),
        ]
        if sampling.top_k:
            inputs.append(self._input(top_k, np.array([[sampling.top_k]], np.int32), "INT32"))
        if sampling.seed is not None:
            inputs.append(self._input("seed", np.array([[sampling.seed]], np.uint64), "UINT64"))
        return inputs

    def _input(self, name: str, value: np.ndarray[Any, Any], kind: str) -> triton.InferInput:
        made = self._triton.InferInput(name, list(value.shape), kind)
        made.set_data_from_numpy(value)
        return made

    def _id_chunks(self, results: Iterator[triton.InferResult]) -> Generator[Chunk, None, None]:
        for result in results:
            ids, length = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
            if ids is None or length is None or ids.ndim != 3:
                raise TargetFailed(f"{self.url}: not an answer of the model tensorrt_llm")
            yield Chunk(ids[0, 0, : int(length[0, 0])].tolist())
        yield Chunk((), "stop")  # before max_tokens, and at an end id that is not shown

    def _text_steps(
        self, results: Iterator[triton.InferResult], tokenizer: Any, sampling: Sampling
    ) -> Iterator[Step]:
        count = 0
        for result in results:
            text = result.as_numpy("text_output")
            if text is None:
                raise TargetFailed(f"{self.url}: not an answer of the model ensemble")
            piece = text.reshape(-1)[0].decode("utf-8", "replace")
            ids = _encoded(tokenizer, piece)
            count += len(ids)
            yield Step(piece, ids)
        yield Step("", (), "length" if count >= sampling.max_tokens else "stop")


def _text_of(plan: PrunePlan, tokenizer: Any) -> str:
    """The kept prompt as text; without its BOS, which a server that tokenises adds itself."""
    text = str(tokenizer.decode(plan.input_ids.tolist(), skip_special_tokens=False))
    return text.removeprefix(tokenizer.bos_token or "")


def _encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
