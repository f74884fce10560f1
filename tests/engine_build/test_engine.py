"""The builder's calls: TensorRT's recorded API, and TensorRT for RTX itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx
import pytest

from engine_build import engine
from engine_build.commands import BuildFailed
from engine_build.engine import Profile, build_engine, check_capabilities
from engine_build.scoring_model import Scoring
from plugins.importance import onnx_nodes
from tests.contracts import onnx_engine
from tests.contracts.tensorrt_draft import PREFILL, graph_of, install
from tests.engine_build.drafts import files_of_at_most, manifest_of, small
from trtllm_specprefill.draft.bindings import load_bindings
from trtllm_specprefill.draft.footprint import footprint_of
from trtllm_specprefill.draft.memory import tensor_bytes
from trtllm_specprefill.errors import InputError

WINDOW = Scoring("window", 2, queries=24)


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(monkeypatch)


@pytest.fixture
def rtx() -> Any:
    pytest.importorskip("tensorrt_rtx_bindings")
    return load_bindings("tensorrt-rtx")


def build(trt: Any, graph: Path, **others: Any) -> Any:
    given: dict[str, Any] = {"sm": (), "timing_cache": None, "progress": lambda line: None}
    return build_engine(trt, "tensorrt", graph, [PREFILL], **{**given, **others})


def changed(tmp_path: Path, change: Any) -> Path:
    model = onnx.load(graph_of("llama", WINDOW))
    change(model)
    onnx.save(model, tmp_path / "changed.onnx")
    return tmp_path / "changed.onnx"


def unknown_operator(model: onnx.ModelProto) -> None:
    node = model.graph.node[3]
    node.domain, node.op_type, node.name = "elsewhere", "Nothing", "the_third"


def test_a_node_the_parser_does_not_know_is_named(trt: Any, tmp_path: Path) -> None:
    graph = changed(tmp_path, unknown_operator)
    with pytest.raises(BuildFailed, match=r"changed\.onnx: node 3 'the_third' \(Nothing\): no imp"):
        build(trt, graph)


def test_tensorrt_for_rtx_names_the_node_that_its_parser_does_not_know(
    rtx: Any, tmp_path: Path
) -> None:
    graph = changed(tmp_path, unknown_operator)
    with pytest.raises(BuildFailed, match=r"node 3 'the_third' \(Nothing\): \w+"):
        build_engine(
            rtx, "tensorrt-rtx", graph, [PREFILL], sm=(89,), timing_cache=None, progress=print
        )


def test_a_dimension_without_sizes_is_named(trt: Any) -> None:
    narrow = Profile("prefill", {"batch": (1, 1, 2)})
    with pytest.raises(BuildFailed, match=r"profile prefill has no sizes for 'tokens'"):
        build_engine(
            trt,
            "tensorrt",
            graph_of("llama", WINDOW),
            [narrow],
            sm=(),
            timing_cache=None,
            progress=print,
        )


def test_progress_is_told_in_phases_and_tenths(trt: Any) -> None:
    told: list[str] = []
    build(trt, graph_of("llama", WINDOW), progress=told.append)
    assert told[0].startswith(f"tensorrt {trt.__version__} reads")
    assert told[1:3] == ["Building engine", "Building engine: 4 of 40"]
    assert len(told) == 2 + 9


def test_an_interrupt_ends_the_build_between_two_steps(trt: Any) -> None:
    def interrupted(line: str) -> None:
        if "8 of 40" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(trt, graph_of("llama", WINDOW), progress=interrupted)
    assert onnx_engine.seen.stopped


def test_the_timing_cache_is_kept_and_that_of_another_gpu_is_begun_anew(
    trt: Any, tmp_path: Path
) -> None:
    cache, graph = tmp_path / "timing.cache", graph_of("llama", WINDOW)
    build(trt, graph, timing_cache=cache)
    build(trt, graph, timing_cache=cache)
    assert onnx_engine.seen.caches == [b"", b"timed"]
    assert cache.read_bytes() == b"timedtimed"
    onnx_engine.seen.refuse_cache = True
    build(trt, graph, timing_cache=cache)
    assert onnx_engine.seen.caches[2:] == [b"timedtimed", b""]
    assert cache.read_bytes() == b"timed"
    assert [path.name for path in tmp_path.iterdir()] == ["timing.cache"]


def test_a_disk_too_full_for_the_timing_cache_keeps_the_one_before_and_no_part_of_another(
    trt: Any, tmp_path: Path
) -> None:
    cache, graph = tmp_path / "timing.cache", graph_of("llama", WINDOW)
    build(trt, graph, timing_cache=cache)
    with files_of_at_most(7), pytest.raises(OSError, match="File too large"):
        build(trt, graph, timing_cache=cache)
    assert cache.read_bytes() == b"timed"
    assert [path.name for path in tmp_path.iterdir()] == ["timing.cache"]


def test_attention_may_be_built_of_its_parts(trt: Any) -> None:
    build(trt, graph_of("llama", WINDOW))
    assert onnx_engine.seen.decomposable
    assert all(onnx_engine.seen.decomposable)


@pytest.mark.parametrize("mode", ["window", pytest.param("lookahead", marks=pytest.mark.slow)])
def test_the_workspace_that_is_counted_is_near_what_tensorrt_for_rtx_states(
    mode: Any, rtx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, tokens = 3, 2048
    scoring = Scoring(mode, 2, queries=24, votes="max" if mode == "window" else "mean")
    spans = {"batch": (1, 1, batch), "tokens": (1, 64, tokens), "capacity": (1, 64, tokens)}
    stated: list[int] = []

    def listening(trt: Any) -> Any:
        class Log(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, msg: str) -> None:
                found = re.search(r"Total Activation Memory: (\d+) bytes", msg)
                stated.extend([int(found[1])] if found else [])

        return Log()

    monkeypatch.setattr(engine, "_logger", listening)
    graph = graph_of("llama", scoring)
    build_engine(
        rtx,
        "tensorrt-rtx",
        graph,
        [Profile("prefill", spans)],
        sm=(89,),
        timing_cache=None,
        progress=lambda line: None,
    )
    manifest = manifest_of(small("llama"), scoring, tokens, batch)
    found = footprint_of(graph.parent, manifest, small("llama").config)
    estimate = found.work - tensor_bytes(manifest)
    assert 0.5 * estimate < max(stated) < 1.1 * estimate


def test_capabilities_that_the_builder_does_not_have_are_refused(rtx: Any) -> None:
    check_capabilities(rtx, "tensorrt-rtx", (89, 120))
    with pytest.raises(InputError, match=r"sm: got 90, .*89.*120"):
        check_capabilities(rtx, "tensorrt-rtx", (89, 90))


# --- the plugin in the function's place


def plugin_graph() -> onnx.ModelProto:
    model = onnx.load(graph_of("llama", WINDOW))
    assert onnx_nodes.expand_for_tensorrt(model, sm=90) == WINDOW.layers
    return model


def test_a_graph_with_plugins_is_built_by_tensorrt_and_refused_for_rtx(
    trt: Any, tmp_path: Path
) -> None:
    graph = tmp_path / "plugin.onnx"
    onnx.save(plugin_graph(), graph)
    assert build(trt, graph)
    with pytest.raises(InputError, match=r"plugin \(node .*importance_lse.*takes no plugins"):
        build_engine(
            trt, "tensorrt-rtx", graph, [PREFILL], sm=(), timing_cache=None, progress=print
        )
