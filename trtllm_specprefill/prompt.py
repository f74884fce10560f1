"""Text or chat messages -> `Prompt`: one rendered text, tokenised for draft and target.

The text is rendered once, with the target's chat template, since the target answers. Both
tokenizers read that same text with character offsets, so whatever the draft finds important
can be named in characters and found again in target tokens, whatever the two vocabularies
are (the way of arXiv 2603.02631, without its second tokenisation).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.boundaries import Boundaries
from trtllm_specprefill.chat import Content, render
from trtllm_specprefill.errors import InputError, TokenizerMismatch
from trtllm_specprefill.settings import Settings

# Why a stretch of the prompt is kept. The order is the order of precedence where rules overlap.
Rule = Literal["control", "system", "role", "marked", "last_user", "tail", "importance"]
PROTECTION_RULES: tuple[Rule, ...] = ("control", "system", "role", "marked", "last_user", "tail")

LONG_PROMPT, LONG_TAIL, SHORT_TAIL, TAIL_SHARE = 16_000, 512, 64, 32
WORD_REACH = 32  # tokens the tail may grow by to begin with a whole word
CLOSING_REACH = 32  # tokens behind a question that are taken as part of it
SHORT_QUESTION, LONG_QUESTION = 12, 64  # characters, and tokens, of last lines that may ask
LAST_USER_SHARE = 4  # the last user message is kept whole where it fits in budget / 4


@dataclass(frozen=True)
class Span:
    """Characters `[start, end)` of the rendered text, and the rule that keeps them."""

    start: int
    end: int
    rule: Rule


@dataclass(frozen=True)
class Encoding:
    """One tokenizer's reading of a text.

    ids: int32 `[N]`. starts, ends: int64 `[N]`, the characters `[starts[i], ends[i])` of
    token i, non-decreasing; tokens that hold part of one character's bytes all carry the
    whole character; a token that stands for no text (BOS) has starts == ends. White space that
    a tokenizer leaves to no token belongs to the token after it.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.ids.size)

    def overlapping(self, start: int, end: int) -> slice:
        """Tokens that hold any character of `[start, end)`."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left"))
        return slice(first, max(first, last))


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt and all that the later stages need to know of it.

    text: what the target reads, special tokens spelt out. draft, target: its two encodings;
    the same object when both models share a tokenizer. protected: spans kept whatever their
    importance, sorted, possibly overlapping. settings: the request's settings in force.
    question: int64, ascending, the draft tokens that ask: a marked question, or the last line of
    the last user message or of the text (all of it where that line is long), and what closes
    the prompt.
    """

    text: str
    draft: Encoding
    target: Encoding
    protected: tuple[Span, ...]
    settings: Settings
    question: NDArray[np.int64]

    @property
    def shared_tokenizer(self) -> bool:
        """Whether draft and target read the same ids."""
        return self.draft is self.target

    @property
    def head(self) -> int:
        """Tokens at the start that are kept by what they are: template, tools, system prompt.

        The same whatever the user says and the draft finds, so a target need not read them anew.
        """
        reach = 0
        for span in self.protected:
            if span.start > reach:
                break
            if span.rule in ("control", "system"):
                reach = max(reach, span.end)
        return int(np.searchsorted(self.target.ends, reach, side="right")) if reach else 0


def prepare(
    source: str | Sequence[dict[str, Any]],
    *,
    target_tokenizer: Any,
    draft_tokenizer: Any | None = None,
    settings: Settings | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
    protect: Iterable[str] = (),
    question: str | None = None,
) -> Prompt:
    """Render, tokenise and protect.

    source: a text (completion), or chat messages in OpenAI's form: role system, developer,
        user, assistant or tool; content a text or a list of text parts; `tool_calls`; and our
        own `"protect": true` on a message to keep it whole.
    draft_tokenizer: None when the draft shares the target's (see `tokenizer_difference`).
    tools: tool definitions in OpenAI's form; need a chat template that renders them.
    protect: texts to keep wherever they occur in the prompt.
    question: the words of the prompt that ask, wherever they stand; kept as well.
    Raises `InputError` for anything malformed, naming the message and the field, and
    `TokenizerMismatch` when an encoding cannot be aligned with the text.
    """
    settings = (settings or Settings()).in_force()
    if isinstance(source, str):
        if tools:
            raise InputError("tools", "with a plain text", "tools together with chat messages")
        text, contents = source, None
    else:
        text, contents = render(source, tools, target_tokenizer)
    check_text("prompt", text)
    if not text:
        raise InputError("prompt", text, "a text of at least 2 tokens")
    target = encode(target_tokenizer, text, special=contents is None)
    if len(target) < 2:
        raise InputError("prompt", text, "a text of at least 2 tokens")
    # The text is in the target's words, its BOS included; a draft of another family gets its own.
    draft = target if draft_tokenizer is None else encode(draft_tokenizer, text, special=True)
    if settings.tail_tokens is None:
        settings = settings.derived(tail_tokens=default_tail(len(target)))
    if isinstance(protect, str | bytes) or not isinstance(protect, Iterable):
        raise InputError("protect", protect, "a list of texts")
    marked = [span for piece in protect for span in _occurrences("protect", text, piece)]
    if question is not None:
        marked.append(_occurrences("question", text, question)[-1])
    asking = _asking(text, draft, contents or [], None if question is None else marked[-1])
    spans = marked + _protections(text, target, contents or [], contents is None, settings)
    ordered = sorted(spans, key=lambda s: (s.start, PROTECTION_RULES.index(s.rule), s.end))
    return Prompt(text, draft, target, tuple(ordered), settings, asking)


def ask(context: str, question: str, tokenizer: Any) -> str | list[dict[str, Any]]:
    """A question about a context, in the form the model behind `tokenizer` is used to.

    One user message for a model with a chat template, a text to complete for one without.
    """
    if getattr(tokenizer, "chat_template", None):
        return [{"role": "user", "content": f"{context}\n\n{question}"}]
    return f"{context}\n\nQuestion: {question}\nAnswer:"


def default_tail(prompt_tokens: int) -> int:
    """Tokens at the end of a prompt that are always kept, unless the request says otherwise."""
    if prompt_tokens > LONG_PROMPT:
        return LONG_TAIL
    return max(SHORT_TAIL, prompt_tokens // TAIL_SHARE)


def read_text(field: str, path: Path) -> str:
    """The text of a UTF-8 file; `InputError` naming `field` when it cannot be read."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(field, str(path), f"a UTF-8 text file ({error.reason})") from None
    except OSError as error:
        raise InputError(field, str(path), f"a file that can be read ({error.strerror})") from None


def read_input(field: str, name: str) -> str:
    """As `read_text`; of stdin where `name` is `-`."""
    if not name:
        raise InputError(field, name, "the name of a file, or - for stdin")
    if name != "-":
        return read_text(field, Path(name))
    try:
        return str(sys.stdin.buffer.read(), "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(field, "stdin", f"UTF-8 text ({error.reason})") from None


def check_text(field: str, text: str) -> None:
    """Raise `InputError` when `text` cannot be written as UTF-8 (lone surrogates)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        shown = text[error.start : error.end]
        raise InputError(field, shown, "valid Unicode text without lone surrogates") from None


def encode(tokenizer: Any, text: str, *, special: bool) -> Encoding:
    """Tokenise `text` with character offsets.

    special: let the tokenizer add its own BOS and the like (a rendered chat template has
    them in its text already). Raises `TokenizerMismatch` when the tokens do not cover the text.
    """
    out = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(out["input_ids"], dtype=np.int32)
    raw = np.asarray(out["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    empty = raw[:, 0] == raw[:, 1]
    ends = np.maximum.accumulate(raw[:, 1]) if ids.size else raw[:, 1]
    previous_end = np.concatenate(([0], ends[:-1])) if ids.size else ends
    # A gap (trimmed white space) goes to the token after it, or to the one trimmed to nothing;
    # an overlap (bytes of one character, in a tokenizer that names its pieces) is widened to
    # the whole character. Tokens of no text are at (0, 0).
    starts = np.where(empty, previous_end, np.minimum(raw[:, 0], previous_end))
    starts, ends = _join_overlaps(starts, ends)
    covered = int(ends[-1]) if ids.size else 0
    if text[covered:].strip():
        raise TokenizerMismatch(
            f"the tokenizer's offsets end at character {covered} of {len(text)}"
        )
    if ids.size:
        ends[-1] = len(text)
    return Encoding(ids, starts, ends)


def _join_overlaps(
    starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give tokens that share characters the same span, so that none can be cut off alone."""
    if starts.size < 2:
        return starts, ends
    # `starts` is <= the end before it; it is < only where characters are shared.
    fresh = np.concatenate(([True], starts[1:] >= ends[:-1]))
    if fresh.all():
        return starts, ends
    group = np.cumsum(fresh) - 1
    first = np.flatnonzero(fresh)
    last = np.append(first[1:], starts.size) - 1
    return starts[first][group], ends[last][group]


def tokenizer_difference(draft: Any, target: Any) -> str | None:
    """Why two tokenizers are not the same, or None when they are.

    Equal size proves nothing (Qwen2.5-Coder and Qwen3 differ in ids above 151,665): every
    id must spell the same string, the special tokens must agree, and a probe text in several
    scripts must encode to the same ids.
    """
    if draft is target:
        return None
    ours, theirs = draft.get_vocab(), target.get_vocab()
    if len(ours) != len(theirs):
        return f"vocabularies of {len(ours)} and {len(theirs)} tokens"
    if ours != theirs:
        token = next(t for t, i in ours.items() if theirs.get(t) != i)
        return f"token {token!r} is id {ours[token]} in one and {theirs.get(token)} in the other"
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(draft, name) != getattr(target, name):
            return f"{name} {getattr(draft, name)} and {getattr(target, name)}"
    probe = "The 42nd  naïve café,\n\tif (x != 0) { return 寿司; } Привет 🙂 العربية é"
    if draft(probe)["input_ids"] != target(probe)["input_ids"]:
        return "the same vocabulary, but another encoding of a probe text"
    return None


def _asking(
    text: str, draft: Encoding, contents: list[Content], question: Span | None
) -> NDArray[np.int64]:
    """The draft tokens that ask, and those that close the prompt."""
    users = [content for content in contents if content.role == "user"]
    if question is not None:
        start, end = question.start, question.end
    else:
        start, end = (users[-1].start, users[-1].end) if users else (0, len(text))
        start = _last_lines(text, draft, start, end)
    asked = draft.overlapping(start, end)
    closing = draft.overlapping(contents[-1].end if contents else len(text), len(text)).start
    # What follows at once belongs to the question: "Answer:", or the end of the message.
    if len(draft) - asked.stop <= CLOSING_REACH:
        closing = asked.stop
    closing = min(max(closing, asked.stop), len(draft) - 1)
    return np.union1d(np.arange(asked.start, asked.stop), np.arange(closing, len(draft)))


def _last_lines(text: str, draft: Encoding, start: int, end: int) -> int:
    """Where the last line that can be a question begins, or `start` where there is none.

    A document and a question about it are parted by a line break more often than not; a line
    of a word or two ("Answer:") belongs to the line before it.
    """
    line = text.rfind("\n", start, start + len(text[start:end].rstrip()))
    while line >= 0:
        tokens = draft.overlapping(line + 1, end)
        if tokens.stop - tokens.start > LONG_QUESTION:
            return start
        if len(text[line + 1 : end].strip()) >= SHORT_QUESTION:
            return start + len(text[start:line].rstrip())  # with the white space that parts them
        line = text.rfind("\n", start, line)
    return start


def _occurrences(field: str, text: str, piece: str) -> list[Span]:
    if not isinstance(piece, str) or not piece:
        raise InputError(field, piece, "texts that are not empty")
    found = []
    # Occurrences may overlap; those of a piece that repeats itself are one span.
    period = (piece + piece).find(piece, 1)
    start = text.find(piece)
    while start >= 0:
        end = start + len(piece)
        while text.startswith(piece[-period:], end):
            end += period
        found.append(Span(start, end, "marked"))
        start = text.find(piece, end - len(piece) + 1)
    if not found:
        raise InputError(field, piece, "texts that occur in the prompt")
    return found


def _protections(
    text: str, target: Encoding, contents: list[Content], plain: bool, settings: Settings
) -> list[Span]:
    """Spans kept by rule: template, protected roles and messages, last user turn, tail."""
    spans: list[Span] = []
    if not plain:
        edges = [0, *(edge for c in contents for edge in (c.start, c.end)), len(text)]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        spans += [Span(start, end, "control") for start, end in gaps if end > start]
    for content in contents:
        if content.role in settings.protect_roles:
            rule: Rule = "system" if content.role in ("system", "developer") else "role"
            spans.append(Span(content.start, content.end, rule))
        if content.protect:
            spans.append(Span(content.start, content.end, "marked"))
    n = len(target)
    budget = settings.limit(n)
    users = [c for c in contents if c.role == "user"]
    if users:
        last = target.overlapping(users[-1].start, users[-1].end)
        if last.stop - last.start <= budget // LAST_USER_SHARE:
            spans.append(Span(users[-1].start, users[-1].end, "last_user"))
    assert settings.tail_tokens is not None
    tail = settings.tail_tokens
    # The last token is kept whatever the settings: its query gives the first answer token.
    cut = n - min(max(tail, 1), n)
    cuts = Boundaries(text, target.starts, target.ends)
    word, char = (int(np.flatnonzero(c[: cut + 1])[-1]) for c in (cuts.word, cuts.char))
    # Back to the start of a word, but not through a long text without spaces.
    cut = word if cut - word <= WORD_REACH else char
    spans.append(Span(int(target.starts[cut]), len(text), "tail"))
    return [span for span in spans if span.end > span.start]
