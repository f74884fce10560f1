"""Every knob once: type, range, default, unit and meaning.

`Settings` says how a prompt is pruned, `Sampling` how the answer is drawn. Both are frozen,
refuse unknown fields, and turn a bad value into one `InputError` that names the field, the
value and what is allowed. The CLI, the Python API and the server read their defaults and
their help from here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from trtllm_specprefill.allowed import allowed, refusal
from trtllm_specprefill.errors import InputError

PositionPolicy = Literal["auto", "original", "contiguous"]
Votes = Literal["mean", "max"]

CHUNK_TOKENS = {"text": 32, "code": 128}
# Half a sentence is of little use to a reader: of 12 needles at 10 %, 12 are answered with
# sentences kept whole and 8 with words (SmolLM2 for Gemma 3, 1,000 tokens).
SNAP = {"text": "sentence", "code": "line"}
VOTES: dict[str, Votes] = {"lookahead": "mean", "window": "max"}
AMOUNTS = ("keep_rate", "keep_tokens", "coverage")  # how much to keep: at most one of them
DEFAULT_KEEP_RATE = 0.3
DEFAULT_FLOOR = 256
GREEDY_BELOW = 1e-5  # a temperature so low that dividing by it overflows


def _knob(default: Any, meaning: str, allowed: str, **limits: Any) -> Any:
    return Field(default, description=meaning, json_schema_extra={"allowed": allowed}, **limits)


class _Knobs(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build from keyword values; raise `InputError` for the first that cannot be used."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise refusal(cls, error) from None

    @classmethod
    def allowed(cls, name: str) -> str:
        """What field `name` may hold, in words."""
        return allowed(cls.model_fields[name])

    @classmethod
    def meaning(cls, name: str) -> str:
        """What field `name` does, in words."""
        return str(cls.model_fields[name].description)


class Settings(_Knobs):
    """How one prompt is scored, selected from, and placed. Lengths are in tokens.

    At most one of `keep_rate`, `keep_tokens` and `coverage` is given; with none of them the
    keep rate is 0.3. Budgets count target tokens, chunks count draft tokens.
    """

    enabled: bool = _knob(True, "prune at all", "true or false")
    keep_rate: float | None = _knob(
        None, "share of the prompt's target tokens to keep", "a number > 0 and <= 1", gt=0, le=1
    )
    keep_tokens: int | None = _knob(
        None, "number of target tokens to keep", "a whole number >= 1", ge=1
    )
    coverage: float | None = _knob(
        None,
        "share of the importance mass to keep; the number of tokens follows from the prompt",
        "a number > 0 and <= 1",
        gt=0,
        le=1,
    )
    min_keep_tokens: int | None = _knob(
        None,
        "floor of the budget, in target tokens; 256 with a keep rate or coverage, but never above"
        " the ceiling; none with keep_tokens",
        "a whole number >= 0",
        ge=0,
    )
    max_keep_tokens: int | None = _knob(
        None, "ceiling of the budget, in target tokens; none when absent", "a number >= 1", ge=1
    )
    threshold: int = _knob(
        2048, "prompts shorter than this many target tokens are not pruned", ">= 0", ge=0
    )
    content: Literal["text", "code"] = _knob(
        "text", "what the prompt is made of; sets chunk_tokens and snap", "text or code"
    )
    chunk_tokens: int | None = _knob(
        None, "length of a chunk in draft tokens; 32 for text, 128 for code", ">= 1", ge=1
    )
    snap: Literal["char", "word", "sentence", "line"] | None = _knob(
        None,
        "where chunks may be cut; sentences for text, lines for code",
        "char, word, sentence or line",
    )
    tail_tokens: int | None = _knob(
        None,
        "last tokens of the prompt that are always kept; 512 above 16,000, else N/32 and >= 64",
        ">= 0",
        ge=0,
    )
    protect_roles: tuple[str, ...] = _knob(
        ("system", "developer"),
        "roles whose messages are kept whole",
        "a list of system, developer, user, assistant and tool",
    )
    positions: PositionPolicy = _knob(
        "auto", "position ids of the kept tokens", "auto, original or contiguous"
    )
    separator: str = _knob(
        "",
        "text put between spans that were not neighbours; contiguous positions only",
        "a text; with positions=original it must be empty",
    )
    scoring: Literal["lookahead", "window"] = _knob(
        "window",
        "which queries vote: the last prompt token's and those of the look-ahead tokens, after"
        " reading the whole prompt with all layers; or those of the last prompt tokens, reading"
        " as the draft_ settings say",
        "lookahead or window",
    )
    look_ahead: int = _knob(8, "tokens the draft decodes before it scores", "0 to 64", ge=0, le=64)
    window: int = _knob(
        32, "last prompt tokens that vote when scoring is window", "1 to 64", ge=1, le=64
    )
    votes: Votes | None = _knob(
        None,
        "how the queries are combined; mean with lookahead, max with window",
        "mean or max",
    )
    draft_layers: int | None = _knob(
        None,
        "first layers of the draft, the only ones that are run; when absent as many as its"
        " calibration takes (see calibrate-heads), or a quarter of them",
        "a whole number >= 1",
        ge=1,
    )
    draft_window: int = _knob(
        512,
        "most prompt tokens the draft reads at once, beside head and tail; 0 for the whole prompt",
        "0, or more than draft_overlap and pool",
        ge=0,
    )
    draft_overlap: int = _knob(
        32, "tokens that neighbouring windows share", "a whole number >= 0", ge=0
    )
    draft_head: int = _knob(
        4, "first tokens of the prompt, which begin every window", "a whole number >= 0", ge=0
    )
    draft_tail: int = _knob(
        64,
        "most tokens that end every window: the last of the question",
        "a whole number >= 1",
        ge=1,
    )
    pool: int = _knob(
        13, "width of the average pooling of scores, in tokens", "odd, 1 to 255", ge=1, le=255
    )
    min_gain: float = _knob(
        0.0,
        "do not prune when the predicted dense-to-pruned ratio of operations, draft and all,"
        " is below this; 0 always prunes, and so does coverage without max_keep_tokens",
        "a number >= 0",
        ge=0,
    )
    strict: bool = _knob(False, "fail instead of falling back to the full prompt", "true or false")

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = {k: getattr(self, k) for k in AMOUNTS if getattr(self, k) is not None}
        if len(given) > 1:
            raise InputError(
                " and ".join(given), tuple(given.values()), "only one of " + ", ".join(AMOUNTS)
            )
        if self.pool % 2 == 0:
            raise InputError("pool", self.pool, self.allowed("pool"))
        if 0 < self.draft_window <= max(self.draft_overlap, self.pool):
            raise InputError("draft_window", self.draft_window, self.allowed("draft_window"))
        ceiling, floor = self.max_keep_tokens, self.min_keep_tokens
        if ceiling is not None and floor is not None and ceiling < floor:
            raise InputError(
                "max_keep_tokens",
                ceiling,
                f"at least min_keep_tokens ({floor})",
            )
        if self.separator and self.positions == "original":
            raise InputError("separator", self.separator, self.allowed("separator"))
        known = {"system", "developer", "user", "assistant", "tool"}
        if not known.issuperset(self.protect_roles):
            raise InputError("protect_roles", self.protect_roles, self.allowed("protect_roles"))
        return self

    def in_force(self) -> Settings:
        """The same settings with every default that depends on another knob filled in."""
        filled: dict[str, Any] = {
            "chunk_tokens": self.chunk_tokens or CHUNK_TOKENS[self.content],
            "snap": self.snap or SNAP[self.content],
            "min_keep_tokens": self._floor(),
            "votes": self.votes or VOTES[self.scoring],
        }
        if self.keep_rate is None and self.keep_tokens is None and self.coverage is None:
            filled["keep_rate"] = DEFAULT_KEEP_RATE
        return self.derived(**filled)

    def derived(self, **filled: Any) -> Settings:
        """The same settings with values that follow from others, which nobody asked for.

        So who builds on them, by `exclude_unset`, has them follow from the new ones.
        """
        return Settings.model_construct(set(self.model_fields_set), **{**dict(self), **filled})

    def _floor(self) -> int:
        if self.min_keep_tokens is not None:
            return self.min_keep_tokens
        if self.keep_tokens is not None:
            return 0
        return min(DEFAULT_FLOOR, self.max_keep_tokens or DEFAULT_FLOOR)

    def budget(self, prompt_tokens: int) -> int | None:
        """Target tokens to keep of a prompt of `prompt_tokens`; None when coverage decides.

        Rounded to the nearest token, then held between the floor and the ceiling, and never
        more than the prompt.
        """
        if self.coverage is not None:
            return None
        wanted = self.keep_tokens
        if wanted is None:
            rate = DEFAULT_KEEP_RATE if self.keep_rate is None else self.keep_rate
            wanted = round(rate * prompt_tokens)
        return self.clamp(wanted, prompt_tokens)

    def limit(self, prompt_tokens: int) -> int:
        """Most target tokens that may be kept: the budget, or under coverage the ceiling."""
        budget = self.budget(prompt_tokens)
        return self.clamp(prompt_tokens, prompt_tokens) if budget is None else budget

    def clamp(self, tokens: int, prompt_tokens: int) -> int:
        """`tokens` held between the floor and the ceiling, and never more than the prompt."""
        tokens = max(tokens, self._floor())
        if self.max_keep_tokens is not None:
            tokens = min(tokens, self.max_keep_tokens)
        return min(tokens, prompt_tokens)


class Sampling(_Knobs):
    """How the target draws its answer."""

    max_tokens: int = _knob(256, "most tokens to generate", "a whole number >= 1", ge=1)
    temperature: float = _knob(
        0.0, "0 is greedy; higher is more random", "a number from 0 to 10", ge=0, le=10
    )
    top_p: float = _knob(
        1.0, "draw from the likeliest tokens that hold this mass", "> 0 and <= 1", gt=0, le=1
    )
    top_k: int = _knob(
        0, "draw from this many likeliest tokens; 0 for all", "a whole number >= 0", ge=0
    )
    seed: int | None = _knob(
        None,
        "seed of the draws; a fresh one when absent",
        "a whole number from 0 to 2**63 - 1",
        ge=0,
        le=2**63 - 1,
    )
    stop: tuple[str, ...] = _knob(
        (), "texts that end the answer; not part of it", "a list of texts, none of them empty"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(not text for text in self.stop):
            raise InputError("stop", self.stop, self.allowed("stop"))
        return self
