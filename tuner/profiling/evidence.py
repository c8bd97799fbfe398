"""Evidence for a diagnosis: a step's shares, features already enabled, and the gain of removing a cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steptune.tuner.costs.bounds import Situation
from steptune.tuner.costs.categories import COMPUTING, Category
from steptune.tuner.profiling.facts import joined_facts
from steptune.tuner.profiling.gains import Gain, gain_of
from steptune.tuner.profiling.replay.answers import DISPATCH, LOADER, STALLS, saved_share
from steptune.tuner.records import Breakdown, Replay, StepFacts
from steptune.tuner.trace_records import RankAnalysis

SEVERITIES = ("note", "warning", "high")
PLACES = 3
"""Maximum number of kernels or gaps that a finding names."""
RECURRING = 0.6
"""Minimum share of the steps that must contain stalls for the stalls to count as recurring; below it, the finding lists
the steps with stalls.
"""
UNPACED = 0.3
"""Maximum share of stalls and waits for batches in the time that the device waits for the host. If their share is
larger, the step does not count as paced by dispatch.

In launch-bound steps the longest 1 % of the gaps are 8 to 12 % of that time; for a rank that sleeps, 52 and 58 %.
"""


def busiest(breakdowns: Sequence[Breakdown]) -> Breakdown:
    """Return the breakdown of the device that computes most; other devices of the process may be nearly idle."""
    return max(breakdowns, key=lambda breakdown: sum(breakdown.categories.get(c, 0) for c in COMPUTING))


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Evidence for a diagnosis: a trial's situation, the analysis of a trace, or both.

    Attributes:
        analysis: Analysis of one rank; without a situation the breakdown of its busiest device is judged.
        run: Replay of all ranks together. It takes precedence over a replay of this rank's steps alone, in which
            collectives last as long as they did, waits for other ranks included.
        late_part: Share of the rank's exposed communication in which it waits for a late rank, as far as other ranks'
            traces show it. It counts for `rank_skew`, not as time of the network.
    """

    situation: Situation | None = None
    analysis: RankAnalysis | None = None
    late_part: float = 0.0
    run: Replay | None = None

    @property
    def breakdown(self) -> Breakdown:
        if self.situation is not None:
            return self.situation.breakdown
        assert self.analysis is not None, "evidence requires a trial or a trace"
        return busiest(self.analysis.breakdowns)

    @property
    def facts(self) -> StepFacts:
        """Return facts about features already enabled, from the trace and, for a trial, from its choices."""
        seen = self.breakdown.facts
        return seen if self.situation is None else joined_facts(seen, self.situation.facts)

    @property
    def device_kind(self) -> str:
        if self.situation is not None:
            return self.situation.environment.hardware.device_kind
        return "cpu" if self.breakdown.device == "cpu" else "cuda"

    def share(self, *categories: Category) -> float:
        """Return the share of the step in these categories, excluding waits for late ranks and stalls."""
        return sum(self.own_part(category) * self.breakdown.share(category) for category in categories)

    def removable_share(self, *categories: Category) -> float:
        """Return the share of the step saved if these categories vanished, with the same exclusions as `share`."""
        return sum(self.own_part(category) * self.breakdown.removable_share(category) for category in categories)

    @property
    def late_share(self) -> float:
        """Return the share of the step in which the rank waits for a late rank and computes nothing."""
        return self.late_part * self.breakdown.share(Category.COMMUNICATION)

    @property
    def late_removable_share(self) -> float:
        return self.late_part * self.breakdown.removable_share(Category.COMMUNICATION)

    def own_part(self, category: Category) -> float:
        """Return the share of a category's time that is spent neither waiting for late ranks nor in stalls."""
        if category is Category.COMMUNICATION:
            return 1.0 - self.late_part
        return 1.0 - self.breakdown.stalled_share if category is Category.HOST else 1.0

    def gain(self, cause: str, share: float) -> Gain | None:
        """Return the gain of removing a cause: the replayed gain, or else a range from zero to the given share of the
        step.
        """
        return gain_of(self._replay(cause), cause, share, self.idle_share)

    def saved(self, cause: str) -> float | None:
        """Return the share of the step that removing a cause saves in the replay; None if no replay gives a single
        figure.
        """
        return saved_share(self._replay(cause), cause)

    def _replay(self, cause: str) -> Replay | None:
        run = self.run
        return run if run is not None and cause in run.saved else self.breakdown.replay

    @property
    def idle_share(self) -> float:
        """Return the share of the step in which the device does not compute."""
        return 1.0 - self.breakdown.share(*COMPUTING)

    @property
    def stalled_share(self) -> float:
        """Return the share of the step that is host time inside stalls."""
        return self.breakdown.stalled_share * self.breakdown.share(Category.HOST)

    @property
    def is_paced_by_dispatch(self) -> bool:
        """Say whether the device's waits for the host are mostly waits for launches, not for stalls or batches."""
        others = self.stalled_share + self.share(Category.DATA_WAIT, Category.EPOCH_RESTART)
        return others <= UNPACED * (others + self.share(Category.HOST, Category.LAUNCH_LATENCY))

    @property
    def sets_launches_aside(self) -> bool:
        """Say whether another cause must be removed before launches are worth optimising: stalls that recur, or any
        stalls or waits for batches that cost more than the launches.
        """
        if self.is_paced_by_dispatch:
            return False
        dispatch, stalled, loading = self.saved(DISPATCH), self.saved(STALLS) or 0.0, self.saved(LOADER) or 0.0
        if dispatch is None or dispatch <= max(stalled, loading):
            return True
        stalls = self.breakdown.stalls
        recurs = stalls is not None and len(stalls.steps) >= RECURRING * self.breakdown.num_steps
        return recurs and stalled > UNPACED * dispatch
