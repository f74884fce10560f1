"""`specprefill calibrate-heads`: which heads of a draft score, and how many layers are run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trtllm_specprefill.errors import InputError, given_as

CALIBRATE_EXAMPLE = "Example: specprefill calibrate-heads --draft smollm2-135m --prompts 24"
_screen = Console(stderr=True, highlight=False)


def calibrate_heads(
    draft: Annotated[str, typer.Option(help="Model that scores.")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=500, help="Tokens of a prompt.")] = 3000,
    prompts: Annotated[
        int, typer.Option(min=4, help="Facts that choose; as many others judge.")
    ] = 24,
    most_layers: Annotated[
        int | None, typer.Option(min=1, help="Deepest pass to try; half of the layers if absent.")
    ] = None,
    slack: Annotated[
        float, typer.Option(min=0.0, help="Recall given up for a shallower pass, on other prompts.")
    ] = 0.05,
    seed: Annotated[int, typer.Option(min=0, help="Of passages and facts.")] = 0,
    document: Annotated[
        list[Path] | None,
        typer.Option(help="UTF-8 text the other prompts are made of as well; repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File of the result; if absent, where every draft will find it."),
    ] = None,
) -> None:
    """Find the heads that matter on facts and questions; judge them on others, in other texts."""

    from trtllm_specprefill.draft.heads import FOLDER
    from trtllm_specprefill.draft.torch import TorchDraft
    from trtllm_specprefill.evaluation.calibrate import calibrate
    from trtllm_specprefill.evaluation.haystack import haystack
    from trtllm_specprefill.evaluation.qa import read_questions
    from trtllm_specprefill.evaluation.report import check_out, command
    from trtllm_specprefill.measured import own_folder, write
    from trtllm_specprefill.models import load_model

    check_out(out)

    def say(line: str) -> None:
        _screen.print(line, style="dim", markup=False)

    with given_as(model="draft"):
        scorer = TorchDraft(load_model(draft, progress=say))
    layers = int(scorer.config.num_hidden_layers)
    deepest = -(-layers // 2) if most_layers is None else most_layers
    if deepest > layers:
        raise InputError("most_layers", deepest, f"1 to {layers}, the layers of {draft}")
    texts = [haystack(progress=say), *(haystack(path) for path in document or [])]
    found = calibrate(
        scorer,
        texts,
        read_questions(),
        tokens,
        prompts,
        deepest,
        slack=slack,
        seed=seed,
        command=command(),
        say=say,
    )
    path = out or own_folder(FOLDER) / f"{found.fingerprint}.json"
    write(path, found)
    for depth in found.depths:
        heads = [f"{layer}.{head}" for layer, some in enumerate(depth.heads) for head in some]
        print(
            f"{depth.layers} layers: heads {', '.join(heads)} keep {depth.recall},"
            f" of other prompts {depth.held_out}"
        )
    print(f"every head of the usual number of layers: of other prompts {found.all_heads}")
    print(f"{found.layers} layers taken; written to {path}")
