"""The torch op: its CPU form, its fake form, its agreement with the kernels, and its ONNX node."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from plugins.importance import importance_layer, torch_op
from plugins.importance.launch import default_splits
from plugins.importance.torch_op import kernel_layer
from tests.plugins.layers import NAN, ROOT, SPLITS, Layer, interpreted, relative_error
from tests.test_judges import Spelling, random_model
from trtllm_specprefill import importance_op
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.importance import RunningImportance, reference_importance
from trtllm_specprefill.settings import Settings

FP8 = torch.float8_e4m3fn


def ragged(query_type: torch.dtype, key_type: torch.dtype, causal: bool) -> Layer:
    return Layer(
        torch.randn(3, 6, 4, 80).to(query_type),
        torch.randn(3, 2, 110, 80).to(key_type),
        causal=causal,
        lengths=[110, 0, 37],
        heads=(0, 2, 5),
        running=torch.rand(3, 4, 110) / 110,
        key_scale=0.5 + torch.rand(2),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("query_type", "key_type"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, FP8),
    ],
)
def test_cpu_form_agrees_with_float64_and_with_the_kernels(
    query_type: torch.dtype, key_type: torch.dtype, causal: bool
) -> None:
    torch.manual_seed(1)
    layer = ragged(query_type, key_type, causal)
    assert relative_error(layer.plain(), layer.float64()) <= 1e-5
    assert relative_error(layer.kernels(), layer.plain().double()) <= 1e-2


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_cpu_form_does_not_depend_on_its_block_of_keys(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    layer = ragged(torch.float32, torch.float32, True)
    whole = layer.plain()
    monkeypatch.setattr(importance_op, "_key_block", lambda rows, device: block)
    assert torch.allclose(layer.plain(), whole, rtol=1e-5, atol=0)


def test_layers_in_turn_give_what_the_library_defines_and_streams() -> None:
    torch.manual_seed(3)
    stack = [(torch.randn(1, 6, 5, 64), torch.randn(1, 2, 150, 64)) for _ in range(3)]
    running = None
    streamed = RunningImportance(150)
    for queries, keys in stack:
        running = importance_layer(queries, keys, running, scale=0.125)
        streamed.add(0, queries[0], keys[0], 0.125)
    got = running[0].double().mean(0)
    expected = reference_importance(
        [q[0].numpy() for q, _ in stack], [k[0].numpy() for _, k in stack], 0.125
    )
    assert relative_error(got, torch.from_numpy(expected)) <= 1e-5
    assert relative_error(torch.from_numpy(streamed.scores()), got) <= 1e-5


def test_cpu_form_treats_bad_values_as_the_kernels_do() -> None:
    torch.manual_seed(4)
    layer = Layer(torch.randn(2, 4, 3, 64), torch.randn(2, 2, 90, 64), lengths=[80, 90])
    layer.keys[0, 0, 85] = NAN
    layer.keys[0, 1, 3, 7] = float("-inf")
    layer.queries[1, 3, 2, 0] = float("inf")
    layer.running[1, 0, 5] = NAN
    assert torch.equal(layer.kernels().isnan(), layer.plain().isnan())
    assert layer.plain()[0, :, :80].isnan().all()
    assert layer.plain()[1, 2].isnan().all()


def test_cuda_form_by_the_kernels_agrees_with_the_plain_form() -> None:
    torch.manual_seed(6)
    layer = ragged(torch.bfloat16, FP8, True)
    got = interpreted(kernel_layer, *layer.inputs(), layer.scale, layer.pool, layer.causal)
    assert not torch.equal(got, layer.plain())  # other sums, so not the plain form itself
    assert relative_error(got, layer.plain().double()) <= 1e-2


def draft_by_both_forms(
    ids: np.ndarray, settings: Settings, seed: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """A small draft's scores by the plain form and by the kernels, and how often those ran."""
    torch.manual_seed(seed)
    draft = TorchDraft(random_model("llama", Spelling(), num_hidden_layers=2, head_dim=64))
    ran = []

    def counted(queries: torch.Tensor, *rest: Any) -> torch.Tensor:
        torch_op.problem_of(queries, rest[0], rest[2], *rest[5:])  # raises what it falls back on
        ran.append(queries.shape)
        return kernel_layer(queries, *rest)

    torch_op.default_splits = lambda rows: SPLITS
    scores = []
    for form in (importance_op.plain_layer, counted):
        torch.library.register_kernel("specprefill::importance_layer", "cpu", form)
        scores.append(draft.score(ids, settings).scores)
    return scores[0], scores[1], len(ran)


@pytest.mark.parametrize(
    ("knobs", "calls"),
    [
        ({"scoring": "window", "window": 8, "draft_window": 0, "draft_layers": 2}, 2),
        ({"scoring": "window", "window": 8, "draft_window": 64, "draft_layers": 2}, 4),
        ({"scoring": "lookahead", "look_ahead": 2}, 6),
    ],
)
def test_a_whole_pass_of_the_draft_goes_through_the_kernels(knobs: dict, calls: int) -> None:
    ids = np.random.default_rng().integers(2, 200, 130).astype(np.int32)
    settings = Settings.of(**{"draft_overlap": 16, "draft_tail": 16, **knobs})
    plain, by_kernels, ran = interpreted(draft_by_both_forms, ids, settings, 12)
    assert ran == calls
    assert not np.array_equal(plain, by_kernels)  # other sums, so not the plain form itself
    assert np.allclose(plain, by_kernels, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("dtype", "dim", "pool", "word"),
    [
        (torch.float32, 32, 13, "dim: 32"),
        (torch.bfloat16, 64, 255, "pool: 255"),
        (torch.float64, 64, 13, "float64"),
    ],
)
def test_cuda_form_leaves_to_the_plain_form_what_the_kernels_do_not_take_and_says_so(
    dtype: torch.dtype, dim: int, pool: int, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch_op._say_once.cache_clear()
    layer = Layer(torch.randn(1, 4, 3, dim, dtype=dtype), torch.randn(1, 2, 50, dim, dtype=dtype))
    for _ in range(2):
        got = kernel_layer(*layer.inputs(), layer.scale, pool, True)
    layer.pool, layer.causal = pool, True
    assert torch.equal(got, layer.plain())
    assert relative_error(got, layer.float64()) <= 1e-5
    assert [word in record.getMessage() for record in caplog.records] == [True]


def test_kernels_refuse_what_the_op_refuses_and_do_not_fall_back() -> None:
    layer = Layer(torch.randn(1, 4, 3, 32), torch.randn(1, 2, 50, 32))
    with pytest.raises(InputError, match="pool"):
        kernel_layer(*layer.inputs(), layer.scale, 4, False)


HAS_CUDA_FORM = """
import {first}
import torch
from trtllm_specprefill import importance_op
has = torch._C._dispatch_has_kernel_for_dispatch_key
print(has("specprefill::importance_layer", "CUDA"))
print(importance_op.use_kernels())
print(has("specprefill::importance_layer", "CUDA"))
"""


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("torch", ["False", "True", "True"]),
        ("plugins.importance", ["True", "True", "True"]),
        # What an import finds when the name is blocked: nothing, as where it is not installed.
        ("sys; sys.modules['plugins'] = None; import torch", ["False", "False", "False"]),
        ("sys; sys.modules['triton'] = None; import torch", ["False", "False", "False"]),
    ],
)
def test_kernels_are_the_ops_cuda_form_where_plugins_and_triton_are_installed(
    first: str, expected: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HAS_CUDA_FORM.format(first=first)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.split() == expected
    # A log line of the library's goes to stderr unless an application takes it.
    assert ("without the kernels" in done.stderr) == ("False" in expected[1])


def test_op_declares_what_it_does() -> None:
    torch.manual_seed(5)
    layer = ragged(torch.bfloat16, torch.bfloat16, True)
    torch.library.opcheck(
        torch.ops.specprefill.importance_layer.default,
        (*layer.inputs(), layer.scale, layer.pool, layer.causal),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"keys": torch.randn(1, 2, 9, 80)}, "keys"),
        ({"running": torch.zeros(1, 4, 8)}, "running"),
        ({"lengths": torch.tensor([9, 9])}, "lengths"),
        ({"queries": torch.randn(1, 4, 65, 64), "running": None}, "W = 65"),
        ({"key_scale": torch.ones(3)}, "expand"),
        ({"pool": 4}, "pool"),
        ({"heads": [4]}, "heads"),
        ({"keys": torch.randn(1, 2, 9, 64).half()}, "keys: got torch.float16"),
        ({"keys": torch.randn(1, 2, 9, 64).double()}, "keys: got torch.float64"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(change: dict, word: str) -> None:
    arguments = {
        "queries": torch.randn(1, 4, 4, 64),
        "keys": torch.randn(1, 2, 9, 64),
        "running": torch.zeros(1, 4, 9),
        "scale": 0.125,
    }
    with pytest.raises((ValueError, RuntimeError), match=word):
        importance_layer(**(arguments | change))


class Draft(torch.nn.Module):
    """Two layers of scoring, as a draft would export them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("heads", torch.tensor([[0, 0, 1], [1, 2, 3]], dtype=torch.int32))
        self.register_buffer("key_scale", torch.ones(2))

    def forward(
        self, queries: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        running = torch.zeros(queries.shape[0], queries.shape[2], keys.shape[2])
        for _ in range(2):
            running = torch.ops.specprefill.importance_layer(
                queries, keys, lengths, self.heads, self.key_scale, running, 0.125, 13, False
            )
            queries, keys = queries + 1, keys - 1
        return running


@pytest.fixture(scope="module")
def exported() -> Any:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from plugins.importance.onnx_nodes import translations

    b, w, n = (torch.export.Dim(x) for x in ("B", "W", "N"))
    program = torch.onnx.export(
        Draft().eval(),
        (torch.randn(2, 4, 3, 64), torch.randn(2, 2, 40, 64), torch.full((2,), 40).int()),
        dynamo=True,
        dynamic_shapes=({0: b, 2: w}, {0: b, 2: n}, {0: b}),
        custom_translation_table=translations(),
        verbose=False,
    )
    onnx.checker.check_model(program.model_proto)
    return program.model_proto


def test_each_layer_exports_as_one_node_with_dynamic_shapes(exported: Any) -> None:
    nodes = [n for n in exported.graph.node if n.domain == "specprefill"]
    assert [n.op_type for n in nodes] == ["importance_layer"] * 2
    assert {a.name for a in nodes[0].attribute} == {"scale", "pool", "causal"}
    dims = exported.graph.output[0].type.tensor_type.shape.dim
    assert all(d.dim_param for d in dims)


def test_nodes_expand_to_the_plugins_with_their_attributes(exported: Any) -> None:
    import onnx

    from plugins.importance.onnx_nodes import expand_for_tensorrt

    model = onnx.ModelProto()
    model.CopyFrom(exported)
    assert expand_for_tensorrt(model, sm=90) == 2
    onnx.checker.check_model(model)
    nodes = [n for n in model.graph.node if n.domain == "specprefill"]
    assert [n.op_type for n in nodes] == ["importance_lse", "importance_pool"] * 2
    lse, pool = nodes[:2]
    assert list(pool.input) == [*lse.input, lse.output[0], pool.input[6]]
    assert nodes[3].input[6] == pool.output[0]
    values = {a.name: onnx.helper.get_attribute_value(a) for a in pool.attribute}
    assert values.pop("scale") == pytest.approx(0.125)
    assert values == {
        "pool": 13,
        "causal": 0,
        "splits": default_splits(2),
        "sm": 90,
        "plugin_namespace": b"specprefill",
        "aot": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_the_longest_prompt_is_scored_right_at_every_position(causal: bool) -> None:
    """N of 1,048,576: the last that the op takes."""
    torch.manual_seed(7)
    n, w, dim, pool = importance_op.MAX_TOKENS, 2, 16, 13
    queries, keys = torch.randn(1, 2, w, dim), torch.randn(1, 1, n, dim)
    got = importance_layer(queries, keys, scale=dim**-0.5, pool=pool, causal=causal)[0]
    assert got.shape == (w, n)
    logits = dim**-0.5 * queries[0].double() @ keys[0].double().transpose(1, 2)
    if causal:
        logits[:, 0, n - 1] = float("-inf")
    weights = torch.nn.functional.pad(logits.softmax(-1), (pool // 2, pool // 2))
    assert importance_op._key_block(2 * w, keys.device) < n  # several blocks
    pooled = sum(weights[..., i : n + i] for i in range(pool)).amax(0) / pool
    assert relative_error(got, pooled) <= 1e-5
