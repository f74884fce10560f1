"""`specprefill_infer`: the ensemble's answer in one response.

Triton refuses plain `infer` calls to a model that may send several responses.
"""

import json
from pathlib import Path

import triton_python_backend_utils as pb

from trtllm_specprefill.serving.control import listen


class TritonPythonModel:
    """Triton's entry point; each instance is a process."""

    def initialize(self, args):
        """Listen, so that it is noticed when this process dies."""
        parameters = json.loads(args["model_config"])["parameters"]
        number = args["model_instance_name"].rpartition("_")[2]
        control = Path(parameters["control"]["string_value"])
        listen(control, f"specprefill_infer.{number}", lambda message: {})

    def execute(self, requests):
        """Pass each request on and give back its last response."""
        return [_answer(request) for request in requests]


def _answer(request):
    call = pb.InferenceRequest(
        model_name="specprefill",
        requested_output_names=["text_output", "report"],
        inputs=request.inputs(),
    )
    outputs = []
    for response in call.exec(decoupled=True):
        if response.has_error():
            return pb.InferenceResponse(error=response.error())
        outputs = response.output_tensors() or outputs
    return pb.InferenceResponse(outputs)
