"""`python -m trtllm_specprefill.evaluation`: measure what pruning costs in quality."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from trtllm_specprefill import cli
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.evaluation.haystack import haystack
from trtllm_specprefill.evaluation.needle import Case, cases, digest, run_case, summary
from trtllm_specprefill.evaluation.positions import compare_positions
from trtllm_specprefill.evaluation.report import command, machine
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


def _say(line: str) -> None:
    _screen.print(line, style="dim", markup=False)


@app.command(
    epilog="Example: python -m trtllm_specprefill.evaluation needle --needles 8 --json > out.json"
)
def needle(
    draft: Annotated[str, typer.Option(help="Model that scores.")] = "smollm2-135m",
    target: Annotated[str, typer.Option(help="Model that answers.")] = "smollm2-135m",
    lengths: Annotated[list[int], typer.Option(help="Tokens of the context; repeatable.")] = [  # noqa: B006
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
    seed: Annotated[int, typer.Option(help="Of passages, facts and the baseline.")] = 0,
    setting: cli.Set_ = None,
    document: Document_ = None,
    dtype: cli.Dtype_ = "auto",
    device: cli.Device_ = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Also write the report here, anew after every case.")
    ] = None,
    as_json: cli.Json_ = False,
) -> None:
    """Plant a fact in long prose, prune, ask: full, at each keep rate, and at random."""
    prose = haystack(document, _say)
    knobs = cli.parse_settings(setting)
    if unread := sorted({*AMOUNTS, *_UNREAD} & set(knobs)):
        raise InputError(
            "--set", unread, "settings other than the amounts and these: " + _UNREAD_TEXT
        )
    for rate in [*keep, random_keep]:
        Settings.of(**{**knobs, "keep_rate": rate})
    counts = needles * len(lengths) if len(needles) == 1 else needles
    if len(counts) != len(lengths):
        raise InputError("needles", needles, f"one number, or {len(lengths)}: one for each length")
    model = SpecPrefill.from_pretrained(draft, target, dtype=dtype, device=device, progress=_say)
    report: dict[str, Any] = {
        "command": command(),
        "machine": machine(),
        "draft": draft,
        "target": target,
        "haystack_sha256": digest(prose),
        "seed": seed,
    }
    rows: list[dict[str, Any]] = []
    with Bar(console=_screen, transient=True) as bar:
        task = bar.add_task("needles", total=sum(counts))
        for case in cases(prose, model.target.tokenizer, lengths, counts, seed):
            rows.append(run_case(model, case, keep, random_keep, knobs))
            right = [arm for arm, result in rows[-1]["results"].items() if result["right"]]
            bar.update(task, advance=1)
            bar.console.print(
                f"{case.tokens} tokens, depth {case.depth:.2f}: right with {', '.join(right)}",
                style="dim",
            )
            report |= {"summary": summary(rows), "cases": rows}
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", "utf-8")
    if as_json:
        print(json.dumps(report, ensure_ascii=False, indent=1))
    else:
        Console(highlight=False).print(_table(report["summary"]))


@app.command(epilog="Example: python -m trtllm_specprefill.evaluation positions --needles 24")
def positions(
    draft: Annotated[str, typer.Option(help="Model that scores.")] = "smollm2-135m",
    target: Annotated[str, typer.Option(help="Model that answers.")] = "smollm2-135m",
    lengths: Annotated[list[int], typer.Option(help="Tokens of the context; repeatable.")] = [  # noqa: B006
        1500,
        3000,
    ],
    needles: Annotated[int, typer.Option(min=1, help="Needles of each length.")] = 12,
    keep: Annotated[float, typer.Option(help="Keep rate.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of passages and facts.")] = 0,
    document: Document_ = None,
    dtype: cli.Dtype_ = "auto",
    device: cli.Device_ = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="File of the result; if absent, where `positions=auto` will find it."),
    ] = None,
) -> None:
    """Find out with which positions a target answers better, for `positions=auto`."""
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


def _table(rows: Any) -> Table:
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    table = Table("tokens", "needles", *arms, title="share of right answers (of facts kept)")
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        mine = {row["arm"]: row for row in rows if row["tokens"] == tokens}
        cells = [f"{mine[a]['right']:.2f} ({mine[a]['fact_kept']:.2f})" for a in arms]
        table.add_row(str(tokens or "all"), str(mine[arms[0]]["needles"]), *cells)
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
    seed: Annotated[int, typer.Option(help="Of the passage and the fact.")] = 7,
    document: Document_ = None,
) -> None:
    """Plant a fact in a long document, ask for it with and without pruning, show both."""
    prose = haystack(document, _say)
    case: Case = next(cases(prose, load_tokenizer(target, _say), [tokens], [1], seed))
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
    cli.run_app(app)


if __name__ == "__main__":
    main()
