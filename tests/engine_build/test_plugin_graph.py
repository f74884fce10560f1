"""The exported graph with the plugins in the function's place, against their registration."""

from __future__ import annotations

import ast
import functools
from dataclasses import replace
from typing import Any

import onnx
import torch

import plugins.importance
from engine_build.graph import export_draft
from engine_build.scoring_model import Scoring
from plugins.importance.launch import default_splits
from plugins.importance.onnx_nodes import DOMAIN, expand_for_tensorrt
from tests.engine_build import drafts
from tests.test_judges import random_model
from trtllm_specprefill.importance_op import head_table

SCORING = Scoring("window", 2, queries=16, pool=5)
# What NVIDIA's parser reads of a node beside the plugin's own attributes.
PARSER = {"plugin_namespace", "aot"}
ATTRIBUTES = {"float": onnx.AttributeProto.FLOAT, "int": onnx.AttributeProto.INT}
TYPES = {
    "FP16": onnx.TensorProto.FLOAT16,
    "BF16": onnx.TensorProto.BFLOAT16,
    "FP8": onnx.TensorProto.FLOAT8E4M3FN,
    "FP32": onnx.TensorProto.FLOAT,
    "INT32": onnx.TensorProto.INT32,
}


@functools.cache
def exported() -> onnx.ModelProto:
    """A draft of two layers, bfloat16 and 64 dimensions a head: what the kernels take."""
    torch.manual_seed(11)
    model = random_model("llama", drafts.Ids(), num_hidden_layers=2, head_dim=64)
    model = replace(model, module=model.module.to(torch.bfloat16), dtype=torch.bfloat16)
    return export_draft(model, SCORING).model_proto


def expanded() -> onnx.ModelProto:
    graph = onnx.ModelProto()
    graph.CopyFrom(exported())
    assert expand_for_tensorrt(graph, sm=90) == SCORING.layers
    return graph


def registration(plugin: str) -> tuple[list[str], dict[str, str], list[list[str]]]:
    """Inputs, attributes with their types, and the columns of types of one plugin.

    Read from the source: its module needs TensorRT.
    """
    path = plugins.importance.__path__[0] + "/tensorrt_plugin.py"
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    made: dict[str, ast.FunctionDef] = {}
    constants: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            constants[ast.unparse(node.targets[0])] = str(node.value.value)
        if isinstance(node, ast.FunctionDef):
            for call in node.decorator_list:
                assert isinstance(call, ast.Call)
                if ast.unparse(call.args[0]) == repr(f"{DOMAIN}::{plugin}"):
                    made[ast.unparse(call.func)] = node
    kinds = {a.arg: ast.unparse(a.annotation or a) for a in made["trtp.register"].args.args}
    inputs = [name for name, kind in kinds.items() if kind == "trtp.TensorDesc"]
    attributes = {name: kind for name, kind in kinds.items() if kind != "trtp.TensorDesc"}
    text = max(
        (
            eval(ast.unparse(node), constants)
            for node in ast.walk(made["trtp.autotune"])
            if isinstance(node, ast.JoinedStr)
        ),
        key=len,
    )
    columns = [part.strip().split("|") for part in text.split(",")]
    return inputs, attributes, columns


def element_types(graph: onnx.GraphProto) -> dict[str, int]:
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in (*graph.value_info, *graph.input, *graph.output):
        types[value.name] = value.type.tensor_type.elem_type
    return types


def by_name(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def test_the_plugins_nodes_have_the_inputs_attributes_and_types_that_are_registered() -> None:
    graph = expanded().graph
    types = element_types(graph)
    nodes = [node for node in graph.node if node.domain == DOMAIN]
    assert [n.op_type for n in nodes] == ["importance_lse", "importance_pool"] * SCORING.layers
    for node in nodes:
        inputs, attributes, columns = registration(node.op_type)
        assert len(node.input) == len(inputs)
        assert len(node.output) == 1
        given = {a.name: a.type for a in node.attribute if a.name not in PARSER}
        assert given == {name: ATTRIBUTES[kind] for name, kind in attributes.items()}
        assert {a.name for a in node.attribute} >= PARSER
        # The parts between the two plugins are known to TensorRT alone.
        used = [types.get(name, onnx.TensorProto.FLOAT) for name in (*node.input, *node.output)]
        choices = max(len(column) for column in columns)
        wide = [column * choices if len(column) == 1 else column for column in columns]
        assert used in [[TYPES[kind] for kind in row] for row in zip(*wide, strict=True)]


def test_the_plugins_are_wired_as_the_node_was() -> None:
    before = [node for node in exported().graph.node if node.domain == DOMAIN]
    after = [node for node in expanded().graph.node if node.domain == DOMAIN]
    rows = len(head_table(6, 2))
    for node, lse, pool in zip(before, after[::2], after[1::2], strict=True):
        assert list(lse.input) == list(node.input[:5])
        assert list(pool.input) == [*node.input[:5], lse.output[0], node.input[5]]
        assert list(pool.output) == list(node.output)
        own = by_name(node)
        assert by_name(lse)["scale"] == by_name(pool)["scale"] == own["scale"]
        assert by_name(lse)["causal"] == by_name(pool)["causal"] == own["causal"] == 1
        assert by_name(pool)["pool"] == own["pool"] == 5
        assert by_name(lse)["splits"] == by_name(pool)["splits"] == default_splits(rows)
        assert by_name(lse)["sm"] == by_name(pool)["sm"] == 90


def test_the_plugin_form_carries_no_function_that_a_parser_could_take_instead() -> None:
    assert [f.name for f in exported().functions if f.domain == DOMAIN] == ["importance_layer"]
    graph = expanded()
    assert not [f for f in graph.functions if f.domain == DOMAIN]
    onnx.checker.check_model(graph)


def test_the_function_has_the_nodes_inputs_and_attributes_in_their_order() -> None:
    (function,) = (f for f in exported().functions if f.domain == DOMAIN)
    node = next(n for n in exported().graph.node if n.domain == DOMAIN)
    assert len(node.input) == len(function.input) == 6
    assert set(function.attribute) == {a.name for a in node.attribute}
    pool_inputs, _, _ = registration("importance_pool")
    assert [name for name in pool_inputs if name != "parts"] == list(function.input)
