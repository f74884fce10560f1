"""The rotation inside a network: transformers' own numbers, and a network that builds."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from tests.target.rope import LLAMA3, YARN, with_rope
from trtllm_specprefill.errors import InputError, UnsupportedModel
from trtllm_specprefill.target.rotary import (
    Rotation,
    TensorRTOperators,
    TorchOperators,
    rotary_table,
)

HEADS, SIZE, LONGEST = 3, 64, 131_072
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "plain": (LlamaConfig, modeling_llama, {"rope_type": "default", "rope_theta": 10_000.0}),
    "llama3": (LlamaConfig, modeling_llama, LLAMA3),
    "linear": (
        LlamaConfig,
        modeling_llama,
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    ),
    "qwen2": (Qwen2Config, modeling_qwen2, {"rope_type": "default", "rope_theta": 1e6}),
    "qwen3": (Qwen3Config, modeling_qwen3, {"rope_type": "default", "rope_theta": 1e6}),
    "yarn": (Qwen2Config, modeling_qwen2, YARN),
}


def config_of(family: str) -> Any:
    kind, _, rope = FAMILIES[family]
    return with_rope(
        kind,
        rope,
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=SIZE,
        max_position_embeddings=LONGEST,
    )


def scattered(n: int) -> torch.Tensor:
    """Increasing positions with gaps, the first and the last possible one among them."""
    drawn = np.random.default_rng().choice(np.arange(1, LONGEST), n - 2, replace=False)
    return torch.from_numpy(np.sort(np.concatenate([[0], drawn, [LONGEST]]))).int()


@pytest.mark.parametrize("family", FAMILIES)
def test_rotation_equals_transformers_at_scattered_positions(family: str) -> None:
    config = config_of(family)
    _, modeling, _ = FAMILIES[family]
    embedding = next(
        getattr(modeling, name) for name in dir(modeling) if name.endswith("RotaryEmbedding")
    )(config=config)
    positions, q = scattered(200), torch.randn(200, HEADS, SIZE)
    cos, sin = embedding(q, positions[None].long())
    heads_first = q.transpose(0, 1)[None]
    expected, _ = modeling.apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
    rotation = Rotation.of(TorchOperators(), rotary_table(config, LONGEST + 1))
    torch.testing.assert_close(
        rotation(q, positions), expected[0].transpose(0, 1), rtol=0, atol=1e-5
    )


def test_the_distance_of_two_tokens_is_all_that_counts() -> None:
    # The judge that knows no library: after rotation q.k depends on the distance alone.
    rotation = Rotation.of(TorchOperators(), rotary_table(config_of("plain"), 4096))
    q, k = torch.randn(1, HEADS, SIZE), torch.randn(1, HEADS, SIZE)

    def product(at: int, distance: int) -> torch.Tensor:
        turned_q = rotation(q, torch.tensor([at + distance]))
        turned_k = rotation(k, torch.tensor([at]))
        return (turned_q * turned_k).sum(-1)

    near, far = product(3, 100), product(3_000, 100)
    torch.testing.assert_close(near, far, rtol=0, atol=1e-3)
    assert not torch.allclose(near, product(3, 101), atol=1e-3)


def test_half_precision_is_rotated_in_float32() -> None:
    rotation = Rotation.of(TorchOperators(), rotary_table(config_of("llama3"), LONGEST + 1))
    positions, q = scattered(64), torch.randn(64, HEADS, SIZE).bfloat16()
    turned = rotation(q, positions)
    assert turned.dtype is torch.bfloat16
    assert torch.equal(turned, rotation(q.float(), positions).bfloat16())


def test_llama3_frequencies_follow_the_published_rule() -> None:
    table = rotary_table(config_of("llama3"), 2)
    base = 500_000.0 ** (-np.arange(0, SIZE, 2) / SIZE)
    wavelength = 2 * np.pi / base
    smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    expected = np.where(
        wavelength > 8192,
        base / 8,
        np.where(wavelength < 2048, base, (1 - smooth) * base / 8 + smooth * base),
    )
    np.testing.assert_allclose(table.signed_sin[1, 0, 1], np.sin(expected), rtol=1e-5)


def test_yarn_scales_both_tables() -> None:
    table = rotary_table(config_of("yarn"), 9)
    scale = 0.1 * np.log(4.0) + 1.0
    norm = table.cos[:, 0, 0] ** 2 + table.signed_sin[:, 0, 1] ** 2
    np.testing.assert_allclose(norm, scale**2, rtol=1e-5)


def test_tables_that_depend_on_the_prompt_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = with_rope(LlamaConfig, rope, hidden_size=128, num_attention_heads=2)
    with pytest.raises(UnsupportedModel, match=r"dynamic.*yarn"):
        rotary_table(config, 16)
    with pytest.raises(InputError, match="positions"):
        rotary_table(config_of("plain"), 0)


# --- TensorRT

rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason="needs the TensorRT-RTX builder: pip install tensorrt-rtx-cu13-bindings",
)


def build(kind_name: str, tokens: tuple[int, int, int]) -> tuple[Any, Any]:
    """The rotation in a TensorRT network with a dynamic number of tokens; the built engine."""
    import tensorrt_rtx_bindings as trt
    import tensorrt_rtx_libs  # noqa: F401

    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    kind = getattr(trt, kind_name)
    x = network.add_input("x", kind, (-1, HEADS, SIZE))
    positions = network.add_input("position_ids", trt.int32, (-1,))
    operators = TensorRTOperators(trt, network)
    rotation = Rotation.of(operators, rotary_table(config_of("llama3"), 4096))
    turned = rotation(x, positions)
    turned.name = "turned"
    network.mark_output(turned)
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    profile.set_shape("x", *((n, HEADS, SIZE) for n in tokens))
    profile.set_shape("position_ids", *((n,) for n in tokens))
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None
    assert turned.dtype == kind
    return network, engine


@rtx
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_the_rotation_builds_at_dynamic_lengths(kind: str) -> None:
    network, engine = build(kind, (1, 512, 8192))
    assert tuple(network.get_output(0).shape) == (-1, HEADS, SIZE)
    assert engine.nbytes > 1 << 20  # the table is in it


@rtx
def test_both_executors_do_the_same_layers() -> None:
    """Every operator that the rotation uses is a layer, and nothing else is added."""
    network, _ = build("bfloat16", (1, 4, 8))
    kinds = [str(network.get_layer(i).type).rsplit(".", 1)[-1] for i in range(network.num_layers)]
    counted = {kind: kinds.count(kind) for kind in set(kinds)}
    assert counted == {
        "CONSTANT": 3,
        "GATHER": 3,
        "SHUFFLE": 2,
        "ELEMENTWISE": 3,
        "CAST": 2,
    }


def test_constants_outlive_the_call_that_made_them() -> None:
    """TensorRT keeps a pointer to the values: they must stay where they are."""
    seen: list[np.ndarray] = []

    class Network:
        def add_constant(self, shape: Any, weights: np.ndarray) -> Any:
            seen.append(weights)
            return SimpleNamespace(get_output=lambda _: weights)

    operators = TensorRTOperators(SimpleNamespace(Weights=lambda values: values), Network())
    view = np.arange(12, dtype=np.float32).reshape(3, 4).T  # not contiguous
    operators.constant(view)
    (held,) = operators._held
    assert held is seen[0]
    assert held.flags.c_contiguous


def test_packed_queries_and_keys_are_rotated_and_values_are_not() -> None:
    rotation = Rotation.of(TorchOperators(), rotary_table(config_of("qwen2"), LONGEST + 1))
    positions = scattered(40)
    q, k = torch.randn(40, 6, SIZE), torch.randn(40, 2, SIZE)
    v = torch.randn(40, 2, SIZE)
    packed = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    expected = [rotation(q, positions), rotation(k, positions), v]
    got = rotation.packed(packed, positions, heads=6, kv_heads=2)
    assert torch.equal(got, torch.cat([x.flatten(1) for x in expected], dim=1))
