from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.strategies import WORDS, texts
from trtllm_specprefill.errors import InputError, TokenizerMismatch
from trtllm_specprefill.importance import Importance
from trtllm_specprefill.plan import PrunePlan, Reason, dense_plan, make_plan
from trtllm_specprefill.prompt import Prompt, Span, ask, encode, prepare, tokenizer_difference
from trtllm_specprefill.selection import Kept, select
from trtllm_specprefill.settings import Settings

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": 'Looks a <thing> up & says "what" it is',
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        },
    }
]


def rebuilt(tokenizer: Any, change: Any = None, **special: Any) -> PreTrainedTokenizerFast:
    """A copy of `tokenizer` whose JSON went through `change`."""
    made = json.loads(tokenizer.backend_tokenizer.to_str())
    if change is not None:
        change(made)
    kept = {"eos_token": tokenizer.eos_token, "chat_template": tokenizer.chat_template}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)), **{**kept, **special}
    )


@pytest.fixture(scope="session")
def trimming(byte_level: Any) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer with offsets that leave spaces out, as RoBERTa's does."""
    out = rebuilt(byte_level)
    out.backend_tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False, trim_offsets=True
    )
    return out


@pytest.fixture(scope="session")
def latin_only() -> PreTrainedTokenizerFast:
    """A tokenizer that silently drops what it has no token for."""
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("abcdef .")}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def partitions(encoding: Any, text: str) -> bool:
    """Whether the distinct non-empty spans, in order, are exactly the text."""
    pairs = zip(encoding.starts.tolist(), encoding.ends.tolist(), strict=True)
    spans = sorted({(start, end) for start, end in pairs if start < end})
    edges = [0, *(end for _, end in spans)]
    return [start for start, _ in spans] == edges[:-1] and edges[-1] == len(text)


def lengthy(words: int, seed: int | None = None) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS, size=words)) + "."


def random_importance(prompt: Prompt, rng: np.random.Generator | None = None) -> Importance:
    rng = rng or np.random.default_rng()
    scores = rng.exponential(size=len(prompt.draft)).astype(np.float32)
    return Importance(scores, queries=1, heads=1, layers=(0,))


def pruned(prompt: Prompt) -> tuple[Kept, PrunePlan]:
    kept = select(prompt, random_importance(prompt))
    assert not kept.protected_exceeds_budget
    return kept, make_plan(prompt, kept, "contiguous")


def words_of(prompt: Prompt, rule: str) -> list[str]:
    return [prompt.text[s.start : s.end] for s in prompt.protected if s.rule == rule]


# --- ids and offsets


@given(text=texts(min_pieces=1))
def test_offsets_partition_the_text_in_any_script(tokenizer: Any, trimming: Any, text: str) -> None:
    for one in (tokenizer, trimming):
        for special in (False, True):
            encoding = encode(one, text, special=special)
            assert encoding.ids.tolist() == one.encode(text, add_special_tokens=special)
            assert (encoding.ids.dtype, encoding.starts.dtype) == (np.int32, np.int64)
            assert (np.diff(encoding.starts) >= 0).all()
            assert (np.diff(encoding.ends) >= 0).all()
            if text:
                assert partitions(encoding, text)


@given(text=texts(min_pieces=1))
def test_only_what_a_tokenizer_adds_of_its_own_stands_for_no_text(
    tokenizer: Any, trimming: Any, text: str
) -> None:
    # A run of spaces whose offsets are trimmed to nothing is text all the same.
    for one in (tokenizer, trimming):
        encoding = encode(one, text, special=True)
        silent = encoding.ids[encoding.starts == encoding.ends].tolist()
        assert silent == ([] if one.bos_token_id is None else [one.bos_token_id])


@given(text=texts(min_pieces=1), data=st.data())
def test_tokens_over_a_span_are_those_that_hold_any_of_its_characters(
    tokenizer: Any, text: str, data: st.DataObject
) -> None:
    encoding = encode(tokenizer, text, special=False)
    start = data.draw(st.integers(0, max(len(text) - 1, 0)))
    end = data.draw(st.integers(start + 1, max(len(text), 1)))
    expected = {
        i
        for i, (a, b) in enumerate(zip(encoding.starts, encoding.ends, strict=True))
        if max(a, start) < min(b, end)
    }
    found = encoding.overlapping(start, end)
    assert expected == set(range(found.start, found.stop))


def test_both_encodings_read_the_same_text_and_are_one_where_the_tokenizer_is_shared(
    byte_level: Any, metaspace: Any
) -> None:
    text = lengthy(80)
    alone = prepare(text, target_tokenizer=byte_level)
    assert alone.shared_tokenizer
    assert alone.draft is alone.target
    both = prepare(text, target_tokenizer=byte_level, draft_tokenizer=metaspace)
    assert not both.shared_tokenizer
    assert both.target.ids.tolist() == byte_level.encode(text)
    assert both.draft.ids.tolist() == metaspace.encode(text)
    assert partitions(both.draft, text)


def test_bos_is_added_once_to_a_text_and_not_to_a_template_that_spells_it(metaspace: Any) -> None:
    bos = metaspace.bos_token_id
    text = prepare(lengthy(50), target_tokenizer=metaspace)
    chat = prepare([{"role": "user", "content": lengthy(50)}], target_tokenizer=metaspace)
    for prompt in (text, chat):
        assert prompt.target.ids[0] == bos
        assert prompt.target.ids.tolist().count(bos) == 1


@pytest.mark.parametrize("keep", [0.1, 0.4, 0.9])
def test_bos_survives_any_keep_rate(metaspace: Any, byte_level: Any, keep: float) -> None:
    settings = Settings(keep_rate=keep, min_keep_tokens=0, tail_tokens=8)
    for source in (lengthy(900), [{"role": "user", "content": lengthy(900)}]):
        for draft in (None, byte_level):
            prompt = prepare(
                source, target_tokenizer=metaspace, draft_tokenizer=draft, settings=settings
            )
            _, plan = pruned(prompt)
            assert plan.input_ids[0] == metaspace.bos_token_id


def test_a_tokenizer_that_does_not_cover_the_text_is_a_mismatch(
    latin_only: Any, byte_level: Any
) -> None:
    assert partitions(encode(latin_only, "abc def.", special=False), "abc def.")
    with pytest.raises(TokenizerMismatch, match="character 3 of 5"):
        encode(latin_only, "abc你好", special=False)
    with pytest.raises(TokenizerMismatch):
        prepare("abc 你好", target_tokenizer=byte_level, draft_tokenizer=latin_only)


# --- the same tokenizer or not


def test_a_tokenizer_is_the_same_as_itself_and_as_its_copy(tokenizer: Any) -> None:
    assert tokenizer_difference(tokenizer, tokenizer) is None
    assert tokenizer_difference(tokenizer, copy.deepcopy(tokenizer)) is None


def test_tokenizers_of_two_sizes_differ(byte_level: Any, metaspace: Any) -> None:
    words = tokenizer_difference(byte_level, metaspace)
    assert words is not None
    assert str(len(byte_level)) in words


def test_equal_sizes_with_other_ids_differ(byte_level: Any) -> None:
    # SGLang 23838, xllama 200: Qwen2.5-Coder and Qwen3 are both 151,936 long.
    def swap(made: dict[str, Any]) -> None:
        vocab = made["model"]["vocab"]
        (a, i), (b, j) = list(vocab.items())[-2:]
        vocab[a], vocab[b] = j, i

    other = rebuilt(byte_level, swap)
    assert len(other) == len(byte_level)
    words = tokenizer_difference(byte_level, other)
    assert words is not None
    assert "is id" in words


def test_equal_vocabularies_with_another_encoding_or_other_special_tokens_differ(
    byte_level: Any,
) -> None:
    def other_merges(made: dict[str, Any]) -> None:
        made["model"]["merges"] = made["model"]["merges"][20:]

    words = tokenizer_difference(byte_level, rebuilt(byte_level, other_merges))
    assert words is not None
    assert "probe" in words
    words = tokenizer_difference(byte_level, rebuilt(byte_level, eos_token="<|endoftext|>"))
    assert words is not None
    assert "eos_token_id" in words


# --- protections


def test_everything_the_template_wrote_is_protected_as_control_and_nothing_else(
    tokenizer: Any,
) -> None:
    messages = [
        {"role": "user", "content": lengthy(40)},
        {"role": "assistant", "content": "Yes, 是的."},
        {"role": "user", "content": lengthy(30)},
    ]
    prompt = prepare(messages, target_tokenizer=tokenizer)
    control = words_of(prompt, "control")
    rebuilt_text = control[0]
    for message, piece in zip(messages, control[1:], strict=True):
        rebuilt_text += message["content"] + piece
    assert rebuilt_text == prompt.text
    for marker in ("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"):
        assert prompt.text.count(marker) == "".join(control).count(marker)


@given(
    bodies=st.lists(texts(min_pieces=1, max_pieces=6), min_size=1, max_size=4),
    tool_names=st.booleans(),
)
def test_bodies_are_found_whatever_they_hold_even_the_templates_own_words(
    byte_level: Any, bodies: list[str], tool_names: bool
) -> None:
    extra = "<|im_end|>\n<|im_start|>user\n" if tool_names else ""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"{body}{extra}{body}"}
        for i, body in enumerate(bodies)
    ]
    prompt = prepare(messages, target_tokenizer=byte_level, settings=Settings(tail_tokens=0))
    spoken = [m["content"] for m in messages if m["content"].strip()]
    control = words_of(prompt, "control")
    assert len(control) == len(spoken) + 1
    assert prompt.text == control[0] + "".join(
        body + piece for body, piece in zip(spoken, control[1:], strict=True)
    )


def test_a_template_that_strips_its_messages_still_shows_where_they_are(metaspace: Any) -> None:
    body = f"  \n {lengthy(60)} \n"
    prompt = prepare([{"role": "user", "content": body}], target_tokenizer=metaspace)
    assert words_of(prompt, "control")[0] == "<s><start_of_turn>user\n"
    assert prompt.text.startswith("<s><start_of_turn>user\n" + body.strip() + "<end_of_turn>")


def test_a_template_that_looks_into_its_messages_still_shows_where_they_are(
    byte_level: Any,
) -> None:
    picky = copy.deepcopy(byte_level)
    picky.chat_template = (
        "{% for m in messages %}{% if 'stone' not in m.content %}"
        "{{ raise_exception('no stone') }}{% endif %}[{{ m.content }}]{% endfor %}"
    )
    body = f"stone {lengthy(50)}"
    prompt = prepare([{"role": "user", "content": body}], target_tokenizer=picky)
    assert words_of(prompt, "control") == ["[", "]"]


@pytest.mark.parametrize(
    ("written", "quote"), [("m.content | tojson", '"'), ("m.content | replace('  ', ' ')", "")]
)
def test_a_body_that_the_template_writes_otherwise_is_still_a_body_and_pruned(
    byte_level: Any, written: str, quote: str
) -> None:
    # Llama 3.1 writes tool results as JSON, Falcon takes out empty lines.
    other = copy.deepcopy(byte_level)
    other.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' %}{{ "
        + written
        + " }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant"
    )
    long = 'He said "no".  ' + lengthy(300)
    messages = [
        {"role": "user", "content": long},
        {"role": "assistant", "content": "Well."},
        {"role": "user", "content": "And?  Now?"},
    ]
    prompt = prepare(messages, target_tokenizer=other)
    edge = "<|im_end|>\n<|im_start|>"
    assert words_of(prompt, "control") == [
        f"<|im_start|>user\n{quote}",
        f"{quote}{edge}assistant\n",
        f"{edge}user\n{quote}",
        f"{quote}{edge}assistant",
    ]
    assert long not in prompt.text
    kept, _ = pruned(prompt)
    assert not kept.protected_exceeds_budget


def test_a_template_that_refuses_an_empty_list_of_calls_is_no_reason_to_refuse_calls(
    byte_level: Any,
) -> None:
    # As Llama 3.1's does.
    one = copy.deepcopy(byte_level)
    one.chat_template = (
        "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('only single tool-calls') }}{% endif %}"
        "[{{ m.tool_calls[0].function.name }}({{ m.tool_calls[0].function.arguments | tojson }})]"
        "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    )
    for arguments, shown in (('{"key": 5}', '{"key": 5}'), ("", "{}"), ({"key": 5}, '{"key": 5}')):
        call = {"type": "function", "function": {"name": "look_up", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "Look it up."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "rows", "tool_call_id": "1"},
        ]
        assert f"[look_up({shown})]" in prepare(messages, target_tokenizer=one).text


def test_system_and_developer_messages_are_kept_whole_by_default(byte_level: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief. 简短。"},
        {"role": "developer", "content": "Answer in verse."},
        {"role": "user", "content": lengthy(400)},
    ]
    prompt = prepare(messages, target_tokenizer=byte_level)
    assert words_of(prompt, "system") == ["Be brief. 简短。", "Answer in verse."]


@given(data=st.data())
def test_the_head_is_what_prompts_of_one_system_prompt_begin_with(
    byte_level: Any, data: st.DataObject
) -> None:
    system = {"role": "system", "content": lengthy(data.draw(st.integers(1, 60)))}
    prompts = [
        prepare(
            [system, {"role": "user", "content": "Q" + data.draw(texts()) + lengthy(300)}],
            target_tokenizer=byte_level,
            settings=Settings(keep_rate=0.6, min_keep_tokens=0),
            protect=protect,
        )
        for protect in ([], [system["content"][:3]])
    ]
    heads = [prompt.head for prompt in prompts]
    system_end = prompts[0].text.find(system["content"]) + len(system["content"])
    for prompt, head in zip(prompts, heads, strict=True):
        assert prompt.target.ends[head - 1] >= system_end
        for positions in ("original", "contiguous"):
            plan = make_plan(prompt, select(prompt, random_importance(prompt)), positions)
            assert plan.head == head < plan.input_ids.size
            np.testing.assert_array_equal(plan.input_ids[:head], prompts[0].target.ids[:head])
            np.testing.assert_array_equal(plan.position_ids[:head], np.arange(head))
        assert dense_plan(prompt, Reason.DISABLED).head == head
    assert heads[0] == heads[1]


def test_a_text_and_a_chat_without_a_system_prompt_have_no_more_head_than_their_template(
    byte_level: Any,
) -> None:
    assert prepare(lengthy(200), target_tokenizer=byte_level).head == 0
    chat = prepare([{"role": "user", "content": lengthy(200)}], target_tokenizer=byte_level)
    begin = next(s for s in chat.protected if s.rule == "control")
    assert chat.target.ends[: chat.head].max(initial=0) <= begin.end


def test_the_roles_that_are_protected_can_be_chosen(byte_level: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look it up."},
        {"role": "tool", "content": "rows: " + lengthy(30), "tool_call_id": "1"},
        {"role": "user", "content": lengthy(300)},
    ]
    settings = Settings(protect_roles=("tool",))
    prompt = prepare(messages, target_tokenizer=byte_level, settings=settings)
    assert words_of(prompt, "system") == []
    assert words_of(prompt, "role") == [messages[2]["content"]]


def test_messages_and_texts_that_the_caller_marks_are_kept(byte_level: Any) -> None:
    messages = [
        {"role": "user", "content": "A marked turn, 标记.", "protect": True},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": f"{lengthy(90)} DO NOT CUT {lengthy(90)} DO NOT CUT."},
    ]
    prompt = prepare(messages, target_tokenizer=byte_level, protect=["DO NOT CUT"])
    assert words_of(prompt, "marked") == ["A marked turn, 标记.", "DO NOT CUT", "DO NOT CUT"]


def test_texts_to_protect_may_overlap_themselves(byte_level: Any) -> None:
    prompt = prepare("a ha ha ha b", target_tokenizer=byte_level, protect=["ha ha"])
    kept = "".join(prompt.text[s.start : s.end] for s in prompt.protected if s.rule == "marked")
    assert kept in ("ha ha ha", "ha haha ha")
    marked = {i for s in prompt.protected if s.rule == "marked" for i in range(s.start, s.end)}
    assert marked == set(range(2, 10))


@given(text=st.text("ab", max_size=40), piece=st.text("ab", min_size=1, max_size=6))
def test_every_place_of_a_text_to_protect_is_found_however_they_overlap(
    byte_level: Any, text: str, piece: str
) -> None:
    whole = f"x {text} {piece}"
    prompt = prepare(whole, target_tokenizer=byte_level, protect=[piece])
    places = [i for i in range(len(whole)) if whole.startswith(piece, i)]
    expected = {i + k for i in places for k in range(len(piece))}
    spans = [s for s in prompt.protected if s.rule == "marked"]
    assert {i for s in spans for i in range(s.start, s.end)} == expected


@pytest.mark.parametrize("piece", ["", "not in there"])
def test_a_text_to_protect_that_is_empty_or_absent_is_refused(byte_level: Any, piece: str) -> None:
    with pytest.raises(InputError) as caught:
        prepare(lengthy(20), target_tokenizer=byte_level, protect=[piece])
    assert caught.value.field == "protect"


def test_the_last_user_message_is_kept_whole_where_it_fits_a_quarter_of_the_budget(
    byte_level: Any,
) -> None:
    question = "Where was the Fuel Dilution found?"
    tokens = len(byte_level.encode(question))
    for room, expected in ((tokens, [question]), (tokens - 1, [])):
        settings = Settings(keep_tokens=4 * room, min_keep_tokens=0)
        messages = [
            {"role": "user", "content": lengthy(300)},
            {"role": "assistant", "content": "So?"},
            {"role": "user", "content": question},
        ]
        prompt = prepare(messages, target_tokenizer=byte_level, settings=settings)
        assert words_of(prompt, "last_user") == expected


@pytest.mark.parametrize("length", [10, 500, 2000, 2100, 9000, 16_000, 16_001, 20_000])
def test_the_tail_is_512_tokens_above_16000_else_a_32nd_but_at_least_64(
    byte_level: Any, length: int
) -> None:
    text = " a" * length
    prompt = prepare(text, target_tokenizer=byte_level)
    n = len(prompt.target)
    assert n == length
    expected = 512 if n > 16_000 else max(64, n // 32)
    (tail,) = [s for s in prompt.protected if s.rule == "tail"]
    inside = prompt.target.overlapping(tail.start, tail.end)
    assert (inside.start, inside.stop) == (max(n - expected, 0), n)


@given(tail=st.integers(0, 90), data=st.data())
def test_the_tail_begins_with_a_whole_word_and_holds_the_last_token_even_when_none_is_asked(
    tokenizer: Any, tail: int, data: st.DataObject
) -> None:
    text = lengthy(120, data.draw(st.integers(0, 2**32)))
    prompt = prepare(text, target_tokenizer=tokenizer, settings=Settings(tail_tokens=tail))
    n = len(prompt.target)
    (span,) = [s for s in prompt.protected if s.rule == "tail"]
    assert span.end == len(text)
    tokens = prompt.target.overlapping(span.start, span.end)
    assert tokens.stop == n
    assert tail <= n - tokens.start <= tail + 24
    start = span.start
    edge = text[max(start - 1, 0) : start + 1]
    assert start == 0 or any(c.isspace() or c in "狐狸。寿司" for c in edge), edge


@pytest.mark.parametrize("text", ["0123456789abcdef" * 300, "{" + '"a":1,' * 900 + "}"])
def test_a_text_without_spaces_is_not_protected_whole_by_its_tail(
    tokenizer: Any, text: str
) -> None:
    prompt = prepare(text, target_tokenizer=tokenizer)
    n = len(prompt.target)
    (span,) = [s for s in prompt.protected if s.rule == "tail"]
    tokens = prompt.target.overlapping(span.start, span.end)
    assert tokens.stop - tokens.start <= max(64, n // 32) + 32


def test_the_instruction_at_the_end_is_never_cut_off(byte_level: Any, metaspace: Any) -> None:
    # LLMLingua issue 213.
    question = "Say in one word where the key lies."
    for target, draft in ((byte_level, None), (metaspace, byte_level), (byte_level, metaspace)):
        for source in (f"{lengthy(1500)}\n\n{question}", ask(lengthy(1500), question, target)):
            settings = Settings(keep_rate=0.1)
            prompt = prepare(
                source, target_tokenizer=target, draft_tokenizer=draft, settings=settings
            )
            _, plan = pruned(prompt)
            assert question in target.decode(plan.input_ids)
            assert plan.input_ids[-1] == prompt.target.ids[-1]


@pytest.mark.parametrize("keep", [0.3, 0.6])
def test_tool_definitions_and_calls_and_control_tokens_come_through_byte_for_byte(
    byte_level: Any, metaspace: Any, keep: float
) -> None:
    # omlx issues 2439, 749, 1207 and lucebox 327.
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "look_up", "arguments": json.dumps({"key": '<狐狸> & "fox"'})},
    }
    messages = [
        {"role": "user", "content": lengthy(500)},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": lengthy(900), "tool_call_id": "1"},
        {"role": "user", "content": "And now?"},
    ]
    for draft in (None, metaspace):
        prompt = prepare(
            messages,
            target_tokenizer=byte_level,
            draft_tokenizer=draft,
            tools=TOOLS,
            settings=Settings(keep_rate=keep),
        )
        _, plan = pruned(prompt)
        text = byte_level.decode(plan.input_ids)
        assert len(text) < len(prompt.text)
        controls = words_of(prompt, "control")
        assert "look_up" in controls[0]
        assert any("<tool_call>" in c for c in controls)
        cursor = 0
        for piece in controls:
            cursor = text.index(piece, cursor) + len(piece)
        for marker in ("<|im_start|>", "<|im_end|>"):
            assert text.count(marker) == prompt.text.count(marker)


@given(seed=st.integers(0, 2**32), block=texts(min_pieces=2, max_pieces=20), crossed=st.booleans())
def test_a_marked_block_is_quoted_verbatim_from_a_pruned_prompt(
    byte_level: Any, metaspace: Any, seed: int, block: str, crossed: bool
) -> None:
    # omlx 1401 (20 lines of code) and LLMLingua 114 (compress=False was compressed).
    code = f"def f(x):\n    return x[0]\n\n{block}\n    # 终わり\n"
    source = f"{lengthy(400, seed)}\n{code}\n{lengthy(400, seed + 1)}"
    for target, draft in ((byte_level, metaspace), (metaspace, byte_level)):
        prompt = prepare(
            source,
            target_tokenizer=target,
            draft_tokenizer=draft if crossed else None,
            settings=Settings(keep_rate=0.6, min_keep_tokens=0),
            protect=[code],
        )
        kept, plan = pruned(prompt)
        assert kept.tokens < len(prompt.target)
        here = prompt.target.overlapping(source.index(code), source.index(code) + len(code))
        assert kept.target_tokens[here].all()
        quoted = prompt.target.ids[here]
        width = quoted.size
        at = [i for i in range(plan.input_ids.size) if plan.input_ids[i] == quoted[0]]
        assert any(np.array_equal(plan.input_ids[i : i + width], quoted) for i in at)
        if target is byte_level:
            decoded = target.decode(plan.input_ids)
        else:
            decoded = target.decode(plan.input_ids, skip_special_tokens=True)
        # A special token spelt out in the block is text here; both decode it alike.
        assert target.decode(quoted) in decoded or code in decoded


# --- refusals


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ([], "messages"),
        (3, "messages"),
        (None, "messages"),
        (b"bytes", "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        (["hello"], "messages[0]"),
        ([{"role": "user", "content": "x"}, {"role": "robot", "content": "x"}], "messages[1].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["text"]}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0]",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text"}]}],
            "messages[0].content[1]",
        ),
        ([{"role": "assistant", "tool_calls": "look_up"}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "protect": "perhaps"}], "messages[0].protect"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
    ids=str,
)
def test_malformed_messages_are_refused_in_one_line_that_names_the_place(
    byte_level: Any, source: Any, field: str
) -> None:
    with pytest.raises(InputError) as caught:
        prepare(source, target_tokenizer=byte_level)
    assert caught.value.field == field
    assert caught.value.allowed
    assert "\n" not in str(caught.value)


def test_text_parts_are_read_as_lines_of_one_text(byte_level: Any) -> None:
    question, document = "Who signed the two 三?", lengthy(80)
    parts = [{"type": "text", "text": document}, {"type": "text", "text": question}]
    prompt = prepare([{"role": "user", "content": parts}], target_tokenizer=byte_level)
    assert f"{document}\n{question}" in prompt.text
    asked = prompt.text[prompt.target.starts[prompt.question[0]] :]
    assert asked.lstrip().startswith(question)


@pytest.mark.parametrize("text", ["", "x"])
def test_a_prompt_of_no_or_one_token_is_refused(byte_level: Any, text: str) -> None:
    with pytest.raises(InputError) as caught:
        prepare(text, target_tokenizer=byte_level)
    assert (caught.value.field, caught.value.value) == ("prompt", text)
    assert "2 tokens" in str(caught.value)


def test_an_empty_prompt_is_refused_also_where_the_tokenizer_adds_a_bos(metaspace: Any) -> None:
    with pytest.raises(InputError, match="prompt"):
        prepare("", target_tokenizer=metaspace)


@pytest.mark.parametrize("code", [0xD800, 0xDC80, 0xDFFF])
def test_lone_surrogates_are_refused_by_name(byte_level: Any, code: int) -> None:
    surrogate = chr(code)
    for source in (f"before {surrogate} after", [{"role": "user", "content": surrogate}]):
        with pytest.raises(InputError, match="surrogates") as caught:
            prepare(source, target_tokenizer=byte_level)
        str(caught.value).encode("utf-8")


def test_tools_are_refused_where_they_would_be_lost(byte_level: Any, metaspace: Any) -> None:
    messages = [{"role": "user", "content": "Use the tool."}]
    with pytest.raises(InputError, match=r"tools.*drops them"):
        prepare(messages, target_tokenizer=metaspace, tools=TOOLS)
    with pytest.raises(InputError, match=r"tools.*chat messages"):
        prepare("Use the tool.", target_tokenizer=byte_level, tools=TOOLS)
    assert "look_up" in prepare(messages, target_tokenizer=byte_level, tools=TOOLS).text


def test_what_a_template_raises_is_told_in_one_line(metaspace: Any, byte_level: Any) -> None:
    with pytest.raises(InputError, match="roles user and assistant only") as caught:
        prepare([{"role": "system", "content": "x"}], target_tokenizer=metaspace)
    assert caught.value.field == "messages"
    broken = copy.deepcopy(byte_level)
    broken.chat_template = "{% for m in messages %}{{ m.content.nothing.here }}\n{% endfor %}"
    with pytest.raises(InputError, match="as the chat template"):
        prepare([{"role": "user", "content": "x"}], target_tokenizer=broken)


def test_messages_need_a_chat_template(byte_level: Any) -> None:
    plain = rebuilt(byte_level, chat_template=None)
    with pytest.raises(InputError, match="no chat template"):
        prepare([{"role": "user", "content": "x"}], target_tokenizer=plain)
    assert isinstance(ask("context", "question?", plain), str)


# --- the question


def asked(prompt: Prompt) -> str:
    """The text of the draft tokens that ask."""
    spans = zip(
        prompt.draft.starts[prompt.question], prompt.draft.ends[prompt.question], strict=True
    )
    places = {place for start, end in spans for place in range(start, end)}
    return "".join(prompt.text[place] for place in sorted(places))


def test_the_last_user_message_asks_and_the_templates_words_behind_it(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": lengthy(60)},
        {"role": "assistant", "content": "Read it."},
        {"role": "user", "content": "Where is the key?"},
    ]
    prompt = prepare(messages, target_tokenizer=tokenizer)
    assert asked(prompt).lstrip() == prompt.text[prompt.text.index("Where is the key?") :]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "question", ["Where is the key?", "Question: Where is the key?\nAnswer:", "Where is the key?\n"]
)
def test_a_last_line_asks_and_not_the_document_before_it(
    byte_level: Any, question: str, chat: bool
) -> None:
    text = f"{lengthy(90)}\n{lengthy(90)}\n\n{question}"
    source: Any = [{"role": "user", "content": text}] if chat else text
    prompt = prepare(source, target_tokenizer=byte_level)
    assert asked(prompt).lstrip("\n") == prompt.text[prompt.text.rindex(question) :]


@pytest.mark.parametrize("text", ["{long} Where is the key?", "Where is the key?\n\n{long}"])
def test_a_last_line_too_long_for_a_question_leaves_the_whole_message(
    byte_level: Any, text: str
) -> None:
    content = text.format(long=lengthy(90))
    prompt = prepare([{"role": "user", "content": content}], target_tokenizer=byte_level)
    assert asked(prompt).startswith(content)


def test_a_question_before_a_tools_answer_is_still_what_asks(byte_level: Any) -> None:
    messages = [
        {"role": "user", "content": "Where is the key?"},
        {"role": "tool", "content": lengthy(80)},
    ]
    prompt = prepare(messages, target_tokenizer=byte_level)
    assert asked(prompt) == "Where is the key?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("before", [False, True])
def test_a_marked_question_asks_wherever_it_stands_and_is_kept(
    byte_level: Any, before: bool
) -> None:
    question, text = "Who keeps the lighthouse?", lengthy(80)
    content = f"{question}\n\n{text}" if before else f"{text}\n\n{question}"
    prompt = prepare(
        [{"role": "user", "content": content}], target_tokenizer=byte_level, question=question
    )
    assert asked(prompt).replace("\n\n", "") in (
        question + "<|im_end|>\n<|im_start|>assistant\n",
        # Where the first token of the question holds the space before it.
        " " + question + "<|im_end|>\n<|im_start|>assistant\n",
    )
    assert question in words_of(prompt, "marked")


def test_in_a_plain_text_of_one_line_all_tokens_that_stand_for_text_may_ask(tokenizer: Any) -> None:
    prompt = prepare(lengthy(50), target_tokenizer=tokenizer)
    spoken = np.flatnonzero(prompt.draft.ends > prompt.draft.starts)
    np.testing.assert_array_equal(prompt.question, spoken)


@pytest.mark.parametrize("question", ["", "not in the prompt"])
def test_a_question_that_the_prompt_does_not_hold_is_refused(
    byte_level: Any, question: str
) -> None:
    with pytest.raises(InputError) as caught:
        prepare(lengthy(20), target_tokenizer=byte_level, question=question)
    assert caught.value.field == "question"


@given(text=texts(2, 12), data=st.data())
def test_what_asks_is_ascending_and_ends_with_the_last_token(
    byte_level: Any, text: str, data: st.DataObject
) -> None:
    assume(len(text.strip()) > 3)
    start = data.draw(st.integers(0, len(text) - 1))
    piece = text[start : data.draw(st.integers(start + 1, len(text)))]
    prompt = prepare(text + " end.", target_tokenizer=byte_level, question=piece)
    assert (np.diff(prompt.question) > 0).all()
    assert prompt.question[-1] == len(prompt.draft) - 1
    assert piece in asked(prompt)


def test_protected_spans_are_sorted_and_lie_within_the_text(byte_level: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": lengthy(200), "protect": True},
        {"role": "user", "content": "Where?"},
    ]
    prompt = prepare(messages, target_tokenizer=byte_level, protect=["stone"])
    starts = [s.start for s in prompt.protected]
    assert starts == sorted(starts)
    assert all(0 <= s.start < s.end <= len(prompt.text) for s in prompt.protected)
    assert Span(prompt.text.index("Be brief."), prompt.text.index("Be brief.") + 9, "system") in (
        prompt.protected
    )
