"""`python -m trtllm_specprefill.evaluation`: measure what pruning costs in quality."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from trtllm_specprefill import cli
from trtllm_specprefill.endings import run_app
from trtllm_specprefill.errors import InputError, given_as
from trtllm_specprefill.evaluation.haystack import haystack
from trtllm_specprefill.evaluation.needle import Case, cases, digest, run_case, summary
from trtllm_specprefill.evaluation.positions import compare_positions
from trtllm_specprefill.evaluation.qa import cases as question_cases
from trtllm_specprefill.evaluation.qa import locate, read_questions, retention
from trtllm_specprefill.evaluation.report import check_out, command, machine
from trtllm_specprefill.measured import own_folder, write
from trtllm_specprefill.models import load_tokenizer
from trtllm_specprefill.pipeline import SpecPrefill
from trtllm_specprefill.settings import AMOUNTS, Settings
from trtllm_specprefill.target.evidence import FOLDER, PositionEvidence, Right
from trtllm_specprefill.target.torch import TorchTarget

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)
_screen = Console(stderr=True, highlight=False)
# What the pipeline reads and this evaluation, which calls the stages itself, does not.
_UNREAD = ("enabled", "min_gain", "separator", "strict", "threshold")
_UNREAD_TEXT = ", ".join(_UNREAD)
Document_ = Annotated[
    Path | None,
    typer.Option(help="Haystack, a UTF-8 text; the Debian handbook from its package if absent."),
]
Out_ = Annotated[
    Path | None, typer.Option(help="Also write the report here, anew after every case.")
]
_Json = dict[str, Any]


def _say(line: str) -> None:
    _screen.print(line, style="dim", markup=False)


@app.command(
    epilog="Example: python -m trtllm_specprefill.evaluation needle --needles 8 --json > out.json"
)
def needle(
    draft: Annotated[str, typer.Option(help="Model that scores.")] = "smollm2-135m",
    target: Annotated[str, typer.Option(help="Model that answers.")] = "smollm2-135m",
    lengths: Annotated[
        list[int], typer.Option(min=1, help="Tokens of the context; repeatable.")
    ] = [  # noqa: B006
        2000,
        4000,
        7000,
    ],
    needles: Annotated[
        list[int], typer.Option(min=1, help="Needles: one number, or one for each length.")
    ] = [8],  # noqa: B006
    keep: Annotated[list[float], typer.Option(help="Keep rates; repeatable.")] = [  # noqa: B006
        0.5,
        0.3,
        0.1,
        0.05,
    ],
    random_keep: Annotated[float, typer.Option(help="Keep rate of the random baseline.")] = 0.3,
    seed: Annotated[int, typer.Option(min=0, help="Of passages, facts and the baseline.")] = 0,
    setting: cli.Set_ = None,
    document: Document_ = None,
    dtype: cli.Dtype_ = "auto",
    device: cli.Device_ = "auto",
    out: Out_ = None,
    as_json: cli.Json_ = False,
) -> None:
    """Plant a fact in long prose, prune, ask: full, at each keep rate, and at random."""
    check_out(out)
    prose = haystack(document, _say)
    knobs = _knobs(setting, [*keep, random_keep])
    counts = needles * len(lengths) if len(needles) == 1 else needles
    if len(counts) != len(lengths):
        raise InputError("needles", needles, f"one number, or {len(lengths)}: one for each length")
    model = SpecPrefill.from_pretrained(draft, target, dtype=dtype, device=device, progress=_say)
    report = _measured(
        (
            run_case(model, case, keep, random_keep, knobs)
            for case in cases(prose, model.target.tokenizer, lengths, counts, seed)
        ),
        total=sum(counts),
        head=_head(draft, target, prose, seed),
        summarise=lambda rows: {"summary": summary(rows)},
        out=out,
    )
    _print(report, as_json, _table)


@app.command(
    epilog="Example: python -m trtllm_specprefill.evaluation qa --set positions=contiguous"
)
def qa(
    draft: Annotated[str, typer.Option(help="Model that scores.")] = "smollm2-135m",
    target: Annotated[str, typer.Option(help="Model that answers.")] = "smollm2-135m",
    lengths: Annotated[
        list[int], typer.Option(min=1, help="Tokens of the context; repeatable.")
    ] = [  # noqa: B006
        1500,
        3000,
    ],
    keep: Annotated[list[float], typer.Option(help="Keep rates; repeatable.")] = [  # noqa: B006
        0.3,
        0.1,
    ],
    random_keep: Annotated[float, typer.Option(help="Keep rate of the random baseline.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Of the baseline.")] = 0,
    setting: cli.Set_ = None,
    document: Document_ = None,
    questions: Annotated[
        Path | None,
        typer.Option(help="Questions on the document, in the form of evaluation/questions.json."),
    ] = None,
    first: Annotated[
        int | None, typer.Option(min=1, help="Ask only so many of the questions.")
    ] = None,
    dtype: cli.Dtype_ = "auto",
    device: cli.Device_ = "auto",
    out: Out_ = None,
    as_json: cli.Json_ = False,
) -> None:
    """Ask what a reader would ask of prose: full, at each keep rate, and at random."""
    if document is not None and questions is None:
        raise InputError("questions", None, "a file of questions on the document that is given")
    check_out(out)
    prose = haystack(document, _say)
    asked = read_questions(questions)[:first]
    for question in asked:
        locate(prose.split("\n\n"), question)  # before the models are loaded
    knobs = _knobs(setting, [*keep, random_keep])
    model = SpecPrefill.from_pretrained(draft, target, dtype=dtype, device=device, progress=_say)
    report = _measured(
        (
            run_case(model, case, keep, random_keep, knobs)
            for case in question_cases(prose, model.target.tokenizer, lengths, asked, seed)
        ),
        total=len(asked) * len(lengths),
        head=_head(draft, target, prose, seed),
        summarise=lambda rows: {"summary": summary(rows), "retention": retention(rows, seed)},
        out=out,
    )
    _print(report, as_json, _table, _retention_table)


@app.command(epilog="Example: python -m trtllm_specprefill.evaluation positions --needles 24")
def positions(
    draft: Annotated[str, typer.Option(help="Model that scores.")] = "smollm2-135m",
    target: Annotated[str, typer.Option(help="Model that answers.")] = "smollm2-135m",
    lengths: Annotated[
        list[int], typer.Option(min=1, help="Tokens of the context; repeatable.")
    ] = [  # noqa: B006
        1500,
        3000,
    ],
    needles: Annotated[int, typer.Option(min=1, help="Needles of each length.")] = 12,
    keep: Annotated[float, typer.Option(help="Keep rate.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Of passages and facts.")] = 0,
    document: Document_ = None,
    dtype: cli.Dtype_ = "auto",
    device: cli.Device_ = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="File of the result; if absent, where `positions=auto` will find it."),
    ] = None,
) -> None:
    """Find out with which positions a target answers better, for `positions=auto`."""
    Settings.of(keep_rate=keep)
    check_out(out)
    prose = haystack(document, _say)
    model = SpecPrefill.from_pretrained(draft, target, dtype=dtype, device=device, progress=_say)
    assert model.draft is not None
    assert isinstance(model.target, TorchTarget)
    right = {"dense": 0, "original": 0, "contiguous": 0}
    asked = list(cases(prose, model.target.tokenizer, lengths, [needles] * len(lengths), seed))
    with Bar(console=_screen, transient=True) as bar:
        for case in bar.track(asked, description="needles"):
            for name, is_right in compare_positions(model, model.draft, case, keep).items():
                right[name] += is_right
            bar.console.print(f"right so far: {right}", style="dim")
    found = PositionEvidence(
        target=target,
        draft=draft,
        fingerprint=model.target.fingerprint,
        keep_rate=keep,
        tokens=tuple(lengths),
        needles=len(asked),
        right=Right(**right),
        command=command(),
    )
    path = out or own_folder(FOLDER) / f"{found.fingerprint}.json"
    write(path, found)
    print(f"{found.words()}: auto takes {found.better}; written to {path}")


def _knobs(setting: list[str] | None, rates: list[float]) -> _Json:
    """The settings of `--set`, none of which this evaluation would pass over."""
    knobs = cli.parse_settings(setting)
    if unread := sorted({*AMOUNTS, *_UNREAD} & set(knobs)):
        raise InputError(
            "--set", unread, "settings other than the amounts and these: " + _UNREAD_TEXT
        )
    for rate in rates:
        Settings.of(**{**knobs, "keep_rate": rate})
    return knobs


def _head(draft: str, target: str, prose: str, seed: int) -> _Json:
    return {
        "command": command(),
        "machine": machine(),
        "draft": draft,
        "target": target,
        "haystack_sha256": digest(prose),
        "seed": seed,
    }


def _measured(
    answered: Iterator[_Json],
    total: int,
    head: _Json,
    summarise: Callable[[list[_Json]], _Json],
    out: Path | None,
) -> _Json:
    """The report on all cases, shown and written to `out` as it grows."""
    rows: list[_Json] = []
    report = head
    with Bar(console=_screen, transient=True) as bar:
        for row in bar.track(answered, total=total, description="cases"):
            rows.append(row)
            right = [arm for arm, result in row["results"].items() if result["right"]]
            bar.console.print(
                f"{row['tokens']} tokens, depth {row['depth']:.2f}:"
                f" right with {', '.join(right) or 'none'}",
                style="dim",
            )
            report = head | summarise(rows) | {"cases": rows}
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", "utf-8")
    return report


def _print(report: _Json, as_json: bool, *tables: Callable[[_Json], Table]) -> None:
    if as_json:
        print(json.dumps(report, ensure_ascii=False, indent=1))
    else:
        for table in tables:
            Console(highlight=False).print(table(report))


def _table(report: _Json) -> Table:
    rows = report["summary"]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    table = Table("tokens", "cases", *arms, title="share of right answers (of facts kept)")
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        mine = {row["arm"]: row for row in rows if row["tokens"] == tokens}
        cells = [f"{mine[a]['right']:.2f} ({mine[a]['fact_kept']:.2f})" for a in arms]
        table.add_row(str(tokens or "all"), str(mine[arms[0]]["cases"]), *cells)
    return table


def _retention_table(report: _Json) -> Table:
    counts = ("both", "only_full", "only_pruned", "neither")
    shares = ("retention", "interval", "still_right", "still_right_interval")
    heads = [name.replace("_", " ").replace("interval", "95 %") for name in (*counts, *shares)]
    table = Table("tokens", "arm", *heads, title="right answers retained")
    for row in report["retention"]:
        cells = [str(row["tokens"] or "all"), row["arm"], *(str(row[name]) for name in counts)]
        for name in shares:
            ends = [row[name]] if isinstance(row[name], float) else row[name] or ()
            cells.append(" to ".join(f"{end:.2f}" for end in ends))
        table.add_row(*cells)
    return table


@app.command(epilog="Example: python -m trtllm_specprefill.evaluation demo --keep 0.1")
def demo(
    draft: Annotated[str, typer.Option(help="Model that scores.")] = "smollm2-135m",
    target: Annotated[str, typer.Option(help="Model that answers.")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=200, help="Tokens of the document.")] = 6200,
    keep: Annotated[float, typer.Option(help="Keep rate.")] = 0.1,
    positions: Annotated[
        str, typer.Option(help="A target this small reads contiguous positions better.")
    ] = "contiguous",
    seed: Annotated[int, typer.Option(min=0, help="Of the passage and the fact.")] = 7,
    document: Document_ = None,
) -> None:
    """Plant a fact in a long document, ask for it with and without pruning, show both."""
    prose = haystack(document, _say)
    with given_as(model="target"):
        tokenizer = load_tokenizer(target, _say)
    case: Case = next(cases(prose, tokenizer, [tokens], [1], seed))
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder) / "document.txt"
        context.write_text(case.context, "utf-8")
        _say(f"a document of about {tokens} tokens, with one sentence planted in its middle:")
        _screen.print(f"  {case.fact}")
        _say(
            f"specprefill run --context document.txt --question '{case.question}'"
            f" --keep {keep} --positions {positions} --compare"
        )
        cli.run(
            context=str(context),
            question=case.question,
            draft=draft,
            target=target,
            keep=keep,
            positions=positions,
            max_tokens=32,
            compare=True,
        )


def main() -> None:
    """Run a command with the command line's manners."""
    run_app(app)


if __name__ == "__main__":
    main()
