"""Builds the plugin pair under the stand-in and prints what TensorRT would launch, as JSON.

    python -m tests.plugins.drive_plugin BINDINGS < requests.json

Runs in a process of its own, since kernels are compiled here and interpreted elsewhere. A request
names dtypes, head counts and attributes, and the shapes to evaluate the launches for.
"""

import json
import sys
from pathlib import Path

from tests.plugins import tensorrt_standin as standin


def build(request: dict) -> dict:
    import tensorrt as trt

    from plugins.importance import kernels
    from plugins.importance.aot import parameters
    from plugins.importance.tensorrt_plugin import add_importance_layer

    sizes, attributes = request["sizes"], request["attributes"]
    network = trt.INetworkDefinition(
        {"B": (1, 1, 8), "W": (1, 8, request["most_queries"]), "N": (1, 4096, 1_048_576)}
    )
    queries, keys, lengths, heads, key_scale, running = (
        network.add_input(name, getattr(trt.DataType, dtype), shape)
        for name, dtype, shape in (
            ("queries", request["query_type"], ("B", sizes["Hq"], "W", sizes["D"])),
            ("keys", request["key_type"], ("B", sizes["Hkv"], "N", sizes["D"])),
            ("lengths", "INT32", ("B",)),
            ("heads", "INT32", (sizes["R"], 1 + sizes["G"])),
            ("key_scale", "FLOAT", (sizes["Hkv"],)),
            ("running", "FLOAT", ("B", "W", "N")),
        )
    )
    out = add_importance_layer(
        network, queries, keys, lengths, heads, key_scale, running, sm=90, **attributes
    )
    network.build()

    def value(symbol, shape):
        return symbol.expr.evaluate(shape)

    layers = []
    for layer in network.layers:
        name, ptx = layer.kernel
        params = layer.params
        layers.append(
            {
                "kernel": name,
                "ptx_is_text": ptx.startswith(b"//"),
                "parameters": parameters(ptx.decode()),
                "source_parameters": [
                    p.name for p in getattr(kernels, name).params if not p.is_constexpr
                ],
                "inputs": [t.name for t in layer.inputs],
                "outputs": [t.name for t in layer.outputs],
                "output_type": layer.outputs[0].dtype.name,
                "combinations": [[t.name for t, _ in c] for c in layer.combinations],
                "launches": [
                    {
                        "grid": [value(getattr(params, f"grid_{i}"), shape) for i in "xyz"],
                        "block": [value(getattr(params, f"block_{i}"), shape) for i in "xyz"],
                        "shared_memory": value(params.shared_mem, shape),
                        "scalars": [
                            value(layer.scalars.expressions[i], shape)
                            for i in range(layer.scalars.nbSymExprs)
                        ],
                        "output_shape": [d.evaluate(shape) for d in layer.outputs[0].dims],
                    }
                    for shape in request["shapes"]
                ],
            }
        )
    return {"layers": layers, "out_shape": list(out.shape)}


def answer(request: dict) -> dict:
    try:
        return build(request)
    except (ValueError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    standin.install(Path(sys.argv[1]))
    print(json.dumps([answer(request) for request in json.load(sys.stdin)]))
