"""Metrics for Prometheus: requests of this process, and the queue and workers as recorded in the database."""

from __future__ import annotations

import functools
from collections import Counter as Counts
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Engine

from steptune.service.queries.inventory import num_studies_by_state
from steptune.service.queue import StudyQueue
from steptune.tuner.records import StudyState

_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0)
WORKER_STATES = ("idle", "busy", "draining", "gone")


class Metrics:
    """The metrics of one application."""

    def __init__(self, engine: Engine, queue: StudyQueue) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "steptune_http_requests",
            "Requests, by method, route and status.",
            ("method", "route", "status"),
            registry=self._registry,
        )
        self._latency = Histogram(
            "steptune_http_request_duration_seconds",
            "Time from a request to the end of its response, by method and route.",
            ("method", "route"),
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        # Finding the labels takes longer than counting; they are as few as there are operations.
        self._count_of = functools.cache(self._requests.labels)
        self._latency_of = functools.cache(self._latency.labels)
        self.event_streams = Gauge("steptune_event_streams", "Open event streams.", registry=self._registry)
        self._registry.register(_StoredCounts(engine, queue))

    def observe(self, method: str, route: str, status: int, duration_s: float) -> None:
        self._count_of(method, route, status).inc()
        self._latency_of(method, route).observe(duration_s)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _StoredCounts(Collector):
    """Counts from the database, read when Prometheus asks for them."""

    def __init__(self, engine: Engine, queue: StudyQueue) -> None:
        self._engine = engine
        self._queue = queue

    def describe(self) -> Iterator[Metric]:
        """Describe no metrics, so that registration of the collector does not read the database."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        studies = GaugeMetricFamily("steptune_studies", "Studies, by state.", labels=("state",))
        found = num_studies_by_state(self._engine)
        for state in StudyState:
            studies.add_metric((state.value,), found.get(state.value, 0))
        yield studies
        workers = GaugeMetricFamily("steptune_workers", "Workers, by state.", labels=("state",))
        present = Counts(worker.state for worker in self._queue.workers())
        for name in WORKER_STATES:
            workers.add_metric((name,), present[name])
        yield workers
