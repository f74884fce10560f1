"""`specprefill`: one thin layer over the library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtllm_specprefill.endings import EXIT_CODES, run_app
from trtllm_specprefill.errors import ContextTooLong, InputError, given_as
from trtllm_specprefill.evaluation.commands import CALIBRATE_EXAMPLE, calibrate_heads
from trtllm_specprefill.reference import SETTINGS_EXAMPLE, list_settings
from trtllm_specprefill.serving import commands
from trtllm_specprefill.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Speculative prefill: a draft scores a long prompt, a target reads what matters.",
    epilog=EXIT_CODES,
)
_screen = Console(stderr=True, highlight=False)

_RUN_EXAMPLE = (
    "Example: specprefill run --context report.txt --question 'Who signed it?' --keep 0.1 --compare"
)
_SCORE_EXAMPLE = "Example: specprefill score --prompt report.txt --keep 0.1 --json"

_CAPACITY_EXAMPLE = (
    "Example: specprefill plan-capacity --draft meta-llama/Llama-3.1-8B"
    " --target meta-llama/Llama-3.1-405B --gpus 8 --keep 0.1"
)

Prompt_ = Annotated[
    str | None, typer.Option("--prompt", metavar="FILE", help="A text to complete; - is stdin.")
]
Messages_ = Annotated[
    str | None,
    typer.Option("--messages", metavar="FILE", help="Chat messages as JSON, in OpenAI's form."),
]
Context_ = Annotated[
    str | None, typer.Option("--context", metavar="FILE", help="A document to ask about.")
]
Question_ = Annotated[str | None, typer.Option(metavar="TEXT", help="With --context.")]
Tools_ = Annotated[
    str | None, typer.Option("--tools", metavar="FILE", help="Tool definitions as JSON.")
]
Protect_ = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Keep this text wherever it occurs; may be repeated."),
]
Draft_ = Annotated[
    str, typer.Option(metavar="MODEL", help="Directory, .gguf file, hub id or demo alias.")
]
DraftEngine_ = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="A built draft, in the place of --draft; see engine_build."),
]
Target_ = Annotated[str, typer.Option(metavar="MODEL", help="The same choices.")]
Keep_ = Annotated[
    float | None, typer.Option("--keep", help=Settings.meaning("keep_rate").capitalize())
]
KeepTokens_ = Annotated[int | None, typer.Option(help=Settings.meaning("keep_tokens"))]
Coverage_ = Annotated[float | None, typer.Option(help=Settings.meaning("coverage"))]
Set_ = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any other setting by name, value as JSON; may be repeated."
        f" Names: {', '.join(Settings.model_fields)}.",
    ),
]
Dtype_ = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device_ = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Json_ = Annotated[bool, typer.Option("--json", help="One JSON object instead of words.")]


@dataclass(frozen=True)
class _Source:
    """What to answer, from whichever options gave it."""

    text_or_messages: str | list[dict[str, Any]] | None
    context: str | None
    question: str | None

    def for_tokenizer(self, tokenizer: Any) -> str | list[dict[str, Any]]:
        from trtllm_specprefill.prompt import ask

        if self.text_or_messages is not None:
            return self.text_or_messages
        return ask(self.context or "", self.question or "", tokenizer)


@app.command(epilog=_RUN_EXAMPLE)
def run(
    messages: Messages_ = None,
    prompt: Prompt_ = None,
    context: Context_ = None,
    question: Question_ = None,
    tools: Tools_ = None,
    protect: Protect_ = None,
    draft: Draft_ = "smollm2-135m",
    draft_engine: DraftEngine_ = None,
    target: Target_ = "smollm2-135m",
    keep: Keep_ = None,
    keep_tokens: KeepTokens_ = None,
    coverage: Coverage_ = None,
    positions: Annotated[str, typer.Option(help=Settings.meaning("positions"))] = "auto",
    threshold: Annotated[int | None, typer.Option(help=Settings.meaning("threshold"))] = None,
    setting: Set_ = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from this mass of likely tokens.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many tokens; 0 is all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends the answer; may be repeated.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also answer in full.")] = False,
    dtype: Dtype_ = "auto",
    device: Device_ = "auto",
    as_json: Json_ = False,
) -> None:
    """Answer one prompt: score it, prune it, prefill what is left, stream the answer."""
    settings = _settings(keep, keep_tokens, coverage, threshold, positions, setting)
    from trtllm_specprefill.settings import Sampling

    sampling = Sampling.of(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
    )
    source = _source(messages, prompt, context, question)
    definitions = None if tools is None else _read_json("--tools", tools)
    from trtllm_specprefill.pipeline import SpecPrefill

    model = SpecPrefill.from_pretrained(
        draft, target, draft_engine=draft_engine, dtype=dtype, device=device, progress=_say
    )
    asked = source.for_tokenizer(model.target.tokenizer)

    def answer(settings: Settings, title: str) -> Any:
        last = None
        if not as_json and compare:
            _screen.print(f"[bold]{title}[/bold]")
        for last in model.stream(
            asked,
            settings=settings,
            sampling=sampling,
            tools=definitions,
            protect=protect or (),
            question=None if source.question is None else source.question.strip(),
        ):
            if not as_json:
                print(last.text, end="", flush=True)
        if not as_json:
            print(flush=True)
        assert last is not None
        return last.generation

    pruned = answer(settings, "pruned")
    report = pruned.report()
    dense = None
    if compare:
        try:
            dense = answer(settings.model_copy(update={"enabled": False}), "dense")
        except ContextTooLong as error:  # the pruned answer stands; there is nothing to compare
            report |= {"dense": None, "speedup": None}
            _say(f"dense: {error}")
    if dense is not None:
        report["dense"] = {"text": dense.text, "ttft_s": dense.ttft_s}
        report["speedup"] = dense.ttft_s / pruned.ttft_s
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _screen.print(_table(report, None if dense is None else dense.report()))


@app.command(epilog=_SCORE_EXAMPLE)
def score(
    messages: Messages_ = None,
    prompt: Prompt_ = None,
    context: Context_ = None,
    question: Question_ = None,
    tools: Tools_ = None,
    protect: Protect_ = None,
    draft: Draft_ = "smollm2-135m",
    draft_engine: DraftEngine_ = None,
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Whose tokenizer; the draft's if absent.")
    ] = None,
    keep: Keep_ = None,
    keep_tokens: KeepTokens_ = None,
    coverage: Coverage_ = None,
    setting: Set_ = None,
    dtype: Dtype_ = "auto",
    device: Device_ = "auto",
    as_json: Json_ = False,
) -> None:
    """Show the importance of every token and which spans would be kept."""
    settings = _settings(keep, keep_tokens, coverage, None, "auto", setting)
    source = _source(messages, prompt, context, question)
    definitions = None if tools is None else _read_json("--tools", tools)
    from trtllm_specprefill.draft.load import engine_kind, load_draft
    from trtllm_specprefill.models import check_name, load_tokenizer
    from trtllm_specprefill.prompt import prepare, tokenizer_difference
    from trtllm_specprefill.selection import select

    if target is not None:
        with given_as(model="target"):
            check_name(target)
    with given_as(**({"model": "draft"} if draft_engine is None else {"engine": "draft_engine"})):
        kind = "torch" if draft_engine is None else engine_kind(draft_engine)
        scorer = load_draft(
            kind,
            draft if draft_engine is None else "",
            path=draft_engine or "",
            dtype=dtype,
            device=device,
            progress=_say,
        )
    with given_as(model="target"):
        tokenizer = scorer.tokenizer if target is None else load_tokenizer(target, _say)
    same = tokenizer_difference(scorer.tokenizer, tokenizer) is None
    prepared = prepare(
        source.for_tokenizer(tokenizer),
        target_tokenizer=tokenizer,
        draft_tokenizer=None if same else scorer.tokenizer,
        settings=settings,
        tools=definitions,
        protect=protect or (),
        question=None if source.question is None else source.question.strip(),
    )
    importance = scorer.score(prepared.draft.ids, prepared.settings, prepared.question)
    kept = select(prepared, importance)
    spans = [
        {
            "start": s.start,
            "end": s.end,
            "rule": s.rule,
            "importance": float(importance.scores[s.token_start : s.token_end].mean()),
            "text": prepared.text[s.start : s.end],
        }
        for s in kept.spans
    ]
    if as_json:
        tokens = zip(
            prepared.draft.ids.tolist(),
            prepared.draft.starts.tolist(),
            prepared.draft.ends.tolist(),
            importance.scores.tolist(),
            strict=True,
        )
        report = {
            "prompt_tokens": len(prepared.target),
            "kept_tokens": kept.tokens,
            "keep_rate": kept.keep_rate,
            "kept_mass": kept.mass,
            "queries": importance.queries,
            "heads": importance.heads,
            "layers": list(importance.layers),
            "stages": importance.seconds,
            "settings": prepared.settings.model_dump(),
            "tokens": [{"id": i, "start": a, "end": b, "importance": s} for i, a, b, s in tokens],
            "kept_spans": spans,
        }
        print(json.dumps(report, ensure_ascii=False))
        return
    table = Table("characters", "rule", "importance", "text")
    for span in spans:
        text = " ".join(str(span["text"]).split())
        table.add_row(
            f"{span['start']}-{span['end']}",
            str(span["rule"]),
            f"{span['importance']:.2e}",
            escape(text if len(text) <= 60 else f"{text[:28]} ... {text[-28:]}"),
        )
    Console(highlight=False).print(table)
    print(
        f"{kept.tokens} of {len(prepared.target)} tokens kept ({kept.keep_rate:.1%}),"
        f" holding {kept.mass:.1%} of the importance"
    )


@app.command("plan-capacity", epilog=_CAPACITY_EXAMPLE)
def plan_capacity(
    draft: Annotated[str, typer.Option(metavar="MODEL", help="Directory or hub id; config only.")],
    target: Annotated[str, typer.Option(metavar="MODEL", help="The same choices.")],
    gpu: Annotated[str, typer.Option(help="a100-80gb, h100, h200 or l40s.")] = "h200",
    gpus: Annotated[int, typer.Option(help="GPUs of the target.")] = 1,
    draft_gpus: Annotated[
        int, typer.Option(help="GPUs of the draft's own; 0: it shares the target's.")
    ] = 0,
    prompt: Annotated[int, typer.Option(help="Prompt length, in tokens.")] = 32_768,
    keep: Annotated[float, typer.Option("--keep", help=Settings.meaning("keep_rate"))] = 0.3,
    output: Annotated[int, typer.Option(help="Answer length, in tokens.")] = 256,
    batch: Annotated[int, typer.Option(help="Most requests at a time.")] = 64,
    precision: Annotated[str, typer.Option(help="Of the target: fp8 or bf16.")] = "fp8",
    draft_precision: Annotated[str, typer.Option(help="Of the draft: fp8 or bf16.")] = "bf16",
    as_json: Json_ = False,
) -> None:
    """Predict TTFT, KV memory and requests per second of a deployment, from a roofline."""
    from trtllm_specprefill import capacity
    from trtllm_specprefill.models import load_config

    if gpu not in capacity.GPUS:
        raise InputError("gpu", gpu, "one of " + ", ".join(capacity.GPUS))
    with given_as(model="target"):
        config = load_config(target)
    with given_as(model="draft"):
        draft_config = load_config(draft)
    if prompt + output > config.max_position_embeddings:
        allowed = f"at most {config.max_position_embeddings} with the answer: {target}'s positions"
        raise InputError("prompt and output", (prompt, output), allowed)
    served = capacity.Served.of(config, precision, gpus)
    if draft_gpus < 0:
        raise InputError("draft_gpus", draft_gpus, "a whole number >= 0")
    with given_as(precision="draft_precision"):
        scorer = capacity.Served.of(draft_config, draft_precision, draft_gpus or gpus)
    work = capacity.Workload(prompt, keep, output, batch=batch)
    plan = capacity.plan_capacity(scorer, served, capacity.GPUS[gpu], work, shared=draft_gpus == 0)
    if as_json:
        print(json.dumps(plan.report()))
        return
    table = Table("predicted", "pruned", "dense", box=None)
    table.add_row("TTFT", f"{plan.ttft_s:.3f} s", f"{plan.dense_ttft_s:.3f} s")
    table.add_row("  draft", f"{plan.draft_s:.3f} s", "")
    table.add_row("  target", f"{plan.prefill_s:.3f} s", f"{plan.dense_ttft_s:.3f} s")
    dense_kv = plan.kv_bytes + plan.kv_saved
    table.add_row("KV of a request", f"{plan.kv_bytes / 1e9:.2f} GB", f"{dense_kv / 1e9:.2f} GB")
    table.add_row("requests at a time", str(plan.batch), str(plan.dense_batch))
    table.add_row(
        "requests per second", f"{plan.requests_per_s:.2f}", f"{plan.dense_requests_per_s:.2f}"
    )
    table.add_row("TTFT dense / pruned", f"{plan.speedup:.2f}x", "")
    Console(highlight=False).print(table)


def _settings(
    keep: float | None,
    keep_tokens: int | None,
    coverage: float | None,
    threshold: int | None,
    positions: str,
    others: Sequence[str] | None,
) -> Settings:
    values: dict[str, Any] = {"positions": positions}
    for name, value in (
        ("keep_rate", keep),
        ("keep_tokens", keep_tokens),
        ("coverage", coverage),
        ("threshold", threshold),
    ):
        values.update({} if value is None else {name: value})
    return Settings.of(**{**values, **parse_settings(others)})


def parse_settings(items: Sequence[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` items as settings; values are JSON, or texts where they are not."""
    values: dict[str, Any] = {}
    for item in items or ():
        name, equals, text = item.partition("=")
        if not name or not equals:
            raise InputError("--set", item, "NAME=VALUE")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values


def _source(
    messages: str | None, prompt: str | None, context: str | None, question: str | None
) -> _Source:
    from trtllm_specprefill.prompt import read_input

    given = [
        name
        for name, value in (("--messages", messages), ("--prompt", prompt), ("--context", context))
        if value is not None
    ]
    if len(given) != 1:
        raise InputError(
            "prompt",
            " and ".join(given),
            "one of --messages, --prompt, or --context with --question",
        )
    if (context is None) != (question is None):
        raise InputError("--question", question, "a text, together with --context")
    if question is not None and not question.strip():
        raise InputError("--question", question, "a text that is not empty")
    if messages is not None:
        return _Source(_read_json("--messages", messages), None, None)
    if prompt is not None:
        return _Source(read_input("--prompt", prompt), None, None)
    assert context is not None
    return _Source(None, read_input("--context", context), question)


def _read_json(option: str, name: str) -> Any:
    from trtllm_specprefill.prompt import read_input

    try:
        value = json.loads(read_input(option, name))
    except json.JSONDecodeError as error:
        raise InputError(option, name, f"a file of JSON ({error})") from None
    if not isinstance(value, list):
        raise InputError(option, name, "a JSON list")
    return value


def _table(pruned: dict[str, Any], dense: dict[str, Any] | None) -> Table:
    """Tokens, TTFT and stages, pruned and dense side by side."""
    reports = [pruned] + ([dense] if dense else [])
    table = Table("", "pruned", *(["dense"] if dense else []), box=None)

    def row(name: str, values: list[str]) -> None:
        table.add_row(name, *values)

    row("reason", [r["reason"] for r in reports])
    if pruned["detail"]:
        row("", [escape(r["detail"]) for r in reports])
    row("prompt tokens read", [f"{r['kept_tokens']} of {r['prompt_tokens']}" for r in reports])
    row("positions", [r["positions"] for r in reports])
    row("TTFT", [f"{r['ttft_s']:.2f} s" for r in reports])
    for stage in dict.fromkeys(name for r in reports for name in r["stages"]):
        row(f"  {stage}", [f"{r['stages'].get(stage, 0.0):.2f} s" for r in reports])
    rates = [r["decode_tokens_per_s"] for r in reports]
    row("decode", ["-" if rate is None else f"{rate:.1f} tokens/s" for rate in rates])
    if dense:
        row("TTFT dense / pruned", [f"{pruned['speedup']:.2f}x", ""])
    return table


def _say(line: str) -> None:
    _screen.print(line, style="dim", markup=False)


app.command(epilog=commands.SERVE_EXAMPLE)(commands.serve)
app.command(epilog=commands.CLIENT_EXAMPLE)(commands.client)
app.command("calibrate-heads", epilog=CALIBRATE_EXAMPLE)(calibrate_heads)

app.command("settings", epilog=SETTINGS_EXAMPLE)(list_settings)


def main() -> None:
    """Run `specprefill`."""
    run_app(app)


if __name__ == "__main__":
    main()
