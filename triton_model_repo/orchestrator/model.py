"""`orchestrator`: a client's request in, a plan for `target` out, through `serving.orchestrator`.

While a request is in the server, its id is sent on to `target` every now and then: that is how
a client that has gone is noticed, see there.
"""

import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import triton_python_backend_utils as pb

from trtllm_specprefill.errors import Cancelled, DraftFailed, InputError, SpecPrefillError
from trtllm_specprefill.serving.control import listen, tell
from trtllm_specprefill.serving.metrics import OrchestratorMetrics
from trtllm_specprefill.serving.orchestrator import (
    InFlight,
    Orchestrator,
    plan_tensors,
    presence_tensors,
)
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.serving.wire import INPUTS, read_request

_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Triton's entry point."""

    def initialize(self, args):
        """Load the tokenizers; the other models are asked when a request comes."""
        parameters = json.loads(args["model_config"])["parameters"]
        self.settings = ServeSettings.of(json.loads(parameters["settings"]["string_value"]))
        self.limits, self.metrics = self.settings.limits, OrchestratorMetrics(pb)
        control = Path(parameters["control"]["string_value"])
        self.tell = partial(tell, control)
        listen(control, "orchestrator", lambda message: {})
        self.orchestrator = Orchestrator(self.settings, _score, self.tell)
        self.threads = ThreadPoolExecutor(self.limits.requests, "request")
        self.inside, self.counting = {}, threading.Lock()
        threading.Thread(target=self._signs_of_life, daemon=True).start()

    def execute(self, requests):
        """Each request in a thread of its own; those beyond the limit are refused at once."""
        for request in requests:
            sender, received = request.get_response_sender(), time.time()
            if len(self.inside) >= self.limits.requests:
                self.metrics.ended("overloaded")
                most = self.limits.requests
                _fail(sender, f"overloaded: {most} requests are in the server; try again later")
                continue
            entry = _Entry(str(uuid.uuid4()), sender)
            self.inside[entry.id] = entry
            self._count()
            self.threads.submit(self._run, request, entry, received)

    def _run(self, request, entry, received):
        try:
            tensors = {n: pb.get_input_tensor_by_name(request, n) for n in INPUTS}
            wanted = read_request({n: t and t.as_numpy() for n, t in tensors.items()})
            in_flight = InFlight(entry.id, lambda: entry.gone)
            planned = self.orchestrator.plan(wanted, in_flight, time.time() - received)
            self.metrics.planned(planned)
            process = self.tell("target", {"message": "ping"})["process"]
            entry.planned = True
            entry.send(plan_tensors(planned, wanted, entry.id, received))
            while self._state(entry.id, self.limits.presence, process=process) == "running":
                pass
            entry.close()
        except Cancelled:
            self.metrics.ended("cancelled")
            entry.close()
        except SpecPrefillError as error:
            self.metrics.ended("error")
            entry.fail(str(error), bad_input=isinstance(error, InputError))
        except Exception as error:
            self.metrics.ended("error")
            entry.fail(f"{type(error).__name__}: {error}")
        finally:
            del self.inside[entry.id]
            self._count()

    def _count(self):
        with self.counting:  # or an older number could be stated last
            self.metrics.inside(len(self.inside))

    def _state(self, request_id, seconds, **asked):
        message = {"message": "wait", "id": request_id, "seconds": seconds, **asked}
        try:
            return self.tell("target", message)["state"]
        except SpecPrefillError:
            return "down"

    def _signs_of_life(self):
        while True:
            time.sleep(self.limits.presence)
            for request_id in list(self.inside):
                with suppress(Exception):  # of one request; the others are looked after
                    self._sign_of_life(request_id)

    def _sign_of_life(self, request_id):
        entry = self.inside.get(request_id)
        if entry is not None:
            entry.send(presence_tensors(request_id))
            if not entry.planned:
                entry.gone = self._state(request_id, 0) == "gone"


class _Entry:
    """One request in the server, and the one place its responses go through."""

    def __init__(self, request_id, sender):
        self.id, self.gone, self.planned = request_id, False, False
        self._sender, self._open, self._lock = sender, True, threading.Lock()

    def send(self, tensors):
        with self._lock:
            if self._open:
                outputs = [pb.Tensor(*item) for item in tensors.items()]
                self._sender.send(pb.InferenceResponse(outputs))

    def close(self):
        with self._lock:
            self._open = False
            self._sender.send(flags=_FINAL)

    def fail(self, words, bad_input=False):
        with self._lock:
            self._open = False
            _fail(self._sender, words, bad_input)


def _fail(sender, words, bad_input=False):
    code = pb.TritonError.INVALID_ARG if bad_input else pb.TritonError.INTERNAL
    error = pb.TritonError(f"orchestrator: {words}", code)
    sender.send(pb.InferenceResponse(error=error), flags=_FINAL)


def _score(inputs):
    """Call the draft; see `serving.orchestrator.Score`."""
    response = pb.InferenceRequest(
        model_name="draft",
        requested_output_names=["importance", "report"],
        inputs=[pb.Tensor(*item) for item in inputs.items()],
    ).exec()
    if response.has_error():
        raise DraftFailed(response.error().message())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
