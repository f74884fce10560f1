"""A draft as one ONNX graph: exported, with importance as a node that also explains itself.

Each layer's importance is one node `specprefill::importance_layer` (`plugins.importance`), and
the graph holds a function of that name made of standard operators. So onnxruntime expands the
function, a TensorRT without plugins builds it, and `plugins.importance.onnx_nodes.
expand_for_tensorrt` puts the kernels in its place.

The function holds one layer's weights, `[B, R * G, W, N]` float32, and nothing that grows with
layers. It is looser than the op where logits are NaN or infinite: what comes out of such a row
is not specified, other sequences are not affected.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch

from engine_build.scoring_model import Scoring, ScoringModel
from plugins.importance.onnx_nodes import DOMAIN, translations
from trtllm_specprefill.errors import SpecPrefillError
from trtllm_specprefill.importance_op import check_pool_width
from trtllm_specprefill.models import Model

OPSET = 23  # the first with `Attention`; FP8 quantisation needs 19
MODULES = "pkg.torch.onnx.name_scopes"  # torch's note of the modules that a node comes from
# What one file of protobuf may hold, less what the graph itself takes.
_ONE_FILE = 2**31 - 2**26


class ExportFailed(SpecPrefillError):
    """torch could not turn the model into a graph."""


@dataclass(frozen=True)
class Axes:
    """Sizes of the example the export is traced with. No graph depends on them."""

    batch: int = 2
    tokens: int = 72
    capacity: int = 91


def export_draft(
    model: Model, scoring: Scoring, axes: Axes | None = None
) -> torch.onnx.ONNXProgram:
    """The graph of a draft, its weights in `model`'s dtype; see `engine_build.scoring_model`.

    Raises what `ScoringModel` raises, and `ExportFailed` when torch cannot export it.
    """
    return export_module(ScoringModel(model, scoring).eval(), axes)


def export_module(module: ScoringModel, axes: Axes | None = None) -> torch.onnx.ONNXProgram:
    """The same of a module that has been made already, for one whose layers were changed since."""
    inputs, shapes = _example(module, axes or Axes())
    names_in, names_out = names(module)
    try:
        with torch.no_grad():
            program = torch.onnx.export(
                module,
                inputs,
                dynamo=True,
                opset_version=OPSET,
                input_names=names_in,
                output_names=names_out,
                dynamic_shapes={"inputs": shapes},
                custom_translation_table=translations(),
                optimize=False,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ExportFailed(f"torch cannot export the draft: {error}") from error
    assert program is not None
    _simplify(program.model)
    _add_function(program, importance_function(module.scoring.pool, not module.looks_ahead))
    return program


def names(module: ScoringModel) -> tuple[list[str], list[str]]:
    """The graph's inputs and outputs in their order."""
    if not module.looks_ahead:
        return ["input_ids", "position_ids", "lengths", "voters"], ["importance"]
    layers = range(module.scoring.layers)
    given = ["input_ids", "position_ids", "lengths", "prompt_lengths", "past_lengths"]
    past = [f"past_{kind}.{i}" for i in layers for kind in ("keys", "values")]
    present = [f"present_{kind}.{i}" for i in layers for kind in ("keys", "values")]
    return [*given, *past], ["importance", "next_token", *present]


def save_graph(program: torch.onnx.ONNXProgram, path: Path) -> None:
    """Write a graph; its weights go beside it, to `path` + `.data`, where one file is too small.

    Raises `OSError` when it cannot be written.
    """
    tensors = (value.const_value for value in program.model.graph.initializers.values())
    size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    program.save(path, external_data=size > _ONE_FILE)


def save_model(model: onnx.ModelProto, path: Path) -> None:
    """The same for a graph that was changed since; empties `model` of what it writes beside it."""
    weights = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    if weights <= _ONE_FILE:
        onnx.save(model, path)
    else:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")


def importance_function(pool: int, causal: bool) -> onnx.FunctionProto:
    """`specprefill::importance_layer` in standard operators, for one pooling width and mask.

    Its inputs and attributes are those of the node; `pool` and `causal` of a node must be those
    it was made for, as every layer's are.
    """
    check_pool_width(pool)
    text = _FUNCTION.format(
        domain=DOMAIN,
        opset=OPSET,
        pool=pool,
        half=pool // 2,
        stop=_CAUSAL_STOP if causal else _STOP,
    )
    return onnx.parser.parse_function(text)


# stop [B, 1, W or 1, 1]: the first key that a query does not see.
_STOP = "stop = Unsqueeze (lengths, one_two_three)"
_CAUSAL_STOP = """
    w_at = Squeeze (w)
    w_order = Range (zero, w_at, one)
    w_behind = Sub (w_order, w_at)
    w_from_end = Add (w_behind, one)
    w_small = Cast <to = 6> (w_from_end)
    w_row = Unsqueeze (w_small, first)
    lengths_column = Unsqueeze (lengths, second)
    stops = Add (lengths_column, w_row)
    stop = Unsqueeze (stops, one_three)
"""
_FUNCTION = """
<domain: "{domain}", opset_import: ["" : {opset}]>
importance_layer <scale, pool, causal>
    (queries, keys, lengths, heads, key_scale, running) => (out)
{{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    first = Constant <value_ints = [0]> ()
    second = Constant <value_ints = [1]> ()
    one_two = Constant <value_ints = [1, 2]> ()
    one_three = Constant <value_ints = [1, 3]> ()
    one_two_three = Constant <value_ints = [1, 2, 3]> ()
    rest = Constant <value_ints = [-1]> ()
    end = Constant <value_ints = [9223372036854775807]> ()
    b = Shape <start = 0, end = 1> (queries)
    r = Shape <start = 0, end = 1> (heads)
    w = Shape <start = 2, end = 3> (queries)
    n = Shape <start = 2, end = 3> (keys)
    d = Shape <start = 3, end = 4> (queries)

    table = Cast <to = 7> (heads)
    key_column = Slice (table, first, second, second)
    key_heads = Squeeze (key_column, second)
    groups = Slice (table, second, end, second)
    group_heads = Reshape (groups, rest)
    fills = Less (group_heads, zero)
    query_heads = Where (fills, zero, group_heads)
    scores = Not (fills)
    scores_wide = Unsqueeze (scores, one_two)

    factor = Constant <value_float: float = @scale> ()
    head_scales = Gather <axis = 0> (key_scale, key_heads)
    factors = Mul (head_scales, factor)
    factors_wide = Unsqueeze (factors, one_two)
    q_heads = Gather <axis = 1> (queries, query_heads)
    q_float = Cast <to = 1> (q_heads)
    q_shape = Concat <axis = 0> (b, r, rest, d)
    q_rows = Reshape (q_float, q_shape)
    q = Mul (q_rows, factors_wide)
    k_heads = Gather <axis = 1> (keys, key_heads)
    k_float = Cast <to = 1> (k_heads)
    k = Transpose <perm = [0, 1, 3, 2]> (k_float)
    products = MatMul (q, k)
    by_head = Concat <axis = 0> (b, rest, w, n)
    logits = Reshape (products, by_head)

    n_at = Squeeze (n)
    order = Range (zero, n_at, one)
    places = Cast <to = 6> (order)
    {stop}
    seen = Less (places, stop)
    hidden = Constant <value_float = -3.0e38> ()
    nothing = Constant <value_float = 0.0> ()
    masked = Where (seen, logits, hidden)
    softmax = Softmax <axis = -1> (masked)
    counts = And (seen, scores_wide)
    weights = Where (counts, softmax, nothing)
    as_rows = Concat <axis = 0> (b, rest, n)
    rows = Reshape (weights, as_rows)
    pooled_rows = AveragePool
        <kernel_shape = [{pool}], pads = [{half}, {half}], count_include_pad = 1> (rows)
    pooled = Reshape (pooled_rows, by_head)
    best = ReduceMax <keepdims = 0> (pooled, second)
    raised = Max (best, running)
    valid_stop = Unsqueeze (lengths, one_two)
    valid = Less (places, valid_stop)
    out = Where (valid, raised, nothing)
}}
"""


def _example(
    module: ScoringModel, axes: Axes
) -> tuple[tuple[torch.Tensor, ...], tuple[dict[int, Any], ...]]:
    """Inputs to trace with, and which of their axes are free."""
    b, s, c = axes.batch, axes.tokens, axes.capacity
    batch, tokens, capacity = (torch.export.Dim(x) for x in ("batch", "tokens", "capacity"))
    per_row, per_token = {0: batch}, {0: batch, 1: tokens}
    ids = torch.zeros(b, s, dtype=torch.int64)
    lengths = torch.full((b,), s, dtype=torch.int32)
    if not module.looks_ahead:
        voters = torch.full((b,), module.scoring.queries, dtype=torch.int32)
        places = torch.arange(s).expand(b, s).contiguous()
        return (ids, places, lengths, voters), (per_token, per_token, per_row, per_row)
    nothing = torch.zeros(b, dtype=torch.int32)
    places = torch.arange(s).expand(b, s).contiguous()
    size = (b, module.kv_heads, c, module.head_dim)
    past = [torch.zeros(size, dtype=module.dtype) for _ in range(2 * module.scoring.layers)]
    per_slot = {0: batch, 2: capacity}
    return (
        # Each a tensor of its own: an export takes the same one twice for one input.
        (ids, places, lengths, lengths.clone(), nothing, *past),
        (per_token, per_token, per_row, per_row, per_row, *[per_slot] * len(past)),
    )


def _simplify(model: Any) -> None:
    """Inline, fold constants, make each RMS norm one node; `model` is an `onnx_ir.Model`.

    What torch's own `optimize` adds are a handful of merged shapes, in time that grows with the
    square of the nodes: of 30 layers the export takes half as long without it.
    """
    import onnx_ir.passes.common as passes
    from onnx_ir.passes import Sequential
    from onnxscript.optimizer import fold_constants
    from onnxscript.rewriter import onnx_fusions

    passes.InlinePass()(model)
    passes.RemoveUnusedNodesPass()(model)
    fold_constants(model)
    onnx_fusions.fuse(model)
    fold_constants(model)
    Sequential(
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        passes.RemoveUnusedOpsetsPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )(model)


def _add_function(program: torch.onnx.ONNXProgram, function: onnx.FunctionProto) -> None:
    """Give the graph the function, and take from its nodes where this machine keeps the code.

    What stays of torch's notes are the modules that a node comes from, for `quantise`.
    """
    import onnx_ir

    made = onnx_ir.serde.deserialize_function(function)
    program.model.functions[made.identifier()] = made
    for node in program.model.graph:
        modules = node.metadata_props.get(MODULES)
        node.metadata_props.clear()
        if modules is not None:
            node.metadata_props[MODULES] = modules
        node.doc_string = None
