"""Live progress of a study: one line on a terminal, a line for each decision elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from steptune.dashboards import units
from steptune.tuner.records import Decision

if TYPE_CHECKING:  # the search brings SciPy, which `steptune list` need not wait for
    from steptune.tuner.search.view import StudyView

REFRESH_PER_S = 2.0
"""Maximum refreshes per second; a low rate, so that drawing does not disturb measurements."""


class Progress:
    """Display of a study's progress, redrawn whenever the view has changed."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self._console = console
        self._live = live
        self._told = 0
        self._stage = ""
        self._last_s = 0.0

    def __call__(self, view: StudyView) -> None:
        if self._live is None:
            self._print_news(view)
        elif time.monotonic() - self._last_s > 1 / REFRESH_PER_S:
            self._last_s = time.monotonic()
            self._live.update(draw(view), refresh=True)

    def _print_news(self, view: StudyView) -> None:
        if view.stage != self._stage and view.stage not in (
            "move",
            "refine",
            "together",
            "simplify",
            "audit",
            "sentinel",
        ):
            self._stage = view.stage
            self._print(view, view.stage)
        for decision in view.decisions[self._told :]:
            if decision.verdict != "not_tried":
                self._print(view, decision_text(decision))
        self._told = len(view.decisions)

    def _print(self, view: StudyView, text: str) -> None:
        """Print the text as one line, however long it is, because logs are searched line by line."""
        self._console.print(f"[{units.duration(view.elapsed_s)}] {text}", markup=False, soft_wrap=True)


@contextmanager
def live_progress(console: Console, *, quiet: bool = False) -> Iterator[Progress]:
    """Show progress on a console for the duration of a study."""
    if quiet or not console.is_terminal:
        yield Progress(Console(quiet=True) if quiet else console, None)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield Progress(console, live)


def draw(view: StudyView) -> Text:
    """Return the line: time left, trials, the best so far, the current trial; a narrow terminal cuts its end."""
    left = f"{units.duration(max(0.0, view.left_s))} of {units.duration(view.budget_s)} left"
    parts = [left, _trials(view)]
    if view.best_gain is not None:
        parts.append(f"best {units.ratio(1 + view.best_gain)} {view.best_label}".rstrip())
    parts.append(f"now {view.stage}: {view.current}" if view.current not in ("", view.stage) else f"now {view.stage}")
    return Text(" · ".join(parts), overflow="ellipsis", no_wrap=True)


def _trials(view: StudyView) -> str:
    """Count the trials: `12 trials done`, or `3 of 3 trials done, 5 with companions`."""
    if not view.max_trials:
        return f"{units.counted(view.num_trials, 'trial')} done"
    text = f"{view.num_searched} of {units.counted(view.max_trials, 'trial')} done"
    return f"{text}, {view.num_trials} with companions" if view.num_trials > view.num_searched else text


def decision_text(decision: Decision) -> str:
    """Return a decision in one line: `accepted  optimizer_implementation: implementation=fused`"""
    return f"{units.words(decision.verdict):<14} {units.moves_label(decision.moves) or decision.stage}"
