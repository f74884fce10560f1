"""Families whose attention cannot be captured faithfully are refused at load, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from tests.test_judges import FAMILIES, random_model
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.errors import UnsupportedModel
from trtllm_specprefill.models import Model
from trtllm_specprefill.target.torch import TorchTarget

UNFAITHFUL: dict[str, Any] = {
    # No attention at all.
    "mamba": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
    # Adds a bias that grows with distance, inside a private attention.
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    ),
    # Never asks the attention interface.
    "gpt_neo": lambda: GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=97,
            hidden_size=32,
            num_layers=2,
            attention_types=[[["global", "local"], 1]],
            num_heads=4,
        )
    ),
    # Squashes its logits.
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
    ),
    # A learned sink takes part in its softmax.
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=4,
        )
    ),
}


def as_model(name: str, module: Any) -> Model:
    return Model(
        name=name,
        module=module.eval(),
        tokenizer=None,
        config=module.config,
        layers=module.config.num_hidden_layers,
        dtype=torch.float32,
        device=torch.device("cpu"),
        licence="none",
        eos_token_ids=frozenset(),
        context_length=512,
        fingerprint=name,
    )


@pytest.mark.parametrize("name", UNFAITHFUL)
def test_a_family_that_cannot_be_captured_is_refused_by_name(name: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModel, match=name):
        TorchDraft(as_model(name, UNFAITHFUL[name]()))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_the_common_attention_are_taken(family: str) -> None:
    TorchDraft(random_model(family))


def test_learned_positions_are_taken_too() -> None:
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4)
    TorchDraft(as_model("gpt2", GPT2LMHeadModel(config)))


def test_a_lost_sliding_window_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered without its mask function, transformers builds no mask and says nothing."""
    from trtllm_specprefill.draft import capture

    monkeypatch.setattr(capture.AttentionMaskInterface, "register", lambda name, _: drop_mask(name))

    def drop_mask(name: str) -> None:
        capture.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[name] = lambda *_, **__: None

    try:
        with pytest.raises(UnsupportedModel, match="logits change"):
            TorchDraft(random_model("gemma3"))
    finally:
        monkeypatch.undo()
        TorchDraft(random_model("gemma3"))  # registers the right one again


def test_whether_a_target_honours_positions_is_found_out() -> None:
    assert TorchTarget(random_model("llama")).position_support.honoured
    assert TorchTarget(random_model("gemma3")).position_support.window == 64
    mamba = as_model("mamba", UNFAITHFUL["mamba"]())
    assert not TorchTarget(mamba).position_support.honoured
