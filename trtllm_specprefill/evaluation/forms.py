"""The forms in which clients put a question to a document, and facts asked for in other words."""

from __future__ import annotations

from typing import Any

from trtllm_specprefill.evaluation.needle import TEMPLATES, Case

# Fact and question in different words; the third is not asked for here.
PARAPHRASED = (
    (
        "Old Marta of the {place} always hides her key, number {number}, under the flowerpot.",
        "Where does Marta of the {place} put what opens her door, and which number does it bear?",
        "",
    ),
    (
        "In 1987 the painter sold the picture of the {place} for {number} crowns to a stranger.",
        "How much money did the artist get for his work showing the {place}?",
        "",
    ),
    (
        "The telephone of the {place} can be reached under {number} during the day.",
        "Which digits must I dial to call the {place}?",
        "",
    ),
    (
        "Whoever wants to enter the {place} has to type {number} on the keypad.",
        "What opens the {place}? Answer in one short sentence and give nothing but the digits.",
        "",
    ),
)
FACTS = {"plain": TEMPLATES, "paraphrased": PARAPHRASED}
# One message; a system prompt, two turns and the question alone; the question first and marked;
# and no chat template at all.
FORMS = ("message", "turns", "first", "text")


def told(case: Case, form: str) -> tuple[str | list[dict[str, Any]], str | None]:
    """The prompt of a case in one of `FORMS`, and the question to mark in it."""
    if form == "message":
        return [{"role": "user", "content": f"{case.context}\n\n{case.question}"}], None
    if form == "turns":
        turns = (
            ("system", "You answer questions about documents."),
            ("user", case.context),
            ("assistant", "I have read it. What do you want to know?"),
            ("user", case.question),
        )
        return [{"role": role, "content": content} for role, content in turns], None
    if form == "first":
        content = f"{case.question}\n\n{case.context}"
        return [{"role": "user", "content": content}], case.question
    return f"{case.context}\n\nQuestion: {case.question}\nAnswer:", None
