"""What the server counts, on Triton's own Prometheus endpoint.

Families are made through Triton's Python backend, whose module is passed in. It lets go of the
interpreter's lock while a metric changes, and two threads that change one at once bring the whole
server down (2.51); so they take turns here.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from trtllm_specprefill.pipeline import Planned

_SECONDS = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0]
_RATES = [0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0]
_DRAFT_STAGES = ("draft_prefill", "look_ahead", "draft")


class OrchestratorMetrics:
    """Requests by reason and in the server, keep rate, draft seconds, tokens saved.

    May be called from several threads.
    """

    def __init__(self, backend: Any) -> None:
        self._requests = _Counter(backend, "specprefill_requests_total", "Requests by reason")
        self._keep_rate = _Histogram(
            backend, "specprefill_keep_rate", "Share of the prompt that the target reads", _RATES
        )
        self._draft = _Histogram(
            backend, "specprefill_draft_seconds", "Seconds of scoring a prompt", _SECONDS
        )
        self._saved = _Counter(backend, "specprefill_tokens_saved_total", "Prompt tokens left out")
        self._inside = _Gauge(backend, "specprefill_requests_inside", "Requests in the server")

    def inside(self, requests: int) -> None:
        """State how many requests are in the server now."""
        self._inside.set(requests)

    def planned(self, planned: Planned) -> None:
        """Count a request whose plan goes to the target."""
        plan = planned.plan
        self.ended(plan.reason.value)
        self._keep_rate.observe(plan.keep_rate)
        self._saved.add(max(plan.prompt_tokens - int(plan.input_ids.size), 0))
        seconds = sum(planned.stages.get(stage, 0.0) for stage in _DRAFT_STAGES)
        if "draft" in planned.stages:
            self._draft.observe(seconds)

    def ended(self, reason: str) -> None:
        """Count a request under a reason code, or under how it ended before it had one."""
        self._requests.add(1, reason=reason)


class TargetMetrics:
    """Seconds to the first token, and of the target's prefill."""

    def __init__(self, backend: Any) -> None:
        self._ttft = _Histogram(
            backend, "specprefill_ttft_seconds", "Seconds to the first token", _SECONDS
        )
        self._prefill = _Histogram(
            backend, "specprefill_target_prefill_seconds", "Seconds of prefill", _SECONDS
        )

    def answered(self, report: dict[str, Any]) -> None:
        """Count a finished answer by its report."""
        self._ttft.observe(report["ttft_s"])
        self._prefill.observe(report["stages"]["target_prefill"])


class _Family:
    """One family of metrics, changed by one thread at a time."""

    kind = ""

    def __init__(self, backend: Any, name: str, words: str) -> None:
        kinds = backend.MetricFamily
        # Triton wants the family to outlive its metrics.
        self._family = kinds(name=name, description=words, kind=getattr(kinds, self.kind))
        self._lock = Lock()


class _Counter(_Family):
    kind = "COUNTER"

    def __init__(self, backend: Any, name: str, words: str) -> None:
        super().__init__(backend, name, words)
        self._metrics: dict[tuple[tuple[str, str], ...], Any] = {}

    def add(self, amount: int, **labels: str) -> None:
        key = tuple(labels.items())
        with self._lock:
            if key not in self._metrics:
                self._metrics[key] = self._family.Metric(labels=labels)
            self._metrics[key].increment(amount)


class _Gauge(_Family):
    kind = "GAUGE"

    def __init__(self, backend: Any, name: str, words: str) -> None:
        super().__init__(backend, name, words)
        self._metric = self._family.Metric(labels={})

    def set(self, value: float) -> None:
        with self._lock:
            self._metric.set(value)


class _Histogram(_Family):
    kind = "HISTOGRAM"

    def __init__(self, backend: Any, name: str, words: str, buckets: list[float]) -> None:
        super().__init__(backend, name, words)
        self._metric = self._family.Metric(labels={}, buckets=buckets)

    def observe(self, value: float) -> None:
        with self._lock:
            self._metric.observe(value)
