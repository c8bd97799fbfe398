"""Progress of a running study as the data of a `progress` event and back: a remote watcher sees what `tune` shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from steptune.tuner.records import Decision, Finding
from steptune.tuner.search.view import StudyView

EVENT = "progress"
RECENT_DECISIONS = 6
MIN_INTERVAL_S = 2.0
_FIELDS = (
    "budget_s",
    "spent_before_s",
    "stage",
    "current",
    "activity",
    "unit",
    "baseline_units_per_s",
    "best_label",
    "best_gain",
    "num_trials",
    "num_searched",
    "max_trials",
)


def data_of(view: StudyView) -> dict[str, Any]:
    """The data of an event: the view with its last decisions and its first finding."""
    return {
        **{name: getattr(view, name) for name in _FIELDS},
        "elapsed_s": view.elapsed_s,
        "findings": msgspec.to_builtins(view.findings[:1]),
        "decisions": msgspec.to_builtins(view.decisions[-RECENT_DECISIONS:]),
    }


def view_of(data: dict[str, Any]) -> StudyView:
    """The view that an event tells of; its time goes on from there. Older workers tell of fewer fields."""
    view = StudyView(**{name: data[name] for name in _FIELDS if name in data})
    view.began_s = view.clock() - data["elapsed_s"]
    view.findings = msgspec.convert(data["findings"], tuple[Finding, ...])
    view.decisions = msgspec.convert(data["decisions"], tuple[Decision, ...])
    return view


class Publisher:
    """Publishes a view that changes: news of the search at once, what is going on now and then."""

    def __init__(self, publish: Callable[[dict[str, Any]], None], interval_s: float = MIN_INTERVAL_S) -> None:
        self._publish = publish
        self._interval_s = interval_s
        self._last_s = -float("inf")
        self._news: tuple[object, ...] = ()

    def __call__(self, view: StudyView) -> None:
        news = (view.stage, view.num_trials, len(view.decisions))
        if news != self._news or time.monotonic() - self._last_s > self._interval_s:
            self._news, self._last_s = news, time.monotonic()
            self._publish(data_of(view))
