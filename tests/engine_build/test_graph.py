"""Exported drafts under onnxruntime against the library's torch draft and the float64 judge."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine_build.graph
from engine_build.graph import MODULES, OPSET, export_draft, importance_function, save_graph
from engine_build.scoring_model import Scoring, ScoringModel
from perf import gpu_check
from plugins.importance.onnx_nodes import DOMAIN
from tests.engine_build.drafts import folder_of, fresh_ids, manifest_of, opened, small
from tests.test_windows import Seen
from trtllm_specprefill.draft.capture import capturing
from trtllm_specprefill.draft.engine import look_ahead
from trtllm_specprefill.draft.manifest import GRAPH
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.importance import reference_importance
from trtllm_specprefill.importance_op import head_table
from trtllm_specprefill.models import Model
from trtllm_specprefill.settings import Settings

WINDOW = Scoring("window", 2, queries=24)
HEADS = Scoring("window", 3, ((0, 4), (), (1, 2, 5)), pool=5, queries=16, votes="mean")
AHEAD = Scoring("lookahead", 4, queries=9, votes="mean")
EARLY = Scoring("lookahead", 2, queries=9, votes="mean")
LENGTHS = (23, 61, 64, 130, 391)  # traced with 72; a window of 64 slides in gemma3
SCALES = (0.125, 0.3)


def prompts() -> list[Any]:
    return [fresh_ids(n) for n in LENGTHS]


def assert_same(found: Any, expected: Any) -> None:
    assert found.layers == expected.layers
    assert found.queries == expected.queries
    assert found.heads == expected.heads
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4, atol=1e-6)


# --- window mode


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("batch", [1, 4])
def test_whole_prompts_score_as_under_torch_alone_and_in_ragged_batches(
    family: str, batch: int
) -> None:
    model = small(family)
    draft = opened(model, folder_of(family, WINDOW), batch)
    asked = Settings(draft_window=0, window=24, draft_layers=2)
    judge = TorchDraft(model)
    ids = prompts()
    for one, found in zip(ids, draft.score_batch(ids, asked), strict=True):
        assert_same(found, judge.score(one, asked))


@pytest.mark.parametrize("batch", [1, 3])
def test_windows_behind_a_short_question_score_as_under_torch(batch: int) -> None:
    model = small("llama")
    draft = opened(model, folder_of("llama", WINDOW), batch)
    asked = Settings(draft_window=130, draft_overlap=20, window=24, draft_layers=2)
    ids = fresh_ids(900)
    # Fewer tokens ask than may vote: the rest of the last ones must not.
    question = np.r_[10:18, 895:900]
    found = draft.score(ids, asked, question)
    assert found.queries == 13
    assert_same(found, TorchDraft(model).score(ids, asked, question))


def test_only_the_listed_heads_score() -> None:
    model = small("llama")
    draft = opened(model, folder_of("llama", HEADS))
    ids = fresh_ids(150)
    asked = Settings(draft_window=0, window=16, draft_layers=3, pool=5, votes="mean")
    found = draft.score(ids, asked)
    assert (found.layers, found.heads) == ((0, 2), 3)
    TorchDraft(model)  # routes its attention through the capture
    seen = Seen()
    with torch.inference_mode(), capturing(seen):
        model.module(torch.from_numpy(ids).long()[None], use_cache=False)
    assert HEADS.heads is not None
    # The maximum runs over layers and heads alike, so each head may be a layer of its own.
    chosen = [(layer, head) for layer, heads in enumerate(HEADS.heads) for head in heads]
    queries = [seen.queries[layer][head : head + 1, -16:] for layer, head in chosen]
    keys = [seen.keys[layer][head // 3 : head // 3 + 1] for layer, head in chosen]
    expected = reference_importance(queries, keys, seen.scale, 5, True, "mean")
    np.testing.assert_allclose(found.scores, expected, rtol=1e-4, atol=1e-6)
    assert np.abs(found.scores - judged_by_all(seen)).max() > 1e-3


def judged_by_all(seen: Seen) -> Any:
    queries = [q[:, -16:] for q in seen.queries[:3]]
    return reference_importance(queries, seen.keys[:3], seen.scale, 5, True, "mean")


# --- look-ahead


def greedy(model: Model, ids: Any, steps: int) -> tuple[list[int], float]:
    """What transformers decodes, each time from all tokens at once; how clear the closest was."""
    tokens, clear = torch.from_numpy(ids).long()[None], float("inf")
    for _ in range(steps):
        with torch.inference_mode():
            logits = model.module(tokens, use_cache=False).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        clear = min(clear, (best - second) / float(logits.abs().max()))
        tokens = torch.cat([tokens, logits.argmax()[None, None]], dim=1)
        if int(tokens[0, -1]) in model.eos_token_ids:
            break
    return tokens[0, ids.size :].tolist(), clear


def decodable(model: Model, steps: int) -> tuple[list[Any], list[list[int]]]:
    """Prompts and what is decoded behind them, no token of which only rounding decides."""
    ids: list[Any] = []
    decoded: list[list[int]] = []
    for length in LENGTHS:
        clear = 0.0
        while clear < 1e-4:
            one = fresh_ids(length)
            tokens, clear = greedy(model, one, steps)
        ids.append(one)
        decoded.append(tokens)
    return ids, decoded


def first_layers(model: Model, layers: int) -> Model:
    """The model without its later layers: what an early exit makes of it."""
    module = copy.deepcopy(model.module)
    module.model.layers = module.model.layers[:layers]
    module.config.num_hidden_layers = layers
    return replace(model, module=module, config=module.config)


@pytest.mark.parametrize(("family", "scoring"), [("llama", AHEAD), ("gemma3", EARLY)])
@pytest.mark.parametrize(("batch", "piece"), [(1, 1024), (4, 1024), (4, 50)])
def test_look_ahead_scores_and_decodes_as_under_torch_in_one_call_or_in_pieces(
    family: str, scoring: Scoring, batch: int, piece: int
) -> None:
    model = small(family)
    if scoring is EARLY:
        model = first_layers(model, EARLY.layers)
    draft = opened(model, folder_of(family, scoring), batch, piece)
    asked = Settings(scoring="lookahead")
    judge = TorchDraft(model)
    ids, tokens = decodable(model, 8)
    for one, found in zip(ids, draft.score_batch(ids, asked), strict=True):
        assert_same(found, judge.score(one, asked))
    decoded = look_ahead(
        draft._engine, [one.astype(np.int64) for one in ids], 8, "mean", ends=model.eos_token_ids
    )
    assert [list(found.tokens) for found in decoded] == tokens


def test_a_sequence_that_ends_no_longer_votes_while_the_others_go_on() -> None:
    model = small("llama")
    ids, tokens = decodable(model, 8)
    # The third token that one of them decodes ends sequences now.
    model = replace(model, eos_token_ids=frozenset({tokens[1][:3][-1]}))
    draft, judge = opened(model, folder_of("llama", AHEAD), batch=5), TorchDraft(model)
    asked = Settings(scoring="lookahead")
    found = draft.score_batch(ids, asked)
    assert found[1].queries <= 3
    assert max(one.queries for one in found) > found[1].queries
    for one, importance in zip(ids, found, strict=True):
        assert_same(importance, judge.score(one, asked))


# --- the graph


def test_every_layer_is_one_node_and_the_weights_are_there_once() -> None:
    model = small("llama")
    graph = onnx.load(folder_of("llama", AHEAD) / GRAPH)
    onnx.checker.check_model(graph, full_check=True)
    nodes = [node for node in graph.graph.node if node.domain == DOMAIN]
    assert [node.op_type for node in nodes] == ["importance_layer"] * 4
    assert [f.name for f in graph.functions if f.domain == DOMAIN] == ["importance_layer"]
    stored = sum(np.prod(list(t.dims)) for t in graph.graph.initializer)
    own = sum(p.numel() for p in model.module.parameters())
    assert own * 0.99 < stored < own * 1.02
    told = {prop.key for node in graph.graph.node for prop in node.metadata_props}
    assert told <= {
        MODULES
    }  # which module a node is of, and no traces of the machine it was made on


def test_an_early_exit_leaves_out_what_it_does_not_need() -> None:
    model = small("llama")
    graph = onnx.load(folder_of("llama", WINDOW) / GRAPH)
    stored = sum(np.prod(list(t.dims)) for t in graph.graph.initializer)
    layers = model.module.model.layers
    attention = [layers[1].self_attn.q_proj, layers[1].self_attn.k_proj]
    parts = [model.module.model.embed_tokens, layers[0], *attention]
    needed = sum(p.numel() for part in parts for p in part.parameters())
    assert needed * 0.99 < stored < needed * 1.02


def test_weights_too_large_for_one_file_lie_beside_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, scoring = small("llama"), Scoring("window", 1, queries=4)
    program = export_draft(model, scoring)
    monkeypatch.setattr(engine_build.graph, "_ONE_FILE", 1000)
    save_graph(program, tmp_path / GRAPH)
    assert {path.name for path in tmp_path.iterdir()} == {GRAPH, f"{GRAPH}.data"}
    weights = model.module.model.embed_tokens.weight.numel() * 4
    assert (tmp_path / GRAPH).stat().st_size < weights < (tmp_path / f"{GRAPH}.data").stat().st_size
    manifest_of(model, scoring, folder=tmp_path).write(tmp_path)
    assert opened(model, tmp_path).probe_error < 1e-5


def test_layers_and_heads_the_model_does_not_have_are_refused() -> None:
    model = small("llama")
    with pytest.raises(InputError, match=r"layers: got 5, .*1 to 4"):
        ScoringModel(model, Scoring("window", 5))
    with pytest.raises(InputError, match=r"heads: got \[6\]"):
        ScoringModel(model, Scoring("window", 1, ((6,),)))
    with pytest.raises(InputError, match="heads"):
        Scoring("window", 2, ((1,),))
    with pytest.raises(InputError, match="pool"):
        Scoring("window", 2, pool=4)
    with pytest.raises(InputError, match="device"):
        ScoringModel(replace(model, device=torch.device("cuda")), Scoring("window", 2))


# --- the function


def function_model(pool: int, causal: bool, scale: float, table: Any) -> bytes:
    """One node of our domain, and the function that explains it."""
    kinds = {
        "queries": (onnx.TensorProto.FLOAT, ["B", "Hq", "W", "D"]),
        "keys": (onnx.TensorProto.FLOAT, ["B", "Hkv", "N", "D"]),
        "lengths": (onnx.TensorProto.INT32, ["B"]),
        "key_scale": (onnx.TensorProto.FLOAT, ["Hkv"]),
        "running": (onnx.TensorProto.FLOAT, ["B", "W", "N"]),
    }
    node = onnx.helper.make_node(
        "importance_layer",
        ["queries", "keys", "lengths", "heads", "key_scale", "running"],
        ["out"],
        domain=DOMAIN,
        scale=scale,
        pool=pool,
        causal=int(causal),
    )
    info = onnx.helper.make_tensor_value_info
    heads = onnx.numpy_helper.from_array(np.array(table, np.int32), "heads")
    graph = onnx.helper.make_graph(
        [node],
        "one_layer",
        [info(name, kind, shape) for name, (kind, shape) in kinds.items()],
        [info("out", onnx.TensorProto.FLOAT, ["B", "W", "N"])],
        [heads],
    )
    imports = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, 1)]
    function = importance_function(pool, causal)
    model = onnx.helper.make_model(
        graph, opset_imports=imports, functions=[function], ir_version=10
    )
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


@settings(max_examples=40)
@given(data=st.data())
def test_the_function_means_what_the_judge_means(data: st.DataObject) -> None:
    draw = data.draw
    pool, causal = draw(st.sampled_from([1, 3, 13])), draw(st.booleans())
    kv_heads, ratio, dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 8
    b, w = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    n = draw(st.integers(w, 70))
    heads = sorted(draw(st.sets(st.integers(0, kv_heads * ratio - 1), min_size=1, max_size=9)))
    # Causal queries are a sequence's own last W: it has at least so many tokens.
    lengths = draw(st.lists(st.integers(w if causal else 0, n), min_size=b, max_size=b))
    scale = draw(st.sampled_from(SCALES))
    torch.manual_seed(draw(st.integers(0, 10**6)))
    queries = 3 * torch.randn(b, kv_heads * ratio, w, dim)
    keys = 3 * torch.randn(b, kv_heads, n, dim)
    key_scale = 0.5 + torch.rand(kv_heads)
    running = torch.rand(b, w, n) / n
    table = head_table(kv_heads * ratio, kv_heads, heads)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(function_model(pool, causal, scale, table), options)
    (found,) = session.run(
        None,
        {
            "queries": queries.numpy(),
            "keys": keys.numpy(),
            "lengths": np.array(lengths, np.int32),
            "key_scale": key_scale.numpy(),
            "running": running.numpy(),
        },
    )
    expected = gpu_check.reference(
        queries, keys, running, lengths, scale, pool, causal, tuple(heads), key_scale
    )
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-4, atol=1e-6)
