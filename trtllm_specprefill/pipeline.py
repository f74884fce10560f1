"""The order of the stages, the fallbacks and the clock.

    prepare -> draft.score -> select -> make_plan -> target.stream

The only place that knows all the stages. Anything that goes wrong before the target has given
its first token falls back to the full prompt with a reason code; under `strict` it is raised
instead. The draft runs at most once per request.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.cache import remembering
from trtllm_specprefill.clock import Clock, decode_rate
from trtllm_specprefill.draft.base import Draft
from trtllm_specprefill.draft.load import engine_kind, load_draft
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.errors import (
    ContextTooLong,
    DegenerateScores,
    DraftFailed,
    DraftTimeout,
    InputError,
    SpecPrefillError,
    TargetFailed,
    TokenizerMismatch,
    UnsupportedModel,
    UnsupportedPositions,
    given_as,
)
from trtllm_specprefill.fetch import Progress
from trtllm_specprefill.importance import Importance
from trtllm_specprefill.models import check_name, load_model
from trtllm_specprefill.plan import (
    Positions,
    PrunePlan,
    Reason,
    check_fits,
    dense_plan,
    make_plan,
    resolve_positions,
)
from trtllm_specprefill.prompt import Prompt, encode, prepare, tokenizer_difference
from trtllm_specprefill.selection import protected_tokens, select
from trtllm_specprefill.settings import AMOUNTS, Sampling, Settings
from trtllm_specprefill.target.base import FinishReason, Step, Target
from trtllm_specprefill.target.torch import TorchTarget

_log = logging.getLogger(__name__)

Source = str | Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Planned:
    """A prompt on its way to the target.

    prompt: as prepared, with the settings in force. plan: what the target gets and why.
    sampling: all in force. stages: seconds by stage so far.
    """

    prompt: Prompt
    plan: PrunePlan
    sampling: Sampling
    stages: dict[str, float]

    def report(self) -> dict[str, Any]:
        """What was decided and why, as plain JSON values."""
        kept = self.plan.kept
        return {
            "reason": self.plan.reason.value,
            "detail": self.plan.detail,
            "prompt_tokens": self.plan.prompt_tokens,
            "kept_tokens": int(self.plan.input_ids.size),
            "keep_rate": self.plan.keep_rate,
            "kept_mass": kept.mass if kept else 1.0,
            "positions": self.plan.positions,
            "stages": self.stages,
            "settings": {**self.prompt.settings.model_dump(), **self.sampling.model_dump()},
            "kept_spans": [
                {"start": s.start, "end": s.end, "rule": s.rule}
                for s in (kept.spans if kept else ())
            ],
        }


@dataclass(frozen=True)
class Generation:
    """A finished answer and everything that led to it.

    text, token_ids, finish_reason: the answer. prompt: as prepared, with the settings in force.
    plan: what the target got and why. ttft_s: seconds from the request to the first token,
    draft and all. stages: seconds by stage; those before `decode` add up to ttft_s.
    sampling: all in force.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt: Prompt
    plan: PrunePlan
    ttft_s: float
    stages: dict[str, float]
    sampling: Sampling

    @property
    def decode_tokens_per_s(self) -> float | None:
        """See `clock.decode_rate`."""
        return decode_rate(len(self.token_ids), self.stages["decode"])

    def report(self) -> dict[str, Any]:
        """The same as plain JSON values, as the command line and the server print it."""
        planned = Planned(self.prompt, self.plan, self.sampling, self.stages)
        return planned.report() | {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "output_tokens": len(self.token_ids),
            "ttft_s": self.ttft_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
        }


@dataclass(frozen=True)
class Streamed(Step):
    """A step of a streamed answer; the last one carries the whole `generation`."""

    generation: Generation | None = None


class SpecPrefill:
    """A draft and a target, ready to answer.

    draft None: every prompt goes to the target in full, reason `disabled`.
    """

    def __init__(self, draft: Draft | None, target: Target) -> None:
        """Check once whether the two share a tokenizer.

        Raises `InputError` for anything but a `Draft` and a `Target`.
        """
        if draft is not None and not isinstance(draft, Draft):
            raise InputError("draft", draft, "a Draft or None; from_pretrained takes names")
        if not isinstance(target, Target):
            raise InputError("target", target, "a Target; from_pretrained takes names")
        self.draft, self.target = draft, target
        self.tokenizer_difference = (
            None if draft is None else tokenizer_difference(draft.tokenizer, target.tokenizer)
        )

    @classmethod
    def from_pretrained(
        cls,
        draft: str | None = "smollm2-135m",
        target: str = "smollm2-135m",
        *,
        draft_engine: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        cache_mib: int = 0,
        progress: Progress | None = None,
    ) -> SpecPrefill:
        """Load both models under torch; see `models.load_model` for names, dtype and device.

        The same name twice loads one set of weights. draft_engine: folder of a draft that
        `engine_build` made, in the place of `draft`. cache_mib: mebibytes of its work that each of
        the two keeps between prompts, see `cache` and `PrunePlan.head`. Raises `InputError` for
        a model that cannot be used, `UnsupportedModel` for a family whose attention cannot be
        captured.
        """
        if not isinstance(cache_mib, int) or cache_mib < 0:
            raise InputError("cache_mib", cache_mib, "a whole number >= 0")
        if progress is not None and not callable(progress):
            raise InputError("progress", progress, "a function of one text, or None")
        if draft_engine is not None:
            if not isinstance(draft_engine, str | os.PathLike):
                raise InputError("draft_engine", draft_engine, "a folder made by engine_build")
            with given_as(engine="draft_engine"):
                scorer = load_draft(
                    engine_kind(draft_engine),
                    path=draft_engine,
                    device=device,
                    cache_mib=cache_mib,
                    progress=progress,
                )
            with given_as(model="target"):
                target_model = load_model(target, dtype, device, progress)
            return cls(scorer, TorchTarget(target_model, cache_mib << 20))
        if draft is not None:
            with given_as(model="draft"):
                check_name(draft)  # before the target is loaded, which may take minutes
        with given_as(model="target"):
            target_model, keep = load_model(target, dtype, device, progress), cache_mib << 20
        if draft is None:
            return cls(None, TorchTarget(target_model, keep))
        with given_as(model="draft"):
            draft_model = (
                target_model if draft == target else load_model(draft, dtype, device, progress)
            )
        scorer = remembering(TorchDraft(draft_model, keep), keep)
        return cls(scorer, TorchTarget(target_model, keep))

    def generate(
        self,
        source: Source,
        *,
        settings: Settings | None = None,
        sampling: Sampling | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        protect: Iterable[str] = (),
        question: str | None = None,
        **knobs: Any,
    ) -> Generation:
        """Answer `source`, a text or chat messages, and say what was done.

        protect, question: see `prepare`.
        knobs: any field of `Settings` or `Sampling` by name, `keep` for `keep_rate`.
        Raises `InputError` for bad input, `ContextTooLong` for a prompt that does not fit even
        pruned, `TargetFailed` when the target fails, and under strict whatever went wrong.
        """
        steps = self.stream(
            source,
            settings=settings,
            sampling=sampling,
            tools=tools,
            protect=protect,
            question=question,
            **knobs,
        )
        *_, last = steps
        assert last.generation is not None
        return last.generation

    def stream(
        self,
        source: Source,
        *,
        settings: Settings | None = None,
        sampling: Sampling | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        protect: Iterable[str] = (),
        question: str | None = None,
        **knobs: Any,
    ) -> Iterator[Streamed]:
        """Like `generate`, step by step; the last step carries the `Generation`.

        Returns once the first token is known. Closing the iterator stops the work.
        """
        clock = Clock()
        settings, sampling = with_knobs(settings, sampling, knobs)
        prompt, plan = self._plan(source, settings, sampling, tools, protect, question, clock)
        plan, first, rest = self._start(prompt, plan, sampling, clock)
        ttft = clock.elapsed()

        def steps() -> Iterator[Streamed]:
            taken: list[Step] = [first]
            decode = 0.0
            with closing(rest):
                yield Streamed("", ())  # taken below: from here on, closing this closes the target
                while (step := taken[-1]).finish_reason is None:
                    yield Streamed(step.text, step.token_ids)
                    begin = clock.elapsed()  # what the caller does between steps is not ours
                    taken.append(next(rest))
                    decode += clock.elapsed() - begin
                generation = Generation(
                    text="".join(s.text for s in taken),
                    token_ids=tuple(t for s in taken for t in s.token_ids),
                    finish_reason=step.finish_reason,
                    prompt=prompt,
                    plan=plan,
                    ttft_s=ttft,
                    stages={**clock.stages, "decode": decode},
                    sampling=sampling,
                )
                yield Streamed(step.text, step.token_ids, step.finish_reason, generation)

        answer = steps()
        next(answer)
        return answer

    def plan(
        self,
        source: Source,
        *,
        settings: Settings | None = None,
        sampling: Sampling | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        protect: Iterable[str] = (),
        question: str | None = None,
        waited: float | None = None,
        **knobs: Any,
    ) -> Planned:
        """Everything before the target: the prepared prompt and the plan for it.

        waited: seconds for which the request has waited already; they become stage `queue`.
        Raises what `generate` raises before the target is asked.
        """
        clock = Clock(waited)
        settings, sampling = with_knobs(settings, sampling, knobs)
        prompt, plan = self._plan(source, settings, sampling, tools, protect, question, clock)
        check_fits(plan, self.target.position_support.context, sampling.max_tokens)
        return Planned(prompt, plan, sampling, clock.stages)

    def predicted_gain(self, prompt: Prompt) -> float:
        """Operations of a dense prefill over those of scoring and a pruned prefill."""
        n = len(prompt.target)
        pruned = self.target.operations(prompt.settings.limit(n))
        if self.draft is not None:
            pruned += self.draft.operations(len(prompt.draft), prompt.settings)
        return self.target.operations(n) / pruned

    def _plan(
        self,
        source: Source,
        settings: Settings,
        sampling: Sampling,
        tools: Sequence[dict[str, Any]] | None,
        protect: Iterable[str],
        question: str | None,
        clock: Clock,
    ) -> tuple[Prompt, PrunePlan]:
        # Read once: the prompt may be prepared twice. What is no list of texts is refused there.
        once = isinstance(protect, Iterable) and not isinstance(protect, str)
        pieces = list(protect) if once else protect

        def prepared(draft_tokenizer: Any) -> Prompt:
            return prepare(
                source,
                target_tokenizer=self.target.tokenizer,
                draft_tokenizer=draft_tokenizer,
                settings=settings,
                tools=tools,
                protect=pieces,
                question=question,
            )

        own = self.draft.tokenizer if self.draft and self.tokenizer_difference else None
        with clock.stage("prepare"):
            try:
                prompt = prepared(own)
            except TokenizerMismatch as error:
                if own is None or settings.strict:
                    raise
                prompt = prepared(None)
                return prompt, _fallback(prompt, Reason.TOKENIZER_MISMATCH, error)
        try:
            refusal = self._refusal(prompt)
            if refusal is not None:
                return prompt, dense_plan(prompt, *refusal)
            return prompt, self._pruned(prompt, sampling, clock)
        except _FALLBACKS as error:
            reason = next(r for kind, r in _REASONS.items() if isinstance(error, kind))
            return prompt, _fallback(prompt, reason, error)
        except Exception as error:  # a fault of ours: the request is answered all the same
            _log.warning("pruning failed", exc_info=True)
            failure = DraftFailed(f"after the draft: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return prompt, _fallback(prompt, Reason.DRAFT_FAILED, failure)

    def _refusal(self, prompt: Prompt) -> tuple[Reason, str] | None:
        """Why this prompt is not to be pruned at all, before the draft has run."""
        settings, n = prompt.settings, len(prompt.target)
        if not settings.enabled:
            return Reason.DISABLED, "pruning is switched off"
        if self.draft is None:
            return Reason.DISABLED, "no draft is loaded"
        if n < settings.threshold:
            words = f"{n} tokens are fewer than the threshold of {settings.threshold}"
            return Reason.BELOW_THRESHOLD, words
        for name in ("min_keep_tokens", "keep_tokens"):
            least = getattr(settings, name)
            if least is not None and settings.clamp(least, n) == n:
                words = f"{n} tokens are no more than the {name} of {least}: nothing to leave out"
                return Reason.BELOW_THRESHOLD, words
        # Under coverage without a ceiling nobody knows how much will be kept.
        known = settings.budget(n) is not None or settings.max_keep_tokens is not None
        if settings.min_gain and known:
            gain = self.predicted_gain(prompt)
            if gain < settings.min_gain:
                words = f"the predicted gain of {gain:.2f} is below min_gain ({settings.min_gain})"
                return Reason.PREDICTED_NO_GAIN, words
        return None

    def _pruned(self, prompt: Prompt, sampling: Sampling, clock: Clock) -> PrunePlan:
        assert self.draft is not None
        positions = resolve_positions(
            prompt.settings.positions,
            self.target.position_support,
            prompt_tokens=len(prompt.target),
            max_tokens=sampling.max_tokens,
            shared_tokenizer=prompt.shared_tokenizer,
            separator=prompt.settings.separator,
        )
        separator = self._separator_ids(prompt.settings, positions)
        limit = prompt.settings.limit(len(prompt.target))
        if (protected := protected_tokens(prompt, separator.size)) > limit:
            words = f"{protected} protected tokens exceed the budget of {limit}"
            return dense_plan(prompt, Reason.PROTECTED_EXCEEDS_BUDGET, words)
        if prompt.head:
            with clock.stage("read_ahead"):
                self.target.read_ahead(prompt.target.ids[: prompt.head])
        with clock.stage("draft"):
            importance = self._score(prompt)
        clock.split("draft", importance.seconds)
        with clock.stage("select"):
            kept = select(prompt, importance, separator.size)
        with clock.stage("plan"):
            plan = make_plan(prompt, kept, positions, separator)
            remarks = [*self._remarks(prompt, positions), importance.detail]
            plan = replace(plan, detail="; ".join(filter(None, remarks)))
            check_fits(plan, self.target.position_support.context, sampling.max_tokens)
        return plan

    def _score(self, prompt: Prompt) -> Importance:
        assert self.draft is not None
        try:
            importance = self.draft.score(prompt.draft.ids, prompt.settings, prompt.question)
        except SpecPrefillError:
            raise
        except Exception as error:  # foreign code: whatever it raises, the request is answered
            _log.warning("draft %s failed", self.draft.name, exc_info=True)
            raise DraftFailed(f"{type(error).__name__}: {error}") from error
        if importance.scores.size != len(prompt.draft):
            raise DraftFailed(
                f"draft {self.draft.name} gave {importance.scores.size} scores"
                f" for {len(prompt.draft)} tokens"
            )
        return importance

    def _remarks(self, prompt: Prompt, positions: Positions) -> list[str]:
        """What was decided for the request beyond what it asked for."""
        support = self.target.position_support
        if prompt.settings.positions == "auto" and support.better == positions:
            return [*_floor_remarks(prompt), support.evidence]
        return _floor_remarks(prompt)

    def _separator_ids(self, settings: Settings, positions: Positions) -> NDArray[np.int32]:
        if not settings.separator or positions == "original":
            return np.zeros(0, dtype=np.int32)
        return encode(self.target.tokenizer, settings.separator, special=False).ids

    def _start(
        self, prompt: Prompt, plan: PrunePlan, sampling: Sampling, clock: Clock
    ) -> tuple[PrunePlan, Step, Generator[Step, None, None]]:
        """Prefill; on a failure of the pruned prompt once more with the full one."""
        check_fits(plan, self.target.position_support.context, sampling.max_tokens)
        try:
            with clock.stage("target_prefill"):
                rest = self.target.stream(plan, sampling)
                return plan, next(rest), rest
        except TargetFailed as error:
            if plan.reason is not Reason.PRUNED:
                raise
            dense = _fallback(prompt, Reason.UNSUPPORTED_TARGET, error)
        return self._start(prompt, dense, sampling, clock)


# What keeps a prompt from being pruned, from the special to the general.
_REASONS: dict[type[SpecPrefillError], Reason] = {
    UnsupportedPositions: Reason.UNSUPPORTED_TARGET,
    ContextTooLong: Reason.CONTEXT_TOO_LONG,
    DegenerateScores: Reason.DEGENERATE_SCORES,
    DraftTimeout: Reason.DRAFT_TIMEOUT,
    DraftFailed: Reason.DRAFT_FAILED,
    UnsupportedModel: Reason.DRAFT_FAILED,
}
_FALLBACKS = tuple(_REASONS)


def _fallback(prompt: Prompt, reason: Reason, error: Exception) -> PrunePlan:
    """The dense plan with `reason`; under strict, `error` itself."""
    if prompt.settings.strict:
        raise error
    return dense_plan(prompt, reason, str(error) or type(error).__name__)


def _floor_remarks(prompt: Prompt) -> list[str]:
    """Words for a budget that the floor has raised above the keep rate asked for."""
    settings, n = prompt.settings, len(prompt.target)
    if settings.keep_rate is None or settings.min_keep_tokens is None:
        return []
    asked = round(settings.keep_rate * n)
    if settings.budget(n) == asked or settings.min_keep_tokens <= asked:
        return []
    return [f"min_keep_tokens raises the {asked} tokens asked for to {settings.budget(n)}"]


def with_knobs(
    settings: Settings | None, sampling: Sampling | None, knobs: dict[str, Any]
) -> tuple[Settings, Sampling]:
    """Settings and sampling in force, single knobs by name put over the whole ones.

    Raises `InputError` for what cannot be used of any of them.
    """
    if not isinstance(settings, Settings | None):
        raise InputError("settings", settings, "a Settings or None")
    if not isinstance(sampling, Sampling | None):
        raise InputError("sampling", sampling, "a Sampling or None")
    if {"keep", "keep_rate"} <= set(knobs):
        both = (knobs["keep"], knobs["keep_rate"])
        raise InputError("keep and keep_rate", both, "one of them: they are the same")
    values = {("keep_rate" if name == "keep" else name): value for name, value in knobs.items()}
    # An amount that is None was not given, and changes nothing that was.
    values = {name: v for name, v in values.items() if v is not None or name not in AMOUNTS}
    drawn = {name: values.pop(name) for name in list(values) if name in Sampling.model_fields}
    base = settings.model_dump(exclude_unset=True) if settings else {}
    if any(amount in values for amount in AMOUNTS):
        base = {name: value for name, value in base.items() if name not in AMOUNTS}
    drawn_base = sampling.model_dump(exclude_unset=True) if sampling else {}
    final = Sampling.of(**{**drawn_base, **drawn})
    if final.temperature and final.seed is None:  # drawn here, so that the report can name it
        final = final.model_copy(update={"seed": secrets.randbits(63)})
    return Settings.of(**{**base, **values}).in_force(), final
