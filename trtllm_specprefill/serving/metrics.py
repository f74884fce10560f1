"""What the server counts, on Triton's own Prometheus endpoint.

Families are made through Triton's Python backend, whose module is passed in.
"""

from __future__ import annotations

from typing import Any

from trtllm_specprefill.pipeline import Planned

_SECONDS = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0]
_RATES = [0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0]
_DRAFT_STAGES = ("draft_prefill", "look_ahead", "draft")


class OrchestratorMetrics:
    """Requests by reason and in the server, keep rate, draft seconds, tokens saved."""

    def __init__(self, backend: Any) -> None:
        self._requests = _family(
            backend, "COUNTER", "specprefill_requests_total", "Requests by reason"
        )
        self._by_reason: dict[str, Any] = {}
        self._keep_rate = _histogram(
            backend, "specprefill_keep_rate", "Share of the prompt that the target reads", _RATES
        )
        self._draft = _histogram(
            backend, "specprefill_draft_seconds", "Seconds of scoring a prompt", _SECONDS
        )
        self._saved_family = _family(
            backend, "COUNTER", "specprefill_tokens_saved_total", "Prompt tokens left out"
        )
        self._saved = self._saved_family.Metric(labels={})
        self._inside_family = _family(
            backend, "GAUGE", "specprefill_requests_inside", "Requests in the server"
        )
        self._inside = self._inside_family.Metric(labels={})

    def inside(self, requests: int) -> None:
        """State how many requests are in the server now."""
        self._inside.set(requests)

    def planned(self, planned: Planned) -> None:
        """Count a request whose plan goes to the target."""
        plan = planned.plan
        self.ended(plan.reason.value)
        self._keep_rate[1].observe(plan.keep_rate)
        self._saved.increment(max(plan.prompt_tokens - int(plan.input_ids.size), 0))
        seconds = sum(planned.stages.get(stage, 0.0) for stage in _DRAFT_STAGES)
        if "draft" in planned.stages:
            self._draft[1].observe(seconds)

    def ended(self, reason: str) -> None:
        """Count a request under a reason code, or under how it ended before it had one."""
        if reason not in self._by_reason:
            self._by_reason[reason] = self._requests.Metric(labels={"reason": reason})
        self._by_reason[reason].increment(1)


class TargetMetrics:
    """Seconds to the first token, and of the target's prefill."""

    def __init__(self, backend: Any) -> None:
        self._ttft = _histogram(
            backend, "specprefill_ttft_seconds", "Seconds to the first token", _SECONDS
        )
        self._prefill = _histogram(
            backend, "specprefill_target_prefill_seconds", "Seconds of prefill", _SECONDS
        )

    def answered(self, report: dict[str, Any]) -> None:
        """Count a finished answer by its report."""
        self._ttft[1].observe(report["ttft_s"])
        self._prefill[1].observe(report["stages"]["target_prefill"])


def _family(backend: Any, kind: str, name: str, words: str) -> Any:
    kinds = backend.MetricFamily
    return kinds(name=name, description=words, kind=getattr(kinds, kind))


def _histogram(backend: Any, name: str, words: str, buckets: list[float]) -> tuple[Any, Any]:
    """The family and its one metric; Triton wants the family to outlive the metric."""
    family = _family(backend, "HISTOGRAM", name, words)
    return family, family.Metric(labels={}, buckets=buckets)
