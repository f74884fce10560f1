"""Whether an answer is said: whole words, whatever their case."""

from __future__ import annotations

import re


def find_words(words: str, text: str, start: int = 0) -> tuple[int, int] | None:
    """Characters of `text`, from `start` on, that are `words`; None where they are not said.

    Case does not matter. Letters and digits must end where `words` does, and a number must be
    all of the number: 50 is not said by 150, 50,000 or 0.50.
    """
    edges = rf"(?<!\w)(?<!\d[.,]){re.escape(words)}(?!\w)(?![.,]\d)"
    found = re.compile(edges, re.IGNORECASE).search(text, start)
    return None if found is None else found.span()
