"""The model classes for `trtllm-build`, over the recorded layers and a real builder."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_build.target import ENGINE_ENVIRONMENT, ROTATED
from tests.target.conftest import install, manifest_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason="needs the TensorRT-RTX builder: pip install tensorrt-rtx-cu13-bindings",
)
CONFIGS = Path(__file__).parent / "configs"


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    import tensorrt_rtx_libs  # noqa: F401

    monkeypatch.setitem(sys.modules, "tensorrt", importlib.import_module("tensorrt_rtx_bindings"))
    install("recorded_1_2", monkeypatch)
    name = "engine_build.rotated_models"
    monkeypatch.delitem(sys.modules, name, raising=False)
    model = str(CONFIGS / "llama-3.1-70b")
    manifest_of("trtllm_executor", model=model, positions=2048, kv_tokens=512).write(tmp_path)
    monkeypatch.setenv(ENGINE_ENVIRONMENT, str(tmp_path))
    yield importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)


def network_of(classes: Any, kind: Any) -> tuple[Any, Any, Any, list[Any]]:
    import tensorrt_rtx_bindings as trt

    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    from tensorrt_llm import _common
    from tensorrt_llm.functional import Tensor

    _common.network = network
    # One rank of a tensor-parallel 70B: 8 of 64 heads, 1 of 8 KV heads.
    config = SimpleNamespace(
        num_attention_heads=8, num_key_value_heads=1, head_size=128, position_embedding_type=None
    )
    model = kind(config)
    layers = [Tensor(network.add_input(f"qkv_{i}", trt.bfloat16, (-1, 10 * 128))) for i in range(2)]
    positions = Tensor(network.add_input("position_ids", trt.int32, (-1,)))
    out = model.forward(None, position_ids=positions, hidden_states=layers)
    return builder, network, config, out


@pytest.mark.parametrize("name", sorted(set(ROTATED.values())))
def test_every_layer_of_a_model_rotates_in_a_network_that_builds(classes: Any, name: str) -> None:
    import tensorrt_rtx_bindings as trt
    from tensorrt_llm.functional import PositionEmbeddingType
    from tensorrt_llm.layers import attention

    before = attention.gpt_attention
    builder, network, config, out = network_of(classes, getattr(classes, name))
    assert attention.gpt_attention is before  # nothing stays behind
    assert config.position_embedding_type is PositionEmbeddingType.learned_absolute
    for tensor in out:
        network.mark_output(tensor.trt_tensor)
        assert tuple(tensor.trt_tensor.shape) == (-1, 10 * 128)
        assert tensor.trt_tensor.dtype == trt.bfloat16
    build = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for i in range(2):
        profile.set_shape(f"qkv_{i}", (1, 1280), (256, 1280), (8192, 1280))
    profile.set_shape("position_ids", (1,), (256,), (8192,))
    build.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, build) is not None
    tables = [
        network.get_layer(i)
        for i in range(network.num_layers)
        if tuple(network.get_layer(i).get_output(0).shape) == (2048, 1, 1, 64)
    ]
    assert len(tables) == 1  # one table serves all layers


def test_a_plugin_that_would_rotate_again_is_refused(classes: Any) -> None:
    class Stubborn(classes.RotatedLlama):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            from tensorrt_llm.functional import PositionEmbeddingType

            config.position_embedding_type = PositionEmbeddingType.rope_gpt_neox

    with pytest.raises(ValueError, match="a second time"):
        network_of(classes, Stubborn)


def test_a_rank_without_position_ids_is_refused(classes: Any) -> None:
    model = classes.RotatedLlama(SimpleNamespace(position_embedding_type=None))
    with pytest.raises(ValueError, match="pipeline parallelism"):
        model.forward(None, hidden_states=[])


def test_the_class_file_can_be_pickled_by_its_workers(classes: Any) -> None:
    # As trtllm-build loads it: a file, under the name `models`.
    path = Path(classes.__file__).with_name("model_classes.py")
    spec = importlib.util.spec_from_file_location("models", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    for name in set(ROTATED.values()):
        assert getattr(loaded, name).__module__ == "engine_build.rotated_models"
