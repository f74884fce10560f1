"""Questions about prose: what an answer is, where it stands, and what pruning keeps of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from trtllm_specprefill.errors import InputError
from trtllm_specprefill.evaluation.__main__ import app
from trtllm_specprefill.evaluation.needle import Case, summary
from trtllm_specprefill.evaluation.qa import (
    Question,
    cases,
    locate,
    passage_around,
    read_questions,
    retention,
)
from trtllm_specprefill.evaluation.words import find_words
from trtllm_specprefill.prompt import encode

LONGEST = 45  # paragraphs on either side that a passage of 3,000 tokens may reach


def case(answer: str, *accepted: str) -> Case:
    return Case("", answer, "", "", answer, 0, 0.5, 0, accepted)


@pytest.mark.parametrize("text", ["It has 50 workers.", "50", "(50)", "About 50, I think", "50."])
def test_an_answer_is_right_as_whole_words(text: str) -> None:
    assert case("50").is_right(text)


@pytest.mark.parametrize("text", ["150", "502", "50,000", "1.50", "0,50", "fifty", "x50", ""])
def test_a_part_of_another_word_or_number_is_no_answer(text: str) -> None:
    assert not case("50").is_right(text)


def test_every_accepted_form_is_right_whatever_its_case() -> None:
    asked = case("ISC", "Internet Software Consortium", "/etc/bind/named.conf", "smbpasswd -x")
    for text in ("by the isc.", "INTERNET software consortium", "see `/etc/bind/named.conf`."):
        assert asked.is_right(text)
    assert asked.is_right("Run smbpasswd -x user")
    assert not asked.is_right("disc, Internet Software, smbpasswd -xv")


def test_words_are_found_from_a_place_on_and_their_place_is_told() -> None:
    text = "150 men, 50 women and 50 children"
    assert find_words("50", text) == (9, 11)
    assert find_words("50", text, 10) == (22, 24)
    assert find_words("50", text, 23) is None


def test_every_question_shipped_is_answered_by_one_paragraph_and_by_none_near_it(
    prose: str,
) -> None:
    paragraphs = prose.split("\n\n")
    questions = read_questions()
    assert len(questions) >= 40
    assert len({q.question for q in questions}) == len(questions)
    for question in questions:
        place = locate(paragraphs, question)
        assert prose.count(question.anchor) == 1
        answering = [
            i
            for i in range(place - LONGEST, place + LONGEST + 1)
            if any(find_words(words, paragraphs[i % len(paragraphs)]) for words in question.answers)
        ]
        assert answering == [place], question
        assert not any(find_words(words, question.question) for words in question.answers)


def test_an_anchor_that_is_not_found_once_and_an_answer_not_in_its_paragraph_are_refused() -> None:
    paragraphs = ["The cat sleeps on the sofa.", "The dog sleeps in 3 beds.", "The hen is awake."]
    asked = Question(anchor="dog sleeps", question="How many beds?", answers=("three", "3"))
    assert locate(paragraphs, asked) == 1
    for anchor in ("sleeps", "horse"):
        with pytest.raises(InputError, match=f"anchor.*{anchor}"):
            locate(paragraphs, asked.model_copy(update={"anchor": anchor}))
    with pytest.raises(InputError, match="answers"):
        locate(paragraphs, asked.model_copy(update={"answers": ("4",)}))


def test_a_passage_is_of_the_length_asked_with_its_paragraph_at_the_depth_asked(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    rng = random.Random()
    paragraphs = [f"{i} " + "word " * rng.randint(3, 12) for i in range(200)]
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        place = rng.choice([0, 199, rng.randrange(200)])
        tokens = rng.randint(800, 1500)
        body = passage_around(paragraphs, place, byte_level, tokens, depth)
        at = body.index(paragraphs[place])
        order = [(place - at + i) % 200 for i in range(len(body))]
        assert body == [paragraphs[i] for i in order]
        costs = [len(encode(byte_level, p, special=False)) + 1 for p in body]
        longest = max(len(encode(byte_level, p, special=False)) + 1 for p in paragraphs)
        assert tokens - longest < sum(costs) <= tokens
        assert abs(sum(costs[:at]) - depth * (tokens - costs[at])) <= longest


def test_a_passage_longer_than_the_document_is_refused(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(InputError, match=r"lengths.*1000"):
        passage_around(["One line.", "And another."], 0, byte_level, 1000, 0.5)


def test_every_question_is_asked_at_every_length_at_a_depth_of_its_own(
    prose: str, byte_level: PreTrainedTokenizerFast
) -> None:
    questions = read_questions()[:4]
    asked = list(cases(prose, byte_level, [900, 1800], questions, seed=random.randrange(1000)))
    assert [c.tokens for c in asked] == [900] * 4 + [1800] * 4
    assert [c.depth for c in asked] == [0.125, 0.375, 0.625, 0.875] * 2
    assert len({c.seed for c in asked}) == 8
    for one, question in zip(asked, [*questions, *questions], strict=True):
        assert one.context.count(one.fact) == 1
        assert question.anchor in one.fact
        assert one.is_right(one.fact)
        assert find_words(one.answer, one.fact)


def row(question: str, tokens: int, full: bool, pruned: bool, reason: str = "disabled") -> Any:
    results = {
        "full": {"right": full, "reason": reason},
        "0.1": {"right": pruned, "reason": "pruned"},
    }
    return {"question": question, "tokens": tokens, "results": results}


def test_retention_counts_pairs_by_length_and_over_all() -> None:
    rows = [
        row("a", 100, True, True),
        row("b", 100, True, False),
        row("c", 100, False, True),
        row("d", 100, False, False),
        row("a", 200, True, True),
        row("b", 200, True, True),
        row("c", 200, False, False),
        row("d", 200, False, True, reason="context_too_long"),
    ]
    random.shuffle(rows)
    short, long, every = retention(rows)
    counts = ("both", "only_full", "only_pruned", "neither")
    assert [short[name] for name in counts] == [1, 1, 1, 1]
    assert [long[name] for name in counts] == [2, 0, 0, 1]
    assert [every[name] for name in counts] == [3, 1, 1, 2]
    assert (short["retention"], long["retention"], every["retention"]) == (1.0, 1.0, 1.0)
    assert (short["tokens"], long["tokens"], every["tokens"]) == (100, 200, None)
    assert long["interval"] == (1.0, 1.0)
    low, high = short["interval"]
    assert low < 1.0 < high


def test_the_interval_holds_the_share_kept_and_narrows_with_more_questions() -> None:
    widths = []
    for count in (20, 200):
        rows = [row(str(i), 100, True, i % 4 > 0) for i in range(count)]
        found = retention(rows)[0]
        low, high = found["interval"]
        assert low < found["retention"] == 0.75 < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


def test_the_share_still_right_has_an_interval_even_where_all_or_none_are() -> None:
    def found(kept: int, count: int) -> Any:
        return retention([row(str(i), 100, True, i < kept) for i in range(count)])[0]

    # Wilson's interval, as published tables have it.
    assert found(0, 10)["still_right_interval"] == pytest.approx((0, 0.278), abs=1e-3)
    assert found(10, 10)["still_right_interval"] == pytest.approx((0.722, 1), abs=1e-3)
    assert found(8, 10)["still_right_interval"] == pytest.approx((0.490, 0.943), abs=1e-3)
    assert found(8, 10)["still_right"] == 0.8
    assert found(0, 10)["interval"] == (0.0, 0.0)


def test_nothing_right_in_full_gives_no_retention_and_an_unread_report_none_at_all() -> None:
    found = retention([row("a", 100, False, True), row("b", 100, False, False)])[0]
    for name in ("retention", "interval", "still_right", "still_right_interval"):
        assert found[name] is None
    assert retention([row("a", 100, False, False, reason="context_too_long")]) == []


def test_a_file_that_holds_no_questions_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"document": "x", "questions": [{"anchor": "a", "question": "b"}]}')
    with pytest.raises(InputError, match=r"mine.json.*questions\.0\.answers"):
        read_questions(path)
    path.write_text('{"document": "x", "questions": []}')
    with pytest.raises(InputError, match=r"mine.json.*questions: "):
        read_questions(path)


def test_a_document_of_ones_own_needs_questions_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "document.txt"
    path.write_text("Some text.")
    done = CliRunner().invoke(app, ["qa", "--document", str(path)])
    assert isinstance(done.exception, InputError)
    assert done.exception.field == "questions"


@pytest.mark.model
def test_the_command_reports_each_arm_and_what_it_retains(tmp_path: Path) -> None:
    """One question of a document of one's own, answered by a real model in full and pruned."""
    number = str(random.randint(1000, 9999))
    filler = ["The weather in the valley was mild all year, and the farmers were content."] * 20
    lines = [*filler, f"The bridge over the river was finished in the year {number}.", *filler]
    document, questions, out = (tmp_path / n for n in ("text.txt", "questions.json", "out.json"))
    document.write_text("\n\n".join(lines))
    asked = {"anchor": "The bridge", "question": "In which year was the bridge finished?"}
    questions.write_text(
        json.dumps({"document": "a valley", "questions": [asked | {"answers": [number]}]})
    )
    command = f"qa --lengths 300 --keep 0.5 --random-keep 0.5 --document {document}"
    command += f" --questions {questions} --out {out} --json --set positions=contiguous"
    done = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    report = json.loads(done.stdout)
    assert json.loads(out.read_text()) == report
    (answered,) = report["cases"]
    assert answered["answer"] == number
    assert 250 < answered["prompt_tokens"] < 450
    assert list(answered["results"]) == ["full", "0.5", "random 0.5"]
    assert answered["results"]["full"]["right"] is (number in answered["results"]["full"]["text"])
    assert answered["results"]["0.5"]["fact_kept"]
    assert answered["results"]["0.5"]["keep_rate"] == pytest.approx(0.5, abs=0.1)
    assert report["summary"] == summary(report["cases"])
    assert [r["arm"] for r in report["retention"]] == ["0.5", "random 0.5"] * 2
