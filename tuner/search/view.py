"""Progress of a study for the person waiting for it, and the interrupt that ends it early."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from steptune.tuner.protocols import Progress
from steptune.tuner.records import Decision, Finding, StudyState


@dataclass
class StudyView:
    """Progress of a study, updated by the code that runs each part.

    Args:
        spent_before_s: Seconds of trials before a restart, which count against the budget but not in `elapsed_s`.
        on_change: Called with the view whenever it changes.
        clock: Returns the seconds of a monotonic clock.
    """

    budget_s: float
    spent_before_s: float = 0.0
    on_change: Callable[[StudyView], None] = lambda view: None
    clock: Callable[[], float] = time.monotonic
    began_s: float = field(init=False)
    stage: str = "starting"
    current: str = ""
    activity: str = ""
    unit: str = "sample"
    baseline_units_per_s: float | None = None
    best_label: str = ""
    best_gain: float | None = None
    num_trials: int = 0
    """Number of all trials, including companion trials that alternated with others for comparison."""
    num_searched: int = 0
    """Number of trials that count against `max_trials`; trials that alternate with each other count as one."""
    max_trials: int | None = None
    findings: tuple[Finding, ...] = ()
    decisions: tuple[Decision, ...] = ()

    def __post_init__(self) -> None:
        self.began_s = self.clock()

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.began_s

    @property
    def left_s(self) -> float:
        """Remaining seconds of the budget."""
        return self.budget_s - self.elapsed_s - self.spent_before_s

    def say(self, **changes: str) -> None:
        """Set the named fields, and notify the listener."""
        for name, value in changes.items():
            setattr(self, name, value)
        self.on_change(self)

    def on_progress(self, progress: Progress) -> None:
        self.say(activity=progress.text)


class StudyInterrupt(KeyboardInterrupt):
    """Interrupt that ends a study early, at any point.

    Args:
        state: State of the study from then on.
        recommends: Whether the best so far is recommended, where a baseline was measured.
    """

    def __init__(self, state: StudyState = StudyState.INTERRUPTED, *, recommends: bool = False) -> None:
        super().__init__(state.value)
        self.state = state
        self.recommends = recommends
