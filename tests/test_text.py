from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.strategies import texts
from trtllm_specprefill.target.text import TextStream

REPLACEMENT = "\ufffd"


def whole(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def streamed(tokenizer: Any, ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    """The pieces a consumer gets, stopping where the stream does; the last is `finish`'s."""
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces
    return [*pieces, stream.finish()]


@given(text=texts())
@example("👩‍👩‍👧‍👦🙂寿司\n")
@example("  two spaces first")
@example("▁ the mark itself ▁▁")
def test_pieces_put_together_are_the_full_decode_in_any_script(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert "".join(streamed(tokenizer, ids)) == whole(tokenizer, ids)


@given(ids=st.lists(st.integers(0, 2**16), max_size=60))
def test_pieces_of_random_ids_are_the_full_decode_even_where_that_is_no_text(
    byte_level: Any, ids: list[int]
) -> None:
    ids = [i % len(byte_level) for i in ids]
    assert "".join(streamed(byte_level, ids)) == whole(byte_level, ids)


@given(ids=st.lists(st.integers(0, 2**16), max_size=60))
def test_pieces_of_random_whole_words_are_the_full_decode(metaspace: Any, ids: list[int]) -> None:
    # A SentencePiece decoder turns a whole run of byte tokens into replacement characters when
    # its end is no character: what was streamed before cannot be taken back. So no bytes here.
    ids = [i % len(metaspace) for i in ids]
    ids = [i for i in ids if not metaspace.convert_ids_to_tokens(i).startswith("<0x")]
    assert "".join(streamed(metaspace, ids)) == whole(metaspace, ids)


@given(text=texts(min_pieces=1))
@example("🙂👍🏽𠮷𐍈")
def test_no_piece_shows_part_of_a_character(tokenizer: Any, text: str) -> None:
    assume(REPLACEMENT not in text)
    for piece in streamed(tokenizer, tokenizer.encode(text)):
        assert REPLACEMENT not in piece


def test_a_character_comes_out_with_its_last_byte_and_not_later(tokenizer: Any) -> None:
    ids = tokenizer.encode("寿🙂司", add_special_tokens=False)
    stream = TextStream(tokenizer)
    shown = ""
    for i, token in enumerate(ids):
        shown += stream.push(token)
        read = whole(tokenizer, ids[: i + 1])
        expected = max((c for c in ("", "寿", "寿🙂", "寿🙂司") if c in read), key=len)
        assert shown.startswith(expected)
    assert shown == "寿🙂司"


def test_a_character_left_incomplete_at_the_end_is_shown_as_such(tokenizer: Any) -> None:
    ids = tokenizer.encode("ab🙂", add_special_tokens=False)[:-1]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces[:-1]) == "ab"
    assert "".join(pieces) == whole(tokenizer, ids)
    assert pieces[-1].startswith(REPLACEMENT)


@given(text=st.text("aé寿🙂 ", max_size=8), cut=st.integers(1, 3), after=st.sampled_from(["", "x"]))
@example("你好", 2, "")
@example("🙂", 1, "x")
def test_a_character_that_was_shown_is_not_shown_again_where_bytes_fit_no_character(
    metaspace: Any, text: str, cut: int, after: str
) -> None:
    # Of a run of bytes, one of which fits no character, a SentencePiece decoder spells none.
    broken = metaspace.encode("🙂", add_special_tokens=False)[-4:][:cut]
    ids = metaspace.encode(text, add_special_tokens=False) + broken
    ids += metaspace.encode(after, add_special_tokens=False) if after else []
    got = "".join(streamed(metaspace, ids))
    assert got.replace(REPLACEMENT, "").split() == (text + " " * bool(after) + after).split()
    assert got.count(REPLACEMENT) == cut


@given(
    before=texts(max_pieces=5),
    stop=texts(min_pieces=1, max_pieces=2),
    after=texts(max_pieces=4),
)
def test_the_text_ends_right_before_a_stop_text_whatever_the_token_borders(
    tokenizer: Any, before: str, stop: str, after: str
) -> None:
    ids = tokenizer.encode(before + stop + after, add_special_tokens=False)
    full = whole(tokenizer, ids)
    assume(stop and stop in full)
    pieces = streamed(tokenizer, ids, (stop,))
    assert "".join(pieces) == full[: full.index(stop)]


@given(
    text=st.text(alphabet="ab c", max_size=40),
    stops=st.lists(st.text("abc ", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_nothing_of_a_stop_text_is_ever_shown(tokenizer: Any, text: str, stops: list[str]) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    full = whole(tokenizer, ids)
    stream = TextStream(tokenizer, stops)
    shown = ""
    for token in ids:
        shown += stream.push(token)
        assert full.startswith(shown)
        assert not any(stop in shown for stop in stops)
        # Whatever follows, no later stop can begin within what was shown already.
        read = whole(tokenizer, ids)
        for stop in stops:
            at = read.find(stop)
            if at >= 0 and not stream.stopped:
                first = min(read.find(s) + len(s) for s in stops if s in read)
                assert len(shown) <= at or at + len(stop) > first
        if stream.stopped:
            break
    if not stream.stopped:
        shown += stream.finish()
        if not stream.stopped:
            assert shown == full
            assert not any(stop in full for stop in stops)


def test_a_stop_that_only_began_is_released_once_it_cannot_be_completed(byte_level: Any) -> None:
    stream = TextStream(byte_level, ["END OF"])
    shown = [stream.push(t) for t in byte_level.encode("x END")]
    assert "".join(shown) == "x "
    rest = "".join(stream.push(t) for t in byte_level.encode("LESS"))
    assert rest == "ENDLESS"
    assert not stream.stopped


def test_a_stop_that_only_began_is_released_when_no_token_follows(tokenizer: Any) -> None:
    ids = tokenizer.encode("x END", add_special_tokens=False)
    pieces = streamed(tokenizer, ids, ("END OF",))
    assert "".join(pieces[:-1]) == "x "
    assert pieces[-1] == "END"


def test_a_stop_completed_by_what_was_held_back_for_a_character_is_found_at_the_end(
    byte_level: Any,
) -> None:
    ids = byte_level.encode("ab🙂")[:-1]
    stream = TextStream(byte_level, [REPLACEMENT])
    shown = "".join(stream.push(t) for t in ids)
    shown += stream.finish()
    assert shown == "ab"
    assert stream.stopped


def test_nothing_comes_after_a_stop(byte_level: Any) -> None:
    stream = TextStream(byte_level, ["."])
    for token in byte_level.encode("One. Two."):
        stream.push(token)
    assert stream.stopped
    assert stream.finish() == ""


@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id"])
def test_special_tokens_are_no_text(tokenizer: Any, name: str) -> None:
    special = getattr(tokenizer, name)
    if special is None:
        special = tokenizer.eos_token_id
    ids = tokenizer.encode("one two", add_special_tokens=False)
    mixed = [special, *ids[:2], special, *ids[2:], special]
    assert "".join(streamed(tokenizer, mixed)) == whole(tokenizer, mixed) == "one two"
