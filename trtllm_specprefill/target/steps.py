"""Tokens as an engine gives them -> the steps of an answer; the same for every target."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.base import FinishReason, Step
from trtllm_specprefill.target.text import TextStream


@dataclass(frozen=True)
class Chunk:
    """What an engine gives at a time.

    token_ids: new tokens, in order; may be empty. finish: why the engine ends here, None while
    it goes on. An engine may stop at an end id and not show it.
    """

    token_ids: Sequence[int]
    finish: FinishReason | None = None


def assemble(
    chunks: Generator[Chunk, None, None],
    tokenizer: Any,
    sampling: Sampling,
    end_ids: Collection[int],
) -> Generator[Step, None, None]:
    """Steps of an answer: cut at an end id, a stop text or `max_tokens`, whichever comes first.

    One step a chunk. Tokens after the cut are dropped, so an engine that knows nothing of stop
    texts needs only be closed: `chunks` is, whatever happens. It must end with a finish reason
    unless it is cut before.
    """
    text, count = TextStream(tokenizer, sampling.stop), 0
    with closing(chunks):
        for chunk in chunks:
            piece, taken = "", []
            for token in chunk.token_ids:
                taken.append(token)
                count += 1
                if token in end_ids:
                    yield Step(piece + text.finish(), tuple(taken), "stop")
                    return
                piece += text.push(token)
                if text.stopped:
                    yield Step(piece, tuple(taken), "stop")
                    return
                if count == sampling.max_tokens:
                    piece += text.finish()
                    yield Step(piece, tuple(taken), "stop" if text.stopped else "length")
                    return
            if chunk.finish is not None:
                piece += text.finish()
                yield Step(piece, tuple(taken), "stop" if text.stopped else chunk.finish)
                return
            yield Step(piece, tuple(taken))
