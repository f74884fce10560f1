"""Where a tokenised text may be cut: between characters, words, sentences, lines.

Everything here is vectorised over tokens; characters are classified once per distinct
character of the text. A *cut* i lies before token i; cuts 0 and N are always allowed.
"""

from __future__ import annotations

import numpy as np
import regex
from numpy.typing import NDArray

Cuts = NDArray[np.bool_]

# Unicode's grapheme cluster rules (UAX 29), as two questions about neighbours. A few
# clusters stay whole that could be cut (runs of flags, a joiner before a letter); none is
# cut that should stay whole.
_JOINS_PREVIOUS = regex.compile(r"[\p{GCB=Extend}\p{GCB=SpacingMark}\p{GCB=ZWJ}\p{GCB=V}\p{GCB=T}]")
_JOINS_NEXT = regex.compile(r"[\p{GCB=Prepend}\p{GCB=ZWJ}\p{GCB=L}]")
_FLAG = regex.compile(r"\p{GCB=Regional_Indicator}")
# Scripts written without spaces: every character is a fair place to cut.
_UNSPACED = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
    r"、。，！？；：「」『』（）《》【】]"
)
# Joins the consonants around it into one conjunct, also through other marks after it.
_VIRAMA = regex.compile(r"\p{CCC=Virama}")
_SENTENCE_END = frozenset(".!?…。！？।؟")
_CLOSERS = frozenset("\"')]}”’»」』）")

_SPACE, _NEWLINE, _PREVIOUS, _NEXT, _FLAGS, _UNSPACED_BIT, _END, _CLOSER, _CR, _LINKER = (
    1 << i for i in range(10)
)


def _classify(char: str) -> int:
    kind = 0
    if char.isspace():
        kind |= _SPACE
    if char == "\n":
        kind |= _NEWLINE
    if char == "\r":
        kind |= _CR
    if _JOINS_PREVIOUS.match(char):
        kind |= _PREVIOUS
    if _JOINS_NEXT.match(char):
        kind |= _NEXT
    if _VIRAMA.match(char):
        kind |= _LINKER
    if _FLAG.match(char):
        kind |= _FLAGS
    if _UNSPACED.match(char):
        kind |= _UNSPACED_BIT
    if char in _SENTENCE_END:
        kind |= _END
    if char in _CLOSERS:
        kind |= _CLOSER
    return kind


def classes(text: str) -> NDArray[np.uint16]:
    """Character classes of `text`, one bit field per code point: uint16 `[len(text)]`."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    if not codes.size:
        return np.zeros(0, dtype=np.uint16)
    table = np.zeros(int(codes.max()) + 1, dtype=np.uint16)
    seen = np.zeros(table.size, dtype=np.bool_)
    seen[codes] = True
    for code in np.flatnonzero(seen).tolist():
        table[code] = _classify(chr(code))
    kinds = table[codes]
    _extend_linkers(kinds)
    return kinds


def _extend_linkers(kinds: NDArray[np.uint16]) -> None:
    """Let a virama, and the marks that follow it, join whatever comes next."""
    linkers = (kinds & _LINKER) != 0
    if linkers.any():
        at = np.arange(kinds.size)
        last_linker = np.maximum.accumulate(np.where(linkers, at, -1))
        last_base = np.maximum.accumulate(np.where(kinds & _PREVIOUS, -1, at))
        kinds[last_linker > last_base] |= _NEXT


class Boundaries:
    """The cuts of one tokenised text at each level, as bool arrays `[N + 1]`.

    char: no token is split and no user-perceived character (grapheme cluster).
    word: besides, one side of the cut is white space or a script written without spaces.
    sentence: besides, the text before the cut ends a sentence or a line.
    line: the text before the cut ends a line.
    """

    def __init__(self, text: str, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        n = starts.size
        kinds = classes(text)
        # Tokens that hold part of a character's bytes all carry the whole character's span.
        apart = np.ones(n + 1, dtype=np.bool_)
        if n:
            apart[1:n] = np.maximum.accumulate(ends)[:-1] <= starts[1:]
        at = np.append(starts, len(text)).astype(np.int64)
        inside = (at > 0) & (at < len(text))
        safe = np.where(inside, at, 1 if len(text) > 1 else 0)
        if len(text) > 1:
            after, before = kinds[safe], kinds[safe - 1]
            before2 = kinds[np.maximum(safe - 2, 0)]
        else:
            after = before = before2 = np.zeros(n + 1, dtype=np.uint16)

        def has(kind: NDArray[np.uint16], bit: int) -> Cuts:
            cuts: Cuts = (kind & bit) != 0
            return cuts

        joined = has(after, _PREVIOUS) | has(before, _NEXT)
        joined |= has(after, _FLAGS) & has(before, _FLAGS)
        joined |= has(after, _NEWLINE) & has(before, _CR)
        self.char: Cuts = apart & ~(joined & inside)
        spaced = has(after, _SPACE) | has(before, _SPACE)
        unspaced = has(after, _UNSPACED_BIT) | has(before, _UNSPACED_BIT)
        self.word: Cuts = self.char & (spaced | unspaced | ~inside)
        self.line: Cuts = self.char & (has(before, _NEWLINE) | ~inside)
        ends_sentence = has(before, _END) | (has(before, _CLOSER) & has(before2, _END))
        self.sentence: Cuts = self.line | (self.word & ends_sentence)
        for cuts in (self.char, self.word, self.line, self.sentence):
            cuts[0] = cuts[n] = True

    def at(self, level: str) -> list[Cuts]:
        """Cut arrays to try in turn for `level`, the finest last."""
        return {
            "char": [self.char],
            "word": [self.word, self.char],
            "sentence": [self.sentence, self.word, self.char],
            "line": [self.line, self.word, self.char],
        }[level]


def chunk_borders(n: int, chunk: int, levels: list[Cuts]) -> NDArray[np.int64]:
    """Borders of chunks over `n` tokens: sorted, first 0, last n; chunks of at most `chunk`.

    Each border is the last allowed cut in the further half of the chunk, at the coarsest level
    that has one; with whole-character cuts everywhere, borders are multiples of `chunk`. A
    chunk is longer than `chunk` only where a single character is.
    """
    last_cut = [np.maximum.accumulate(np.where(c, np.arange(n + 1), -1)) for c in levels]
    finest = levels[-1]
    borders = [0]
    while borders[-1] < n:
        here = borders[-1]
        reach = here + chunk
        if reach >= n:
            borders.append(n)
            break
        for cut in last_cut:
            if cut[reach] > here + chunk // 2:
                border = int(cut[reach])
                break
        else:
            border = int(last_cut[-1][reach])
            if border <= here:
                border = here + 1 + int(np.argmax(finest[here + 1 :]))
        borders.append(border)
    return np.asarray(borders, dtype=np.int64)
