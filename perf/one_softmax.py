"""One softmax over the whole prompt, or one in each window: which keeps more planted facts?

The draft reads a prompt in windows, and attention is a softmax over what is read together. From the
log-sum-exp of every window its weights can be brought to one softmax over the prompt, tokens that
all windows read counted once. That takes the rows of every head until the last window is read; this
tells what it would be worth. Each prompt is scored both ways from the same passes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console

from perf.options import Draft_, Seed_
from perf.recall import planted
from trtllm_specprefill.draft.capture import Enough, capturing
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.draft.windows import Windows
from trtllm_specprefill.endings import run_app
from trtllm_specprefill.errors import InputError, given_as
from trtllm_specprefill.evaluation.forms import FORMS, told
from trtllm_specprefill.evaluation.haystack import haystack
from trtllm_specprefill.evaluation.needle import fact_kept
from trtllm_specprefill.evaluation.report import check_out, command, machine
from trtllm_specprefill.importance import Importance
from trtllm_specprefill.models import load_model
from trtllm_specprefill.prompt import prepare
from trtllm_specprefill.selection import select
from trtllm_specprefill.settings import Settings

RATES = (0.05, 0.1)
WAYS = ("window", "prompt")  # over which the softmax is

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_screen = Console(stderr=True, highlight=False)


@app.command(epilog="Example: python -m perf.one_softmax --lengths 3000 --lengths 7000")
def one_softmax(
    draft: Draft_ = "smollm2-135m",
    lengths: Annotated[list[int], typer.Option(help="Tokens of the context; repeatable.")] = [  # noqa: B006
        3000
    ],
    needles: Annotated[int, typer.Option(min=1, help="Per length, form and facts.")] = 3,
    seed: Seed_ = 0,
    out: Annotated[Path, typer.Option(help="The report, written anew after every prompt.")] = Path(
        "build/one_softmax.json"
    ),
) -> None:
    """Score every prompt both ways, with the calibrated heads and with all."""
    check_out(out)
    with given_as(model="draft"):
        model = load_model(draft, progress=lambda line: _screen.print(line, style="dim"))
    scorer = TorchDraft(model)
    settings = Settings.of(min_keep_tokens=0).in_force()
    every = range(int(model.config.num_attention_heads))
    sets = {"all": [*product(range(scorer.usual_depth(settings)), every)]}
    chosen = scorer.scoring_heads(settings)
    if chosen is not None:
        sets["calibrated"] = [(layer, h) for layer, heads in enumerate(chosen) for h in heads]
    forms = [form for form in FORMS if form == "text" or model.tokenizer.chat_template]
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "command": command(),
        "machine": machine(),
        "draft": draft,
        "heads": sets,
    }
    for facts, form, case in planted(model.tokenizer, haystack(), lengths, needles, forms, seed):
        source, question = told(case, form)
        prompts = {
            rate: prepare(
                source,
                target_tokenizer=model.tokenizer,
                settings=settings.model_copy(update={"keep_rate": rate}),
                question=question,
            )
            for rate in RATES
        }
        prompt = prompts[RATES[0]]
        logits, windows = _logits(
            scorer, prompt.draft.ids, settings, prompt.question, sorted(set().union(*sets.values()))
        )
        row: dict[str, Any] = {"facts": facts, "form": form, "tokens": case.tokens, "kept": {}}
        for name, heads in sets.items():
            for way in WAYS:
                scores = _scores(logits, heads, windows, settings.pool, way, len(prompt.draft))
                importance = Importance(scores, 1, 1, (0,))
                row["kept"][f"{name}, {way}"] = {
                    f"{rate:g}": fact_kept(p, select(p, importance), case)
                    for rate, p in prompts.items()
                }
        rows.append(row)
        _screen.print(f"{facts}, {form}, {case.tokens}: {row['kept']}")
        report |= {"summary": summary(rows), "prompts": rows}
        out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    for line in report["summary"]:
        print(json.dumps(line))


class _Logits:
    """The logits of some heads in one window, `[W, S]` each, by layer and head."""

    def __init__(self, heads: Sequence[tuple[int, int]], width: int) -> None:
        self.found: dict[tuple[int, int], torch.Tensor] = {}
        self._heads, self._width, self._last = heads, width, max(layer for layer, _ in heads)

    def see(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None,
    ) -> None:
        """See `Capture.see`."""
        size, shared = k.shape[2], q.shape[1] // k.shape[1]
        if mask is not None and not bool((mask[..., -1, :] == 0).all()):
            seen = f"one whose layer {layer} hides part of a window"
            raise InputError("draft", seen, "a model whose layers see the whole of it")
        hidden = torch.ones(self._width, size, dtype=torch.bool).triu(size - self._width + 1)
        for _, head in (one for one in self._heads if one[0] == layer):
            rows = q[0, head, -self._width :].float() @ k[0, head // shared].float().T * scale
            self.found[layer, head] = rows.masked_fill(hidden, float("-inf"))
        if layer == self._last:
            raise Enough


def _logits(
    scorer: TorchDraft,
    ids: NDArray[np.int32],
    settings: Settings,
    question: NDArray[np.int64] | None,
    heads: Sequence[tuple[int, int]],
) -> tuple[dict[tuple[int, int], torch.Tensor], Windows]:
    """Logits `[K, W, S]` of each head, and the windows they are of."""
    windows = scorer.windows(int(ids.size), settings, question)
    seen = []
    for row in torch.from_numpy(ids.astype(np.int64)[windows.tokens]):
        logits = _Logits(heads, min(settings.window, windows.tail))
        with torch.inference_mode(), capturing(logits), suppress(Enough):
            scorer.model.module(input_ids=row[None], use_cache=False, logits_to_keep=1)
        seen.append(logits.found)
    return {head: torch.stack([found[head] for found in seen]) for head in heads}, windows


def _scores(
    logits: dict[tuple[int, int], torch.Tensor],
    heads: Sequence[tuple[int, int]],
    windows: Windows,
    pool: int,
    way: str,
    prompt_tokens: int,
) -> NDArray[np.float32]:
    """Maximum over heads and queries of the pooled weights, in the prompt."""
    best: torch.Tensor | None = None
    for head in heads:
        rows = logits[head]
        weights = torch.nn.functional.avg_pool1d(rows.softmax(-1), pool, 1, pool // 2)
        if way == "prompt":
            body = slice(windows.head, rows.shape[-1] - windows.tail)
            once = torch.cat([rows[0, :, : body.start], rows[0, :, body.stop :]], dim=-1)
            parts = [rows[..., body].logsumexp(-1), once.logsumexp(-1)[None]]
            whole = torch.cat(parts).logsumexp(0)
            weights = weights * (rows.logsumexp(-1) - whole).exp()[..., None]
        voted = weights.amax(dim=1)
        best = voted if best is None else torch.maximum(best, voted)
    assert best is not None
    # A weight of 0, for which there is no score, is what a window far from the question may have.
    return np.maximum(windows.gather(best.numpy(), prompt_tokens), np.float32(1e-30))


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Facts kept by heads and way, at each length and over all."""
    table = []
    for tokens in (*sorted({row["tokens"] for row in rows}), None):
        chosen = [row["kept"] for row in rows if tokens in (None, row["tokens"])]
        for arm in chosen[0]:
            kept = {rate: sum(one[arm][rate] for one in chosen) for rate in chosen[0][arm]}
            table.append({"tokens": tokens, "arm": arm, "prompts": len(chosen), "kept": kept})
    return table


if __name__ == "__main__":
    run_app(app)
