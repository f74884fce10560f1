"""FP8: ranges as they are, Q/DQ in the graph as a float emulation, and nothing else touched."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from engine_build.graph import MODULES
from engine_build.quantise import (
    Calibration,
    LinearRange,
    _prompt_inputs,
    calibrate,
    calibration_prompts,
    insert_fp8,
    linear_in_fp8,
)
from engine_build.scoring_model import Scoring, ScoringModel
from tests.contracts.tensorrt_draft import graph_of
from tests.engine_build.drafts import fresh_ids, small
from trtllm_specprefill.errors import InputError

WINDOW = Scoring("window", 2, queries=24)
LOOK_AHEAD = Scoring("lookahead", 4, queries=6, votes="mean")
NAME = "decoder.layers.0.mlp.up_proj"


def product(form: str, weight: np.ndarray, name: str = NAME) -> onnx.ModelProto:
    """One linear layer, `[B, K]` times weight `[N, K]`, in one of the forms that torch exports."""
    nodes, stored, extra = [], weight.T.copy(), {}
    if form == "Transpose":
        stored = weight
        nodes.append(helper.make_node("Transpose", ["w"], ["w_t"], "turn", perm=[1, 0]))
    if form == "Gemm":
        stored, extra = weight, {"transB": 1}
    last = "w_t" if form == "Transpose" else "w"
    kind = "Gemm" if form == "Gemm" else "MatMul"
    node = helper.make_node(kind, ["x", last], ["y"], "product", **extra)
    node.metadata_props.add(key=MODULES, value=str(["", "decoder", name, "linear"]))
    rows = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", weight.shape[1]])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", weight.shape[0]])
    graph = helper.make_graph(
        [*nodes, node], "one", [rows], [out], [numpy_helper.from_array(stored, "w")]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


@pytest.mark.parametrize("form", ["MatMul", "Transpose", "Gemm"])
def test_a_quantised_layer_in_onnxruntime_is_the_float_emulation(form: str) -> None:
    k, n = 48, 40
    for _ in range(3):
        weight = np.random.default_rng().normal(size=(n, k)).astype(np.float32)
        x = np.random.default_rng().normal(size=(9, k)).astype(np.float32) * 3
        given = LinearRange(float(np.abs(x).max()), float(np.abs(weight).max()), 0.0)
        x[0, 0] = 4 * given.activation  # out of the range that was measured
        model = product(form, weight)
        assert insert_fp8(model, {NAME: given}) == [NAME]
        onnx.checker.check_model(model, full_check=True)
        session = onnxruntime.InferenceSession(model.SerializeToString())
        (found,) = session.run(None, {"x": x})
        emulated = linear_in_fp8(
            torch.from_numpy(x), torch.from_numpy(weight), given.activation, given.weight
        ).numpy()
        scale = np.abs(emulated).max()
        np.testing.assert_allclose(found / scale, emulated / scale, atol=2e-6)
        exact = x @ weight.T
        error = np.linalg.norm(found[1:] - exact[1:]) / np.linalg.norm(exact[1:])
        assert 1e-3 < error < 0.06  # 3 bits of mantissa: 2 ** -4 at most, a value


def test_the_stored_weights_are_bytes_and_the_old_ones_are_gone() -> None:
    weight = np.random.default_rng().normal(size=(32, 64)).astype(np.float32)
    model = product("Transpose", weight)
    insert_fp8(model, {NAME: LinearRange(1.0, float(np.abs(weight).max()), 0.0)})
    kinds = {tensor.name: tensor for tensor in model.graph.initializer}
    assert "w" not in kinds
    assert kinds["w_fp8"].data_type == TensorProto.FLOAT8E4M3FN
    assert len(kinds["w_fp8"].raw_data) == weight.size
    assert [node.op_type for node in model.graph.node].count("Transpose") == 1


def test_layers_outside_the_decoder_stay_and_one_without_a_range_is_named() -> None:
    weight = np.ones((4, 4), dtype=np.float32)
    head = product("MatMul", weight, name="head")
    before = head.SerializeToString()
    assert insert_fp8(head, {}) == []
    assert head.SerializeToString() == before
    with pytest.raises(ValueError, match=r"up_proj.*'product' has no range"):
        insert_fp8(product("MatMul", weight), {})


@pytest.mark.parametrize("scoring", [WINDOW, LOOK_AHEAD], ids=lambda scoring: scoring.mode)
def test_ranges_are_the_largest_magnitudes_of_the_layers_that_run(scoring: Scoring) -> None:
    pytest.importorskip("modelopt")
    prompts = [fresh_ids(n).astype(np.int64) for n in (40, 70)]
    judge = ScoringModel(small("llama"), scoring).eval()
    seen: dict[str, float] = {}

    def look(name: str):
        def hook(layer, inputs, output) -> None:
            seen[name] = max(seen.get(name, 0.0), float(inputs[0].abs().max()))

        return hook

    for name, layer in judge.decoder.named_modules(prefix="decoder"):
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(look(name))
    with torch.no_grad():
        for prompt in prompts:
            judge(*_prompt_inputs(judge, torch.from_numpy(prompt)[None]))
    model = ScoringModel(small("llama"), scoring).eval()
    found = calibrate(model, prompts, "digest", lambda line: None)
    assert set(found.ranges) == set(seen)
    assert found.tokens == 110
    first = "decoder.layers.0.self_attn.q_proj"
    assert found.ranges[first].activation == pytest.approx(seen[first], rel=1e-5)
    weights = dict(judge.named_parameters())
    for name, one in found.ranges.items():
        assert one.weight == pytest.approx(float(weights[f"{name}.weight"].abs().max()))
        # Behind the first layer what enters has been rounded already.
        assert one.activation == pytest.approx(seen[name], rel=0.3)
        assert 0.005 < one.error < 0.08
    assert Calibration.of_json(found.as_json()) == found

    exported = onnx.load(graph_of("llama", scoring))
    before = {t.name for t in exported.graph.initializer}
    names = insert_fp8(exported, found.ranges)
    onnx.checker.check_model(exported)
    # v, o and the MLP of the last layer score nothing.
    linear = 7 * scoring.layers - (0 if scoring.mode == "lookahead" else 5)
    assert len(names) == len(set(names)) == linear
    stored = [t for t in exported.graph.initializer if t.name.endswith("_fp8")]
    assert len(stored) == linear
    assert len(before - {t.name for t in exported.graph.initializer}) == linear
    assert "head.weight" in before or scoring.mode == "window"


def test_prompts_of_the_calibration_are_spread_and_inside_the_chat_template(byte_level) -> None:
    text = " ".join(str(i) for i in range(4000))
    prompts = calibration_prompts(byte_level, text, sequences=3, length=100)
    assert len(prompts) == 3
    shown = [byte_level.decode(p) for p in prompts]
    assert all(one.startswith("<|im_start|>") for one in shown)
    assert " 5 " in shown[0]
    assert "3999" in shown[2]
    with pytest.raises(InputError, match="at least 16"):
        calibration_prompts(byte_level, "too short")
