"""Conversion of a running study's progress to `progress` events and back: a remote watcher sees what `tune` shows.

A study reports every few seconds, for hours: an event has only the decisions and the finding that no earlier one had,
and the reader puts them together (`Picture`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import msgspec

from steptune.tuner.records import Decision, Finding
from steptune.tuner.search.view import StudyView

EVENT = "progress"
RECENT_DECISIONS = 6
NOT_TRIED = "not_tried"
"""Verdict that a search gives, at its end, to all choices that it has not tried. Decisions with this verdict are left
out of events.
"""
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


def data_of(view: StudyView, told: StudyView | None = None) -> dict[str, Any]:
    """Return the data of an event: the view, with the latest decisions on trials if they are new, and the first finding
    if it has changed.

    Args:
        told: The view that an earlier event carried.
    """
    data = {**{name: getattr(view, name) for name in _FIELDS}, "elapsed_s": view.elapsed_s}
    last = told.decisions[-1].sequence if told is not None and told.decisions else -1
    tried = [one for one in view.decisions if one.sequence > last and one.verdict != NOT_TRIED]
    if tried:
        data["decisions"] = msgspec.to_builtins(tried[-RECENT_DECISIONS:])
    if view.findings[:1] != (told.findings[:1] if told is not None else ()):
        data["findings"] = msgspec.to_builtins(view.findings[:1])
    return data


def view_of(data: dict[str, Any]) -> StudyView:
    """Return the view in one event, with an elapsed time that continues to run. Events of older workers have fewer
    fields.
    """
    view = StudyView(**{name: data[name] for name in _FIELDS if name in data})
    view.began_s = view.clock() - data["elapsed_s"]
    view.findings = msgspec.convert(data.get("findings", ()), tuple[Finding, ...])
    view.decisions = msgspec.convert(data.get("decisions", ()), tuple[Decision, ...])
    return view


class Picture:
    """View of a study, assembled from the study's events in order."""

    def __init__(self) -> None:
        self._decisions: dict[int, Decision] = {}
        self._findings: tuple[Finding, ...] = ()

    def after(self, data: dict[str, Any]) -> StudyView:
        """Return the view after one more event."""
        view = view_of(data)
        self._decisions |= {decision.sequence: decision for decision in view.decisions}
        view.decisions = tuple(self._decisions[number] for number in sorted(self._decisions))
        self._findings = view.findings if "findings" in data else self._findings
        view.findings = self._findings
        return view


class Publisher:
    """Publisher of a study's changing view: news of the search is published at once, current activity at intervals."""

    def __init__(self, publish: Callable[[dict[str, Any]], None], interval_s: float = MIN_INTERVAL_S) -> None:
        self._publish = publish
        self._interval_s = interval_s
        self._last_s = -float("inf")
        self._news: tuple[object, ...] = ()
        self._told: StudyView | None = None

    def __call__(self, view: StudyView) -> None:
        news = (view.stage, view.num_trials, len(view.decisions))
        if news != self._news or time.monotonic() - self._last_s > self._interval_s:
            self._news, self._last_s = news, time.monotonic()
            self._publish(data_of(view, self._told))
            self._told = copy.copy(view)
