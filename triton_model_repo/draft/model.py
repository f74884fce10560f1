"""`draft`: token ids in, importance out. Everything it does is `serving.workers`."""

import json

import numpy as np
import torch
import triton_python_backend_utils as pb

from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.models import load_model
from trtllm_specprefill.serving.orchestrator import importance_tensors
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.serving.wire import read_json
from trtllm_specprefill.serving.workers import Scoring, ScoringWorker
from trtllm_specprefill.settings import Settings

_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Triton's entry point."""

    def initialize(self, args):
        """Load the draft; its thread starts."""
        parameters = json.loads(args["model_config"])["parameters"]
        own = ServeSettings.of(json.loads(parameters["settings"]["string_value"])).draft
        if own.threads:
            torch.set_num_threads(own.threads)
        self.worker = ScoringWorker(TorchDraft(load_model(own.model, own.dtype, own.device)))

    def execute(self, requests):
        """Hand prompts to the thread, cancellations past it."""
        for request in requests:
            sender = request.get_response_sender()
            wanted = read_json(pb.get_input_tensor_by_name(request, "request").as_numpy())
            if wanted.get("cancel"):
                self.worker.cancel(wanted["id"])
                sender.send(flags=_FINAL)
                continue
            question = wanted["question"]
            self.worker.submit(
                Scoring(
                    wanted["id"],
                    pb.get_input_tensor_by_name(request, "input_ids").as_numpy(),
                    None if question is None else np.array(question, dtype=np.int64),
                    Settings.of(**wanted["settings"]),
                    wanted["timeout"],
                    lambda result, waited, sender=sender: _reply(sender, result, waited),
                )
            )


def _reply(sender, result, waited):
    tensors = importance_tensors(result, waited).items()
    sender.send(pb.InferenceResponse([pb.Tensor(*item) for item in tensors]), flags=_FINAL)
