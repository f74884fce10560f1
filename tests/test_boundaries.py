from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from tests.strategies import texts
from trtllm_specprefill.boundaries import Boundaries, chunk_borders
from trtllm_specprefill.prompt import Encoding, encode

LEVELS = ("char", "word", "sentence", "line")


def grapheme_borders(text: str) -> set[int]:
    """Borders of user-perceived characters, by the `regex` package's own \\X."""
    return {0} | {match.end() for match in regex.finditer(r"\X", text)}


def one_token_per_character(text: str) -> Encoding:
    at = np.arange(len(text), dtype=np.int64)
    return Encoding(at.astype(np.int32), at, at + 1)


def one_token_per_byte(text: str) -> Encoding:
    """What byte fallback gives: every byte's token carries the whole character."""
    widths = [len(char.encode()) for char in text]
    at = np.repeat(np.arange(len(text), dtype=np.int64), widths)
    return Encoding(at.astype(np.int32), at, at + 1)


def pieces_at(text: str, cuts: list[int]) -> Encoding:
    at = np.asarray([0, *sorted({c for c in cuts if 0 < c < len(text)})], dtype=np.int64)
    ends = np.append(at[1:], len(text))
    return Encoding(at.astype(np.int32), at, ends)


def boundaries_of(text: str, encoding: Encoding) -> Boundaries:
    return Boundaries(text, encoding.starts, encoding.ends)


def cut_places(text: str, encoding: Encoding, level: str) -> list[int]:
    cuts = getattr(boundaries_of(text, encoding), level)
    return np.append(encoding.starts, len(text))[np.flatnonzero(cuts)].tolist()


@given(text=texts(min_pieces=1))
@example("क\u094d\u093cष")  # a nukta after the virama
@example("क\u094d\u200dष")
@example("a\u0600b")
@example("👩‍👩‍👧🇫🇷🇩")
@example("\r\n\r\n")
@example("\u1100\uac00\u1161\u11a8\uac01")
def test_no_cut_falls_within_a_user_perceived_character_of_any_script(text: str) -> None:
    borders = grapheme_borders(text)
    for encoding in (one_token_per_character(text), one_token_per_byte(text)):
        for level in LEVELS:
            assert borders.issuperset(cut_places(text, encoding, level)), level


@pytest.mark.parametrize("script", ["Deva", "Beng", "Gujr", "Orya", "Telu", "Mlym", "Khmr", "Mymr"])
def test_no_cut_falls_within_a_conjunct_of_an_indic_script(script: str) -> None:
    letters = [chr(c) for c in range(0x10000) if regex.match(rf"\p{{sc={script}}}", chr(c))]
    rng = np.random.default_rng()
    for _ in range(40):
        text = "".join(rng.choice([*letters, "\u200d", "\u200c"], size=60))
        assert grapheme_borders(text).issuperset(
            cut_places(text, one_token_per_character(text), "char")
        ), ascii(text)


@given(text=st.text(alphabet="abcXYZ 019.,;ÄßЖשع你あ가"))
def test_every_border_between_simple_characters_may_be_cut(text: str) -> None:
    assert boundaries_of(text, one_token_per_character(text)).char.all()


@given(text=texts(min_pieces=1), data=st.data())
def test_levels_are_nested_and_the_ends_of_the_prompt_may_always_be_cut(
    text: str, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, max(len(text), 1))))
    found = boundaries_of(text, pieces_at(text, cuts))
    assert (found.word <= found.char).all()
    assert (found.sentence <= found.word | found.line).all()
    assert (found.line <= found.sentence).all()
    for level in LEVELS:
        assert getattr(found, level)[[0, -1]].all()


def test_words_sentences_and_lines_are_cut_where_a_person_would() -> None:
    text = 'He left. "Why?" she said.\nNobody knew'
    encoding = one_token_per_character(text)
    assert cut_places(text, encoding, "line") == [0, text.index("Nobody"), len(text)]
    places = cut_places(text, encoding, "sentence")
    assert [text[a:b] for a, b in itertools.pairwise(places)] == [
        "He left.",
        ' "Why?"',
        " she said.",
        "\n",
        "Nobody knew",
    ]
    for place in cut_places(text, encoding, "word"):
        assert place in (0, len(text)) or text[place].isspace() or text[place - 1].isspace()


@pytest.mark.parametrize("text", ["你好世界，今天天气很好。" * 30, "寿司を食べます。カタカナ" * 30])
def test_a_script_without_spaces_may_be_cut_at_any_character_at_word_level(text: str) -> None:
    assert boundaries_of(text, one_token_per_character(text)).word.all()


@given(
    text=texts(min_pieces=1, max_pieces=40),
    chunk=st.integers(1, 40),
    level=st.sampled_from(LEVELS),
    data=st.data(),
)
def test_chunks_cover_the_prompt_and_exceed_their_length_only_for_a_single_character(
    text: str, chunk: int, level: str, data: st.DataObject
) -> None:
    encoding = data.draw(st.sampled_from([one_token_per_character(text), one_token_per_byte(text)]))
    n = len(encoding)
    found = boundaries_of(text, encoding)
    borders = chunk_borders(n, chunk, found.at(level))
    assert borders[0] == 0
    assert borders[-1] == n
    assert (np.diff(borders) > 0).all()
    assert found.char[borders].all()
    for start, stop in itertools.pairwise(borders):
        if stop - start > chunk:
            assert not found.char[start + 1 : stop].any()


@given(n=st.integers(0, 700), chunk=st.integers(1, 130))
def test_chunks_of_plain_text_cut_anywhere_are_multiples_of_their_length(
    n: int, chunk: int
) -> None:
    text = "x" * n
    found = boundaries_of(text, one_token_per_character(text))
    borders = chunk_borders(n, chunk, found.at("char"))
    assert borders.tolist() == [*range(0, n, chunk), n]


@given(
    words=st.lists(
        st.text(alphabet="abcdefghij-'", min_size=1, max_size=12), min_size=1, max_size=80
    ),
    chunk=st.integers(2, 48),
    data=st.data(),
)
def test_a_border_is_within_a_word_only_where_no_end_of_a_word_is_in_reach(
    words: list[str], chunk: int, data: st.DataObject
) -> None:
    text = " ".join(words)
    cuts = data.draw(st.lists(st.integers(1, len(text)), max_size=200))
    encoding = pieces_at(text, cuts)
    found = boundaries_of(text, encoding)
    at = np.append(encoding.starts, len(text))
    ends_word = np.asarray(
        [p in (0, len(text)) or text[p] == " " or text[p - 1] == " " for p in at.tolist()]
    )
    borders = chunk_borders(len(encoding), chunk, found.at("word")).tolist()
    for start, border in itertools.pairwise(borders):
        reach = ends_word[start + chunk // 2 + 1 : start + chunk + 1]
        if reach.any():
            assert ends_word[border], (text[: at[border]][-20:], text[at[border] :][:20])


def test_fuel_dilution_never_comes_out_as_uedil() -> None:
    # LLMLingua issue 149: tokens as a small vocabulary splits them.
    unit = ["F", "uel", " D", "il", "ution", " was", " fo", "und", " in", " the", " o", "il", "."]
    pieces = [*unit, " "] * 60
    text = "".join(pieces)
    ends = np.cumsum([len(p) for p in pieces])
    starts = ends - [len(p) for p in pieces]
    found = Boundaries(text, starts.astype(np.int64), ends.astype(np.int64))
    whole = set(text.split())
    for chunk in range(8, 129):
        borders = chunk_borders(len(pieces), chunk, found.at("word"))
        for a, b in itertools.pairwise(borders):
            assert whole.issuperset("".join(pieces[a:b]).split()), chunk


@given(seed=st.integers(0, 2**32), level=st.sampled_from(LEVELS), chunk=st.integers(1, 40))
def test_chinese_and_japanese_are_never_garbled_whatever_chunks_are_kept(
    tokenizer: Any, seed: int, level: str, chunk: int
) -> None:
    # LLMLingua issues 4, 63 (and 131: no spaces put in): characters are several tokens here.
    rng = np.random.default_rng(seed)
    stock = "敏捷的棕色狐狸跳过了懒狗。这是最好的时代，魑魅魍魉。寿司を食べます！𠮷野家🙂"
    text = "".join(rng.choice(list(stock), size=300))
    encoding = encode(tokenizer, text, special=False)
    found = Boundaries(text, encoding.starts, encoding.ends)
    borders = chunk_borders(len(encoding), chunk, found.at(level))
    at = np.append(encoding.starts, len(text))
    for a, b in itertools.pairwise(borders):
        if rng.random() < 0.5:
            assert tokenizer.decode(encoding.ids[a:b]).strip() == text[at[a] : at[b]].strip()
