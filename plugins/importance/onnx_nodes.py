"""The torch op in ONNX: one node on export, and that node as the two plugins TensorRT knows.

    program = torch.onnx.export(model, inputs, dynamo=True, custom_translation_table=translations())
    expand_for_tensorrt(program.model_proto)

`translations` makes each call of `specprefill::importance_layer` one node of that name and domain.
A compiled TensorRT plugin is one kernel, so `expand_for_tensorrt` replaces each such node by
`importance_lse` and `importance_pool`, marked as NVIDIA's parser wants plugins with ahead-of-time
implementations marked (TensorRT, samples/python/quickly_deployable_plugins): `plugin_namespace`
names the plugin's namespace and `aot` asks for the compiled form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import torch
from onnx import helper

from plugins.importance.launch import default_splits

DOMAIN = "specprefill"


def translations() -> dict[Any, Callable[..., Any]]:
    """What `torch.onnx.export(custom_translation_table=...)` needs; requires onnxscript."""
    from onnxscript.values import Op, Opset

    node = Op(Opset(DOMAIN, 1), "importance_layer", _schema())

    def importance_layer(
        queries: Any,
        keys: Any,
        lengths: Any,
        heads: Any,
        key_scale: Any,
        running: Any,
        scale: float,
        pool: int,
        causal: bool,
    ) -> Any:
        return node(
            queries,
            keys,
            lengths,
            heads,
            key_scale,
            running,
            scale=scale,
            pool=pool,
            causal=int(causal),
        )

    return {torch.ops.specprefill.importance_layer.default: importance_layer}


def _schema() -> onnx.defs.OpSchema:
    """The node's inputs and attributes: those of the torch op."""
    schema = onnx.defs.OpSchema
    kinds = {
        "queries": "T",
        "keys": "K",
        "lengths": "tensor(int32)",
        "heads": "tensor(int32)",
        "key_scale": "tensor(float)",
        "running": "tensor(float)",
    }
    floats = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    return schema(
        "importance_layer",
        DOMAIN,
        1,
        inputs=[schema.FormalParameter(name, kind) for name, kind in kinds.items()],
        outputs=[schema.FormalParameter("out", "tensor(float)")],
        type_constraints=[("T", floats, ""), ("K", [*floats, "tensor(float8e4m3fn)"], "")],
        attributes=[
            schema.Attribute("scale", schema.AttrType.FLOAT),
            schema.Attribute("pool", schema.AttrType.INT),
            schema.Attribute("causal", schema.AttrType.INT),
        ],
    )


def expand_for_tensorrt(model: onnx.ModelProto, sm: int = 0) -> int:
    """Replace every `importance_layer` node by the two plugin nodes; returns how many there were.

    A function that explains the node to other runtimes goes with it. sm: compute capability to
    compile for, 0 for the GPU that builds the engine. Changes `model`.
    Raises `ValueError` if the heads of a layer are not a constant of the model.
    """
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in model.graph.node:
        if node.op_type == "Constant":
            shapes[node.output[0]] = list(node.attribute[0].t.dims)
        if (node.domain, node.op_type) != (DOMAIN, "importance_layer"):
            nodes.append(node)
            continue
        *inputs, running = node.input
        heads = node.input[3]
        if heads not in shapes:
            raise ValueError(f"heads: {heads!r} of node {node.name!r} is not a constant")
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        shared = {
            "scale": given["scale"],
            "causal": given["causal"],
            "splits": default_splits(shapes[heads][0]),
            "sm": sm,
            "plugin_namespace": DOMAIN,
            "aot": 1,
        }
        name = node.name or f"importance_layer_{count}"
        parts = f"{node.output[0]}_parts"
        nodes.append(_node("importance_lse", inputs, parts, name, shared))
        nodes.append(
            _node(
                "importance_pool",
                [*inputs, parts, running],
                node.output[0],
                name,
                shared | {"pool": given["pool"]},
            )
        )
        count += 1
    others = [f for f in model.functions if (f.domain, f.name) != (DOMAIN, "importance_layer")]
    del model.functions[:]
    model.functions.extend(others)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return count


def _node(
    plugin: str, inputs: list[str], output: str, name: str, attributes: dict[str, Any]
) -> onnx.NodeProto:
    return helper.make_node(
        plugin, inputs, [output], name=f"{name}/{plugin}", domain=DOMAIN, **attributes
    )
