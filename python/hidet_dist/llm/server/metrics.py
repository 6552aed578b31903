"""``/metrics`` in the text format of Prometheus: what the engine does, and how long requests take."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from hidet_dist.llm.engine import Stream
from hidet_dist.llm.server.service import Service

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)

_GAUGES = {
    "running": "Answers that the model computes.",
    "waiting": "Answers that wait for the model.",
    "pages": "Pages of the model's pools.",
    "pages_used": "Pages that answers use.",
    "pages_kept": "Pages that are kept for prompts to come.",
}
_COUNTERS = {
    "steps": "Steps of the model.",
    "prompt_tokens": "Tokens of prompts that were computed.",
    "shared_tokens": "Tokens of prompts that were found in the pages.",
    "generated_tokens": "Tokens that were generated.",
    "preempted": "Answers that gave back their pages for a while.",
    "model_seconds": "Seconds in the model.",
    "other_seconds": "Seconds in the engine beside the model.",
}


class _EngineCollector(Collector):
    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("hidet_dist_ready", "Whether requests are taken.")
        ready.add_metric([], float(self._service.status == "ready"))
        yield ready
        if self._service.engine is None:
            return
        statistics = self._service.engine.statistics()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"hidet_dist_{name}", text, value=getattr(statistics, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"hidet_dist_{name}", text, value=getattr(statistics, name))


class Metrics:
    """The metrics of a service."""

    def __init__(self, service: Service):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(service))
        self._responses = Counter(
            "hidet_dist_responses", "Responses, by path and status.", ["path", "status"], registry=self._registry
        )
        self._first = self._histogram("first_token", "From a request to its first token.")
        self._token = self._histogram("token", "Between the tokens of an answer, on average.")
        self._whole = self._histogram("request", "From a request to its end.")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"hidet_dist_{name}_seconds", text, buckets=_SECONDS, registry=self._registry)

    def count(self, path: str, status: int) -> None:
        """Count a response."""
        self._responses.labels(path, str(status)).inc()

    def observe(self, stream: Stream) -> None:
        """Count the times of a request that ended."""
        if not stream.first or not stream.ended:
            return
        self._first.observe(stream.first - stream.submitted)
        self._whole.observe(stream.ended - stream.submitted)
        following = stream.generated / stream.request.choices - 1
        if following > 0:
            self._token.observe((stream.ended - stream.first) / following)

    def text(self) -> bytes:
        """Return all metrics."""
        return generate_latest(self._registry)
