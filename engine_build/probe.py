"""The figures that a built draft must reproduce before it is used: what torch makes of a prompt."""

from __future__ import annotations

import numpy as np

from engine_build.module_engine import ModuleEngine
from engine_build.scoring_model import Scoring, ScoringModel
from trtllm_specprefill.draft.engine import Ids, look_ahead, read
from trtllm_specprefill.draft.manifest import Precision, Probe
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.models import Model

# Long enough for windows and pooling to matter, with something to find.
TEXT = """The harbour office keeps a register of every ship that has called since the pier was
built. Each entry names the master, the cargo and the day of arrival, and since the fire each is
written twice, once in ink and once on the punched cards that the new machine reads. The clerk who
looks after the register is called Ilse Brandt; her telephone number is 4471902. On quiet days she
copies old entries whose ink has faded. Storms bring more work: ships wait in the bay, their papers
get wet, and the pilots come in to warm themselves and to talk. A visitor who wants to see the
register must ask a day before, bring a letter, and wash his hands.

Question: under which telephone number can the clerk of the harbour office be reached?
Answer:"""

# Largest difference that an engine may show, in units of the largest score. See docs/engines.md.
TOLERANCE: dict[Precision, float] = {"fp32": 1e-3, "bf16": 0.1, "fp8": 0.25}


def probe_of(model: Model, scoring: Scoring, precision: Precision, max_tokens: int) -> Probe:
    """What torch in float32 makes of the probe prompt, cut so that it fits `max_tokens`.

    Raises `InputError` where no layer attends to so much at once.
    """
    room = max_tokens - (scoring.queries - 1 if scoring.mode == "lookahead" else 0)
    ids = np.array(model.tokenizer(TEXT)["input_ids"][-room:], dtype=np.int64)
    return figures_of(ScoringModel(model, scoring), ids, precision)


def figures_of(module: ScoringModel, ids: Ids, precision: Precision) -> Probe:
    """What torch makes of a prompt, int64 `[N]`; look-ahead decodes as far as the module goes.

    Raises `InputError` where no layer attends to so much at once.
    """
    engine, scoring = ModuleEngine(module), module.scoring
    tokens: tuple[int, ...] = ()
    if scoring.mode == "window":
        (scores,) = read(engine, [ids], [min(scoring.queries, ids.size)])
    else:
        (one,) = look_ahead(
            engine, [ids], scoring.queries - 1, scoring.votes, sees=module.votes_after
        )
        scores, tokens = one.scores, one.tokens
    if not scores.any():
        raise InputError("layers", scoring.layers, "enough to reach one that sees a whole prompt")
    return Probe(
        ids=tuple(ids.tolist()),
        importance=tuple(scores.tolist()),
        tolerance=TOLERANCE[precision],
        next_tokens=tokens,
    )
