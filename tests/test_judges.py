"""The judges: what must hold whatever the implementation, on real and randomly made models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.importance import reference_importance
from trtllm_specprefill.models import Model, load_model
from trtllm_specprefill.plan import PrunePlan, Reason
from trtllm_specprefill.settings import Sampling, Settings
from trtllm_specprefill.target.torch import TorchTarget

SMALL = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 4096}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}


def random_model(family: str, tokenizer: Any = None, **changes: Any) -> Model:
    """A small model of a family with random weights, spread enough for sharp attention."""
    kind, config_kind, extra = FAMILIES[family]
    config = config_kind(**{**SMALL, **extra, **changes}, eos_token_id=1, pad_token_id=0)
    module = kind(config).eval()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.normal_(0, 1.4 / weight.shape[1] ** 0.5)
    return Model(
        name=family,
        module=module,
        tokenizer=tokenizer,
        config=config,
        layers=config.num_hidden_layers,
        dtype=torch.float32,
        device=torch.device("cpu"),
        licence="none",
        eos_token_ids=frozenset({1}),
        context_length=4096,
        fingerprint=family,
    )


class Recording(TorchTarget):
    """The torch target, with the logits of every step kept."""

    def __init__(self, model: Model) -> None:
        self.seen: list[torch.Tensor] = []
        super().__init__(model)
        self.seen.clear()

    def _forward(self, *arguments: Any) -> torch.Tensor:
        self.seen.append(super()._forward(*arguments))
        return self.seen[-1]


class Spelling:
    """A tokenizer that spells ids as numbers: enough to stream from a random model."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(f"{i} " for i in ids)


def original_plan(ids: np.ndarray, kept: np.ndarray) -> PrunePlan:
    positions = np.flatnonzero(kept).astype(np.int32)
    return PrunePlan(ids[kept], positions, ids.size, "original", ids.size, Reason.PRUNED)


def masked_dense_logits(
    module: torch.nn.Module, ids: np.ndarray, kept: np.ndarray, answer: list[int]
) -> torch.Tensor:
    """Logits at the last prompt token and each answer token of one full-length forward pass
    whose mask hides the dropped tokens and nothing else."""
    full = torch.tensor([*ids.tolist(), *answer])
    n = full.numel()
    seen = torch.from_numpy(np.concatenate([kept, np.ones(len(answer), dtype=bool)]))
    mask = torch.ones(n, n, dtype=torch.bool).tril() & seen[None, :]
    mask |= torch.eye(n, dtype=torch.bool)  # a dropped token sees itself; nobody reads it
    additive = torch.zeros(n, n).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        logits = module(full[None], attention_mask=additive[None, None]).logits[0]
    return logits[ids.size - 1 :]


def assert_positions_hold(model: Model, ids: np.ndarray, kept: np.ndarray) -> None:
    model = replace(model, eos_token_ids=frozenset())  # so that eight tokens do come
    target = Recording(model)
    steps = target.stream(original_plan(ids, kept), Sampling(max_tokens=9))
    answer = [token for step in steps for token in step.token_ids][:8]
    assert len(answer) == 8
    expected = masked_dense_logits(model.module, ids, kept, answer)
    for step, logits in enumerate(target.seen[: len(answer) + 1]):
        torch.testing.assert_close(logits, expected[step], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("seed", range(4))
def test_pruned_logits_equal_a_dense_pass_that_hides_the_dropped_tokens(
    family: str, seed: int
) -> None:
    rng = np.random.default_rng([seed, 41])
    torch.manual_seed(seed)
    model = random_model(family, Spelling())
    n = int(rng.integers(60, 300))
    ids = rng.integers(2, 211, n).astype(np.int32)
    kept = rng.random(n) < rng.uniform(0.1, 0.6)
    kept[-1] = True
    assert 2 < kept.sum() < n
    assert_positions_hold(model, ids, kept)


def test_wrong_positions_would_be_noticed() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = random_model("llama", Spelling())
    ids = rng.integers(2, 211, 150).astype(np.int32)
    kept = rng.random(150) < 0.3
    kept[-1] = True
    right = original_plan(ids, kept)
    wrong = PrunePlan(
        right.input_ids,
        np.arange(right.input_ids.size, dtype=np.int32),
        right.input_ids.size,
        "contiguous",
        150,
        Reason.PRUNED,
    )
    target = Recording(model)
    list(target.stream(wrong, Sampling(max_tokens=1)))
    expected = masked_dense_logits(model.module, ids, kept, [])
    assert (target.seen[0] - expected[0]).abs().max() > 1e-2


@pytest.mark.model
def test_pruned_logits_of_the_demo_model_equal_the_masked_dense_pass(
    smollm2: Model, prose: str
) -> None:
    rng = np.random.default_rng()
    ids = np.asarray(smollm2.tokenizer(prose[:3000])["input_ids"][:400], dtype=np.int32)
    kept = rng.random(ids.size) < 0.3
    kept[-1] = True
    assert_positions_hold(smollm2, ids, kept)


class KeptCalls:
    """Copies of every attention call, to score them again by the paper's text."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, torch.Tensor, torch.Tensor, float]] = []

    def see(self, layer: int, q: Any, k: Any, scale: float, mask: Any) -> None:
        self.calls.append((layer, q[0].clone(), k[0].clone(), scale))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> KeptCalls:
    """Queries and keys of every call of a draft, beside what the draft makes of them."""
    from trtllm_specprefill.draft import torch as draft_torch

    kept = KeptCalls()

    def watch(votes: Any) -> None:
        original = votes.see

        def see(self: Any, *arguments: Any) -> None:
            kept.see(*arguments)
            original(self, *arguments)

        monkeypatch.setattr(votes, "see", see)

    watch(draft_torch._LookAhead)
    watch(draft_torch._FirstLayers)
    return kept


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("scoring", ["lookahead", "window"])
def test_draft_scores_equal_the_paper_on_the_models_own_queries_and_keys(
    family: str, scoring: str, calls: KeptCalls
) -> None:
    rng = np.random.default_rng()
    draft = TorchDraft(random_model(family))
    n = int(rng.integers(90, 400))
    ids = rng.integers(2, 211, n).astype(np.int32)
    whole = {"draft_window": 0, "draft_layers": 4, "votes": "mean"}
    settings = Settings.of(scoring=scoring, window=16, look_ahead=5, pool=13, **whole)
    importance = draft.score(ids, settings)

    by_layer: dict[int, tuple[list[Any], Any, float]] = {}
    for layer, q, k, scale in calls.calls:
        queries = by_layer.setdefault(layer, ([], k[:, :n], scale))[0]
        first = 1 if scoring == "lookahead" else 16
        queries.append(q[:, -min(first, q.shape[1]) :])
    queries = [torch.cat(q, dim=1).numpy() for q, _, _ in by_layer.values()]
    keys = [k.numpy() for _, k, _ in by_layer.values()]
    scale = next(iter(by_layer.values()))[2]
    expected = reference_importance(queries, keys, scale, 13, causal=scoring == "window")
    np.testing.assert_allclose(importance.scores, expected, rtol=1e-5)
    assert importance.queries == queries[0].shape[1]
    assert importance.layers == tuple(range(4))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_look_ahead_is_greedy_and_ends_at_the_models_own_eos(
    family: str, calls: KeptCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries are the last prompt token's and one for each look-ahead token before EOS."""
    from trtllm_specprefill.draft import torch as draft_torch

    torch.manual_seed(11)
    model = replace(random_model(family), eos_token_ids=frozenset())
    ids = np.random.default_rng().integers(2, 211, 70).astype(np.int32)
    module = model.module
    greedy = module.generate(
        torch.from_numpy(ids).long()[None], max_new_tokens=8, do_sample=False, eos_token_id=None
    )[0, 70:].tolist()
    fed: list[tuple[list[int], list[int]]] = []
    original = draft_torch.last_logits

    def watched(model: Model, ids: Any, positions: Any, cache: Any) -> Any:
        fed.append((ids.tolist(), positions.tolist()))
        return original(model, ids, positions, cache)

    monkeypatch.setattr(draft_torch, "last_logits", watched)
    importance = TorchDraft(model).score(ids, Settings(scoring="lookahead"))
    assert importance.queries == 9
    assert fed[0] == (ids.tolist(), list(range(70)))
    assert fed[1:] == [([token], [70 + i]) for i, token in enumerate(greedy)]

    first = greedy.index(greedy[2])  # the third token, or an earlier one that equals it
    ending = replace(model, eos_token_ids=frozenset({greedy[2]}))
    settings = Settings(scoring="lookahead")
    assert TorchDraft(ending).score(ids, settings).queries == 1 + first


@pytest.mark.parametrize("n", range(54, 68))
def test_look_ahead_around_a_sliding_window_scores_the_right_keys(n: int) -> None:
    """A sliding cache of 64 lets go of the prompt's start while still holding n keys."""
    model = replace(random_model("gemma3"), eos_token_ids=frozenset())
    draft = TorchDraft(model)
    ids = np.random.default_rng(n).integers(2, 211, n).astype(np.int32)
    importance = draft.score(ids, Settings(scoring="lookahead", look_ahead=8, pool=1))
    expected = eager_importance(model, ids, steps=8)
    np.testing.assert_allclose(importance.scores, expected, rtol=1e-3, atol=1e-6)


def eager_importance(model: Model, ids: np.ndarray, steps: int) -> np.ndarray:
    """Importance from the attention weights that transformers itself returns.

    Layers vote for a query whose weights reach the whole prompt; the weights on look-ahead
    keys are taken out and the rest renormalised, as the softmax is over prompt keys only.
    """
    module, n = model.module, ids.size
    module.set_attn_implementation("eager")
    tokens = torch.from_numpy(ids).long()[None]
    with torch.inference_mode():
        full = module.generate(
            tokens, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, eos_token_id=None
        )
        weights = module(full, output_attentions=True, use_cache=False).attentions
    kinds = model.config.layer_types
    window = model.config.sliding_window
    best = np.zeros((steps + 1, n))
    for kind, layer in zip(kinds, weights, strict=True):
        for row in range(steps + 1):
            query = n - 1 + row
            if kind == "sliding_attention" and query >= window:
                continue
            prompt = layer[0, :, query, :n].double().numpy()
            best[row] = np.maximum(best[row], (prompt / prompt.sum(-1, keepdims=True)).max(0))
    return best.mean(axis=0)


def test_layers_with_a_window_shorter_than_the_prompt_do_not_vote() -> None:
    rng = np.random.default_rng()
    draft = TorchDraft(random_model("gemma3"))
    ids = rng.integers(2, 211, 300).astype(np.int32)
    assert draft.score(ids, Settings(scoring="lookahead")).layers == (1, 3)
    few = Settings(scoring="lookahead", look_ahead=0)
    assert draft.score(ids[:50], few).layers == (0, 1, 2, 3)


def per_token_loss(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of each next token, in slices: 262,144 logits a token are many."""
    losses = []
    with torch.inference_mode():
        hidden = module.model(ids[None]).last_hidden_state[0, :-1]
        for start in range(0, hidden.shape[0], 256):
            logits = module.lm_head(hidden[start : start + 256]).float()
            wanted = ids[1:][start : start + 256]
            losses.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none"))
    return torch.cat(losses)


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_captured_model_has_the_untouched_models_loss_on_long_prose(name: str, prose: str) -> None:
    """Past the sliding window too: a lost mask shows there and nowhere else."""
    untouched = load_model(name, "float32", "cpu")
    ids = torch.tensor(untouched.tokenizer(prose[:20_000])["input_ids"][:3000])
    assert ids.numel() == 3000
    expected = per_token_loss(untouched.module, ids)
    assert expected.mean() < 4.0  # a working model on English prose, not noise
    captured = untouched
    TorchDraft(captured)  # routes the very same weights through the capture
    assert captured.module.config._attn_implementation == "specprefill_capture"
    torch.testing.assert_close(per_token_loss(captured.module, ids), expected, rtol=0, atol=1e-4)
