"""FP8 for the draft: ranges measured by modelopt, e4m3 Q/DQ around its linear layers in ONNX.

modelopt's FP8 recipe (NVIDIA/Model-Optimizer) has one scale a tensor, for what enters a linear
layer and for its weights: the largest magnitude seen, over 448. Embedding, norms, attention,
scoring and lm_head stay as they are. The weights are stored in e4m3, one byte each; what enters is
quantised where it enters. Both are the explicit form that a strongly typed TensorRT network takes
and that onnxruntime runs on a CPU.
"""

from __future__ import annotations

import ast
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from engine_build.graph import MODULES
from engine_build.scoring_model import ScoringModel
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.fetch import Progress

E4M3_MAX = 448.0
SEQUENCES, LENGTH = 16, 512  # of calibration, in prompts and tokens
JUDGED = 4  # of them, on which the layers' errors are measured: rounding is slow on a CPU
_QUANTISED = "decoder."  # what is quantised of a `ScoringModel`


@dataclass(frozen=True)
class LinearRange:
    """Of one linear layer: largest magnitude of what enters it and of its weights.

    error: relative error of its products in FP8, in the square mean, on the first prompts.
    """

    activation: float
    weight: float
    error: float


@dataclass(frozen=True)
class Calibration:
    """Ranges by the linear layers' names in the model; what they were measured on."""

    ranges: dict[str, LinearRange]
    tokens: int
    text: str

    def as_json(self) -> dict[str, Any]:
        """For the stage's file."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Calibration:
        """Back from it."""
        ranges = {name: LinearRange(**one) for name, one in values["ranges"].items()}
        return cls(ranges, values["tokens"], values["text"])


def text_digest(text: str) -> str:
    """What identifies a calibration text: SHA-256, 64 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def calibration_prompts(
    tokenizer: Any, text: str, sequences: int = SEQUENCES, length: int = LENGTH
) -> list[NDArray[np.int64]]:
    """Stretches of `length` tokens, spread over the text, as the draft will read them: int64.

    A chat model reads each inside its template, whose first tokens hold the largest activations
    of all. Raises `InputError` for a text without a stretch of 16 tokens.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) < 16:
        raise InputError("calibration", f"a text of {len(ids)} tokens", "one of at least 16")
    count = max(1, min(sequences, len(ids) // length))
    starts = np.linspace(0, max(len(ids) - length, 0), count).astype(int)
    prompts = []
    for start in starts:
        body = tokenizer.decode(ids[start : start + length])
        if tokenizer.chat_template:
            message = [{"role": "user", "content": body}]
            rendered = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
            made = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        else:
            made = tokenizer(body)["input_ids"]
        prompts.append(np.asarray(made, dtype=np.int64))
    return prompts


def calibrate(
    model: ScoringModel, prompts: Sequence[NDArray[np.int64]], text: str, progress: Progress
) -> Calibration:
    """Ranges of the linear layers that `model` runs, by their names in it; lm_head has none.

    model: float32; its decoder gets modelopt's quantizers, so it is of no further use. prompts:
    int64 token ids. text: the digest of what they are from. Raises `InputError` without modelopt.
    """
    try:
        import modelopt.torch.quantization as mtq
    except ImportError as error:
        allowed = f"bf16 or fp32 without modelopt; pip install nvidia-modelopt ({error})"
        raise InputError("precision", "fp8", allowed) from None

    def run(label: str, prompts: Sequence[NDArray[np.int64]]) -> None:
        for number, prompt in enumerate(prompts):
            progress(f"{label}: prompt {number + 1} of {len(prompts)}")
            with torch.inference_mode():
                model(*_prompt_inputs(model, torch.from_numpy(prompt)[None]))

    with redirect_stdout(io.StringIO()):  # it tells what it registers
        mtq.quantize(model.decoder, mtq.FP8_DEFAULT_CFG, lambda _: run("calibration", prompts))
    # A layer behind the last scores is never run, and has no range of what enters it.
    decoder: Any = model.decoder
    layers: list[tuple[str, Any]] = list(decoder.named_modules(prefix="decoder"))
    found = {
        name: (layer, float(layer.input_quantizer.amax), float(layer.weight_quantizer.amax))
        for name, layer in layers
        if hasattr(layer, "input_quantizer") and layer.input_quantizer.amax is not None
    }
    with _watching(found) as squares:
        run("error of each layer", prompts[:JUDGED])
    ranges = {}
    for name, (_, activation, weight) in found.items():
        changed, whole = squares[name]
        ranges[name] = LinearRange(activation, weight, (changed / whole) ** 0.5 if whole else 0.0)
    return Calibration(ranges, sum(p.size for p in prompts), text)


def _prompt_inputs(model: ScoringModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """What `ScoringModel.forward` takes, for one whole prompt `[1, N]`."""
    n = ids.shape[1]
    tokens = torch.tensor([n], dtype=torch.int32)
    places = torch.arange(n)[None]
    if not model.looks_ahead:
        return [ids, places, tokens, tokens.clamp(max=model.scoring.queries)]
    empty = torch.zeros(1, model.kv_heads, n, model.head_dim, dtype=model.dtype)
    return [ids, places, tokens, tokens, tokens * 0, *[empty] * (2 * model.scoring.layers)]


@contextmanager
def _watching(
    layers: Mapping[str, tuple[torch.nn.Module, float, float]],
) -> Iterator[dict[str, list[float]]]:
    """For each layer, sums of squares: of what FP8 changes in its products, and of these."""
    sums = {name: [0.0, 0.0] for name in layers}

    def hook(name: str, activation: float, weight: float) -> Callable[..., None]:
        def look(layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            del output
            exact = torch.nn.functional.linear(inputs[0], layer.weight)
            rounded = linear_in_fp8(inputs[0], layer.weight, activation, weight)
            sums[name][0] += float((exact - rounded).square().sum())
            sums[name][1] += float(exact.square().sum())

        return look

    handles = [
        layer.register_forward_hook(hook(name, activation, weight))
        for name, (layer, activation, weight) in layers.items()
    ]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()


def linear_in_fp8(
    x: torch.Tensor, weight: torch.Tensor, activation_range: float, weight_range: float
) -> torch.Tensor:
    """What the Q/DQ in the ONNX compute: x `[..., K]`, weight `[N, K]` -> float32 `[..., N]`."""
    return torch.nn.functional.linear(
        _rounded(x, scale_of(activation_range)), _rounded(weight, scale_of(weight_range))
    )


def scale_of(largest: float) -> float:
    """What an e4m3 value is multiplied by, as a float32 number; 1 for a layer that is all zero."""
    return float(np.float32(largest / E4M3_MAX)) if largest > 0 else 1.0


def _rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """To e4m3 and back; what is out of range becomes the largest value."""
    stored = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return stored.float() * scale


def insert_fp8(model: onnx.ModelProto, ranges: dict[str, LinearRange]) -> list[str]:
    """Quantise the decoder's linear layers in `model`, in place; returns their names.

    They are the products that torch's exporter marked with a layer's name in `ranges`, by a
    constant or its Transpose. A name that the graph does not have is a layer that nothing reads.
    Raises `ValueError` for a product of the decoder with a constant that has no range.
    """
    return _Insertion(model, ranges).run()


class _Insertion:
    """One pass over a graph: its nodes are copied, Q/DQ put before those that are quantised."""

    def __init__(self, model: onnx.ModelProto, ranges: dict[str, LinearRange]) -> None:
        self._graph, self._ranges = model.graph, ranges
        self._weights = {tensor.name: tensor for tensor in self._graph.initializer}
        self._makers = {out: node for node in self._graph.node for out in node.output}
        self._nodes: list[onnx.NodeProto] = []
        self._made: dict[tuple[str, float], str] = {}
        self._replaced: set[str] = set()

    def run(self) -> list[str]:
        """Change the graph."""
        names = []
        for node in self._graph.node:
            weight = self._weight_of(node)
            name = _layer_of(node)
            if weight is not None and name.startswith(_QUANTISED):
                if name not in self._ranges:
                    raise ValueError(f"{name}: node {node.name!r} has no range")
                names.append(name)
                self._quantise(node, weight, self._ranges[name])
            self._nodes.append(node)
        del self._graph.node[:]
        self._graph.node.extend(self._nodes)
        self._drop_replaced()
        return names

    def _weight_of(self, node: onnx.NodeProto) -> TensorProto | None:
        """The constant matrix that a product multiplies by."""
        if node.op_type not in ("MatMul", "Gemm"):
            return None
        source = node.input[1]
        turned = self._makers.get(source)
        if turned is not None and turned.op_type == "Transpose":
            source = turned.input[0]
        weight = self._weights.get(source)
        return weight if weight is not None and len(weight.dims) == 2 else None

    def _quantise(self, node: onnx.NodeProto, weight: TensorProto, given: LinearRange) -> None:
        kind = weight.data_type
        node.input[0] = self._activation(node.input[0], given.activation, kind)
        made = self._weight(weight, given.weight, kind)
        if node.input[1] != weight.name:
            again = onnx.NodeProto()
            again.CopyFrom(self._makers[node.input[1]])
            again.input[0], again.output[0] = made, f"{node.input[1]}_fp8"
            again.name = f"{again.name}_fp8"
            self._nodes.append(again)
            made = again.output[0]
        node.input[1] = made
        self._replaced.add(weight.name)

    def _activation(self, tensor: str, largest: float, kind: int) -> str:
        """Q and DQ of what enters; layers that read the same tensor share them."""
        if (tensor, largest) not in self._made:
            scale, zero = self._scale(f"{tensor}_fp8", largest, kind)
            stored, back = f"{tensor}_fp8", f"{tensor}_fp8_back"
            self._nodes += [
                helper.make_node(
                    "QuantizeLinear", [tensor, scale, zero], [stored], f"{tensor}/quantise"
                ),
                helper.make_node(
                    "DequantizeLinear", [stored, scale, zero], [back], f"{tensor}/dequantise"
                ),
            ]
            self._made[tensor, largest] = back
        return self._made[tensor, largest]

    def _weight(self, weight: TensorProto, largest: float, kind: int) -> str:
        """The weight in e4m3, and its DQ."""
        scale, zero = self._scale(f"{weight.name}_fp8", largest, kind)
        values = torch.from_numpy(numpy_helper.to_array(weight).astype(np.float32))
        step = _in_type(scale_of(largest), kind)
        stored = (values / step).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        self._graph.initializer.append(
            TensorProto(
                name=f"{weight.name}_fp8",
                data_type=TensorProto.FLOAT8E4M3FN,
                dims=weight.dims,
                raw_data=stored.view(torch.uint8).numpy().tobytes(),
            )
        )
        back = f"{weight.name}_fp8_back"
        self._nodes.append(
            helper.make_node(
                "DequantizeLinear",
                [f"{weight.name}_fp8", scale, zero],
                [back],
                f"{weight.name}/dequantise",
            )
        )
        return back

    def _scale(self, name: str, largest: float, kind: int) -> tuple[str, str]:
        """Scale and zero point as constants of the graph; their names."""
        scale, zero = f"{name}_scale", "fp8_zero_point"
        value = _in_type(scale_of(largest), kind)
        self._graph.initializer.append(helper.make_tensor(scale, kind, [], [value]))
        if zero not in self._weights:
            point = TensorProto(name=zero, data_type=TensorProto.FLOAT8E4M3FN, raw_data=b"\0")
            self._graph.initializer.append(point)
            self._weights[zero] = point
        return scale, zero

    def _drop_replaced(self) -> None:
        """Take off the weights, and their Transposes, that nothing reads any more."""
        read = {name for node in self._graph.node for name in node.input}
        for place in reversed(range(len(self._graph.node))):
            node = self._graph.node[place]
            turns = node.op_type == "Transpose" and node.input[0] in self._replaced
            if turns and node.output[0] not in read:
                del self._graph.node[place]
        read = {name for node in self._graph.node for name in node.input}
        for place in reversed(range(len(self._graph.initializer))):
            name = self._graph.initializer[place].name
            if name in self._replaced and name not in read:
                del self._graph.initializer[place]


def _layer_of(node: onnx.NodeProto) -> str:
    """Name of the module that the node is the operator of."""
    scopes = [p.value for p in node.metadata_props if p.key == MODULES]
    modules = ast.literal_eval(scopes[0]) if scopes else []
    return str(modules[-2]) if len(modules) > 1 else ""


def _in_type(value: float, kind: int) -> float:
    """`value` as the nearest number of an ONNX float type."""
    types = {TensorProto.BFLOAT16: torch.bfloat16, TensorProto.FLOAT16: torch.float16}
    return float(torch.tensor(value, dtype=types.get(kind, torch.float32)))
