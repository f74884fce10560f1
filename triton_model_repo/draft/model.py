"""`draft`: token ids in, importance out. Everything it does is `serving.workers`."""

import json
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb

from trtllm_specprefill.draft.load import load_draft
from trtllm_specprefill.serving.control import listen
from trtllm_specprefill.serving.orchestrator import importance_tensors
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.serving.turns import Turns
from trtllm_specprefill.serving.wire import read_json
from trtllm_specprefill.serving.workers import ScoringWorker
from trtllm_specprefill.settings import Settings


class TritonPythonModel:
    """Triton's entry point."""

    def initialize(self, args):
        """Load the draft."""
        parameters = json.loads(args["model_config"])["parameters"]
        settings = ServeSettings.of(json.loads(parameters["settings"]["string_value"]))
        control = Path(parameters["control"]["string_value"])
        own = settings.draft
        if own.threads:
            torch.set_num_threads(own.threads)
        draft = load_draft(
            own.backend,
            own.model,
            path=own.path,
            fallback=own.fallback,
            dtype=own.dtype,
            device=own.device,
            threads=own.threads,
            layers=own.layers,
            cache_mib=own.cache_mib,
        )
        self.worker = ScoringWorker(draft, Turns(control) if settings.shares_cores else None)
        listen(control, "draft", self._told)

    def execute(self, requests):
        """Score one prompt after the other."""
        return [self._score(request) for request in requests]

    def _score(self, request):
        wanted = read_json(pb.get_input_tensor_by_name(request, "request").as_numpy())
        question = wanted["question"]
        result = self.worker.score(
            wanted["id"],
            pb.get_input_tensor_by_name(request, "input_ids").as_numpy(),
            None if question is None else np.array(question, dtype=np.int64),
            Settings.of(**wanted["settings"]),
            wanted["timeout"],
        )
        return pb.InferenceResponse([pb.Tensor(*t) for t in importance_tensors(result).items()])

    def _told(self, message):
        if message["message"] == "cancel":
            self.worker.cancel(message["id"])
        return {}
