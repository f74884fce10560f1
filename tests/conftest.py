"""Fixtures that many tests share. Only those at the end fetch anything, once."""

from __future__ import annotations

import json

import pytest
import transformers
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from trtllm_specprefill.evaluation.haystack import haystack
from trtllm_specprefill.models import Model, load_model

# No test may depend on how fast this machine is.
settings.register_profile(
    "tests", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

# What the small tokenizers are trained on: enough for merges in several scripts.
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst.",
    "Fuel Dilution was found in the engine oil; the report lists wear metals and the viscosity.",
    "She said that the key to the cellar lies under the third stone of the garden wall.",
    "def answer(question: str) -> str:\n    return lookup[question]\n\n    # the end\n",
    "Быстрая коричневая лиса прыгает через ленивую собаку. Это было лучшее из всех времён.",
    "敏捷的棕色狐狸跳过了懒狗。这是最好的时代，这是最坏的时代。你好，世界。",
    "素早い茶色の狐がのろまな犬を飛び越える。これは最高の時代でした。",
    "빠른 갈색 여우가 게으른 개를 뛰어넘는다. 그것은 최고의 시대였다.",
    "नमस्ते दुनिया, यह एक छोटा सा वाक्य है। तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है।",
    '{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}',
] * 20

CHATML = """\
{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# No tools, content stripped, roles refused: what Gemma's template does.
TURNS = """\
{{ bos_token }}
{%- for message in messages %}
{%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('roles user and assistant only') }}{% endif -%}
<start_of_turn>{{ message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""  # noqa: E501


@pytest.fixture(scope="session")
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a ChatML template, as Qwen and SmolLM2 have it; adds no BOS."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHATML
    )


@pytest.fixture(scope="session")
def metaspace() -> PreTrainedTokenizerFast:
    """SentencePiece-style BPE: Metaspace, byte fallback, a BOS added by a post-processor."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, limit_alphabet=90, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    specials = ["<unk>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>"]
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(specials)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", pieces.index("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=TURNS,
    )


@pytest.fixture(scope="session", params=["byte_level", "metaspace"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Each of the two tokenizers in turn."""
    return request.getfixturevalue(request.param)


# --- models


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The demo model with a chat template, in float32 on the CPU."""
    return load_model("smollm2-135m", "float32", "cpu")


@pytest.fixture(scope="session")
def gemma3() -> Model:
    """The demo model of another family, with sliding windows."""
    if transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 misreads Gemma's GGUF tokenizer; the alias is refused there")
    return load_model("gemma3-270m", "float32", "cpu")


@pytest.fixture(scope="session")
def prose() -> str:
    """Long English prose."""
    return haystack()
