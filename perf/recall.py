"""Which draft settings keep what matters: recall of a planted fact, and the seconds it took.

Nothing is answered here: a fact is planted, the prompt scored under each arm's settings, and
looked for in what selection keeps. So many settings can be compared for the price of their
draft passes. Facts are those of the needle evaluation, and others whose question shares few
words with them; prompts are told in the forms that clients use.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from perf.options import Draft_, Seed_
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.endings import run_app
from trtllm_specprefill.errors import InputError, given_as
from trtllm_specprefill.evaluation import needle
from trtllm_specprefill.evaluation.forms import FACTS, FORMS, told
from trtllm_specprefill.evaluation.haystack import haystack
from trtllm_specprefill.evaluation.needle import Case, cases
from trtllm_specprefill.evaluation.report import check_out, command, machine
from trtllm_specprefill.models import load_model, load_tokenizer
from trtllm_specprefill.prompt import Prompt, prepare, tokenizer_difference
from trtllm_specprefill.selection import select
from trtllm_specprefill.settings import Settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_screen = Console(stderr=True, highlight=False)


@app.command(
    epilog="""Example: python -m perf.recall --arm 'fast={}' --arm 'all={"draft_layers":30}'"""
)
def recall(
    arm: Annotated[list[str], typer.Option(metavar="NAME=JSON", help="Settings; repeatable.")],
    draft: Draft_ = "smollm2-135m",
    target: Annotated[
        str | None,
        typer.Option(help="Model whose template and tokens it is about; the draft when absent."),
    ] = None,
    lengths: Annotated[
        list[int], typer.Option(min=1, help="Tokens of the context; repeatable.")
    ] = [  # noqa: B006
        2000,
        4000,
    ],
    needles: Annotated[int, typer.Option(min=1, help="Per length, form and facts.")] = 3,
    form: Annotated[list[str], typer.Option(help=f"Some of {', '.join(FORMS)}.")] = list(FORMS),  # noqa: B006
    keep: Annotated[list[float], typer.Option(help="Keep rates; repeatable.")] = [0.05, 0.1],  # noqa: B006
    seed: Seed_ = 0,
    document: Annotated[
        Path | None, typer.Option(help="Haystack; the Debian handbook when absent.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the report, anew after every prompt.")
    ] = None,
) -> None:
    """Score every prompt under every arm and count what is kept."""
    arms = {}
    for text in arm:
        name, _, knobs = text.partition("=")
        arms[name] = Settings.of(**{**_object(text, knobs), "min_keep_tokens": 0})
    for rate in keep:
        Settings.of(keep_rate=rate)
    check_out(out)
    if unknown := set(form) - set(FORMS):
        raise InputError("form", sorted(unknown), f"some of {', '.join(FORMS)}")
    with given_as(model="draft"):
        model = load_model(draft, progress=lambda line: _screen.print(line, style="dim"))
    scorer = TorchDraft(model)
    with given_as(model="target"):
        tokenizer = scorer.tokenizer if target is None else load_tokenizer(target)
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "command": command(),
        "machine": machine(),
        "draft": draft,
        "target": target or draft,
        "arms": {name: settings.model_dump(exclude_unset=True) for name, settings in arms.items()},
    }
    for facts, shape, case in planted(tokenizer, haystack(document), lengths, needles, form, seed):
        row = {"facts": facts, "form": shape, "tokens": case.tokens, "depth": case.depth}
        row["arms"] = {
            name: _score(scorer, tokenizer, case, shape, settings, keep)
            for name, settings in arms.items()
        }
        rows.append(row)
        _screen.print(f"{facts}, {shape}, {case.tokens}, {case.depth:.2f}: {row['arms']}")
        report |= {"summary": summary(rows), "prompts": rows}
        if out is not None:
            out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    for line in report["summary"]:
        print(json.dumps(line))


def _object(arm: str, knobs: str) -> dict[str, Any]:
    try:
        values = json.loads(knobs)
    except json.JSONDecodeError:
        values = None
    if not isinstance(values, dict):
        raise InputError("--arm", arm, 'NAME=JSON, such as fast={"window": 16}')
    return values


def planted(
    tokenizer: Any, prose: str, lengths: list[int], needles: int, forms: list[str], seed: int
) -> Iterator[tuple[str, str, Case]]:
    """Kind of facts, form and case of every prompt."""
    for i, (facts, templates) in enumerate(FACTS.items()):
        for j, form in enumerate(FORMS):
            if form in forms:
                own = seed + 10 * (2 * j + i)  # other passages and facts for each kind
                for case in cases(
                    prose, tokenizer, lengths, [needles] * len(lengths), own, templates
                ):
                    yield facts, form, case


def _score(
    scorer: TorchDraft,
    tokenizer: Any,
    case: Case,
    form: str,
    settings: Settings,
    rates: list[float],
) -> dict[str, Any]:
    source, question = told(case, form)
    own = scorer.tokenizer if tokenizer_difference(scorer.tokenizer, tokenizer) else None

    def prepared(rate: float) -> Prompt:
        at_rate = settings.model_copy(update={"keep_rate": rate})
        return prepare(
            source,
            target_tokenizer=tokenizer,
            draft_tokenizer=own,
            settings=at_rate,
            question=question,
        )

    prompts = {rate: prepared(rate) for rate in rates}
    prompt = prompts[rates[0]]
    importance = scorer.score(prompt.draft.ids, prompt.settings, prompt.question)
    return {
        "seconds": round(sum(importance.seconds.values()), 2),
        "kept": {
            f"{rate:g}": needle.fact_kept(prompt, select(prompt, importance), case)
            for rate, prompt in prompts.items()
        },
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per arm and form, and over all: share of facts kept at each rate, and the median seconds."""
    table = []
    for name in rows[0]["arms"]:
        for form in (*FORMS, "all"):
            chosen = [row["arms"][name] for row in rows if form in ("all", row["form"])]
            if chosen:
                rates = chosen[0]["kept"]
                kept = {r: round(float(np.mean([c["kept"][r] for c in chosen])), 3) for r in rates}
                seconds = statistics.median(c["seconds"] for c in chosen)
                table.append(
                    {"arm": name, "form": form, "prompts": len(chosen), "kept": kept}
                    | {"median_s": seconds}
                )
    return table


if __name__ == "__main__":
    run_app(app)
