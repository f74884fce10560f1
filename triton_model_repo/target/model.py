"""`target`: a plan in, text out. Everything it does is `serving.workers`.

Beside plans it gets, through the ensemble, signs of life of running requests. Triton tells a
step of an ensemble of its client's cancellation only when the step is scheduled, so a sign of
life that comes in cancelled is how a running answer learns that nobody reads it any more.
"""

import json
import uuid
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb

from trtllm_specprefill.plan import PrunePlan, Reason
from trtllm_specprefill.serving.control import listen
from trtllm_specprefill.serving.metrics import TargetMetrics
from trtllm_specprefill.serving.ranks import end_with_this_process
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.serving.turns import Turns
from trtllm_specprefill.serving.wire import json_tensor, read_json, text_tensor
from trtllm_specprefill.serving.workers import Answer, AnsweringWorker, loaded_apart
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.load import load_target

_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Triton's entry point."""

    def initialize(self, args):
        """Load the target; its thread starts."""
        parameters = json.loads(args["model_config"])["parameters"]
        settings = ServeSettings.of(json.loads(parameters["settings"]["string_value"]))
        control = Path(parameters["control"]["string_value"])
        own = settings.target
        if own.threads:
            torch.set_num_threads(own.threads)
        load = partial(
            load_target,
            own.backend,
            own.model,
            dtype=own.dtype,
            device=own.device,
            url=own.url,
            served_name=own.served_name,
            as_text=own.as_text,
            context_tokens=own.context_tokens,
            timeout_s=own.timeout_s,
            block_reuse=own.block_reuse,
            kv_cache_tokens=own.kv_cache_tokens,
            cache_mib=own.cache_mib,
        )
        target = loaded_apart(load) if own.backend == "torch" else load()
        self.target, self.process = target, str(uuid.uuid4())
        self.facts = asdict(target.position_support)
        turns = Turns(control) if settings.shares_cores else None
        self.worker = AnsweringWorker(target, settings.limits.answers, turns)
        self.metrics = TargetMetrics(pb)
        if target.ranks > 1:
            self.watch = end_with_this_process()
        if target.takes_requests:  # else the socket is that of rank 0
            listen(control, "target", self._told)

    def execute(self, requests):
        """Hand plans to the thread, signs of life past it."""
        for request in requests:
            sender = request.get_response_sender()
            wanted = read_json(pb.get_input_tensor_by_name(request, "request").as_numpy())
            if request.is_cancelled():
                self.worker.cancel(wanted["id"])
                sender.send(flags=_FINAL)
            elif wanted.get("present"):
                sender.send(flags=_FINAL)
            else:
                self.worker.submit(self._answer(request, wanted, sender))

    def finalize(self):
        """Let go of the engine, which on several GPUs ends its other ranks too."""
        self.target.close()

    def _told(self, message):
        if message["message"] == "facts":
            return self.facts
        if message["message"] == "ping":
            return {"process": self.process}
        if message["message"] == "head":
            self.worker.read_ahead(message["id"], np.array(message["ids"], dtype=np.int32))
            return {}
        if message.get("process", self.process) != self.process:
            return {"state": "down"}  # what it was handed is lost with the process before
        return {"state": self.worker.wait(message["id"], message["seconds"])}

    def _answer(self, request, wanted, sender):
        def tensor(name):
            return pb.get_input_tensor_by_name(request, name).as_numpy()

        def send(text, report):
            if report is not None:
                self.metrics.answered(report)
            _send(sender, text, report, last=report is not None)

        def fail(words):
            error = pb.TritonError(f"target: {words}")
            sender.send(pb.InferenceResponse(error=error), flags=_FINAL)

        plan = PrunePlan(
            tensor("input_ids"),
            tensor("position_ids"),
            int(tensor("next_position")[0]),
            wanted["positions"],
            wanted["prompt_tokens"],
            Reason(wanted["reason"]),
            head=wanted["head"],
        )
        return Answer(
            wanted["id"],
            plan,
            Sampling.of(**wanted["sampling"]),
            wanted["stream"],
            read_json(tensor("report")),
            wanted["received"],
            wanted["sent"],
            send,
            fail,
            lambda: sender.send(flags=_FINAL),
        )


def _send(sender, text, report, last=True):
    outputs = [pb.Tensor("text_output", text_tensor(text))]
    if report is not None:
        outputs.append(pb.Tensor("report", json_tensor(report)))
    sender.send(pb.InferenceResponse(outputs), flags=_FINAL if last else 0)
