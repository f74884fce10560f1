"""The stock model `tensorrt_llm` inside tritonserver, with a small model in the engine's place.

It takes text too and gives it, so that the stock ensemble needs no steps before and after it. A
test writes it into a model repository, with MODEL filled in.
"""

import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from trtllm_specprefill.models import load_model
from trtllm_specprefill.plan import PrunePlan, Reason
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.torch import TorchTarget

MODEL = ""  # folder


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.target = TorchTarget(load_model(MODEL, "float32", "cpu"))

    def execute(self, requests: Any) -> None:
        for request in requests:
            values = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            sender = request.get_response_sender()
            threading.Thread(target=self.answer, args=(values, sender)).start()

    def answer(self, values: dict[str, Any], sender: Any) -> None:
        final = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            for outputs in self.outputs(values):
                if sender.is_cancelled():
                    break
                sender.send(pb.InferenceResponse([pb.Tensor(*output) for output in outputs]))
            sender.send(flags=final)
        except Exception as error:
            sender.send(pb.InferenceResponse(error=pb.TritonError(str(error))), flags=final)

    def outputs(self, values: dict[str, Any]) -> Any:
        """The outputs of one response after the other, by name."""
        ids = values.get("input_ids")
        if ids is None:
            ids = np.array([self.target.tokenizer.encode(values["text_input"][0, 0].decode())])
        n = ids.shape[1]
        at = np.arange(n, dtype=np.int32)
        plan = PrunePlan(ids[0].astype(np.int32), at, n, "original", n, Reason.DISABLED)
        sampling = Sampling(
            max_tokens=int(values["request_output_len"][0, 0]),
            top_k=int(values.get("runtime_top_k", [[0]])[0][0]),
            temperature=float(values.get("temperature", [[0.0]])[0][0]),
            seed=int(values["seed"][0, 0]) if "seed" in values else None,
            stop=tuple(word.decode() for word in values.get("stop_words", [[]])[0]),
        )
        for step in self.target.stream(plan, sampling):
            shown = np.array(step.token_ids, np.int32)[None, None]
            yield [
                ("output_ids", shown),
                ("sequence_length", np.array([[shown.size]], np.int32)),
                ("text_output", np.array([[step.text.encode()]], np.object_)),
            ]
