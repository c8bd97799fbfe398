"""Ledger of a study's trials, through which the driver uses the store: a stored trial is never run again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from steptune.tuner.objectives import PLAIN, Objective
from steptune.tuner.protocols import StudyStore
from steptune.tuner.records import Candidate, FailureKind, Purpose, Trial, TrialResult, TrialSpec, TrialState
from steptune.tuner.store_rules import BUDGET_CHANGED
from steptune.tuner.trials.failures import repeats_after

SEARCHING = (Purpose.BASELINE, Purpose.EXPLORE, Purpose.REPLICATE, Purpose.AUDIT, Purpose.SENTINEL)
"""Purposes of the runs that a search requests."""


class Ledger:
    """Ledger of a study's trials: it returns results by candidate, purpose and replicate, and writes the rows of new
    trials.
    """

    def __init__(self, store: StudyStore, study_id: str, objective: Objective = PLAIN) -> None:
        self._store = store
        self._objective = objective
        self.same_model: Callable[[Candidate, Candidate], bool] = lambda one, other: one == other
        """Function that says whether a candidate can use the code that was compiled and cached for another candidate.
        """
        self._compiled: list[tuple[Candidate, int]] = []
        """Candidate and compilation time in nanoseconds of each run, in order."""
        self._raw: dict[str, TrialResult] = {}
        self._study_id = study_id
        store.lose_running_trials(study_id)
        stored = store.trials(study_id)
        self._next_sequence = max((trial.sequence for trial in stored), default=0) + 1
        self._found: dict[tuple[str, Purpose, int], TrialResult] = {}
        self._companions: dict[str, TrialResult] = {}
        self._sequences: dict[str, int] = {}
        self._moved: list[TrialResult] = []
        self.num_moved = 0
        self._last_place: str | None = None
        self._arrival: Counter[str] | None = None
        """Number of runs of each candidate since the study moved to its latest machine; None once the search continues
        on this machine.
        """
        self._came_with = ""
        """Group of trials during which the study moved to its latest machine."""
        self.spent_s = 0.0
        self.num_trials = 0
        changed = [event.at for event in store.events(study_id) if event.kind == BUDGET_CHANGED]
        self._first_blocks: Counter[Purpose] = Counter()
        for trial in stored:
            if changed and trial.started_at <= changed[-1]:
                self._first_blocks[trial.purpose] = max(self._first_blocks[trial.purpose], trial.replicate + 1)
        for trial in stored:
            if trial.result is not None and trial.state in (TrialState.COMPLETED, TrialState.FAILED):
                self._remember(trial, trial.result)

    def find(self, candidate: Candidate, purpose: Purpose, replicate: int) -> TrialResult | None:
        """Return the result of this run of this candidate, or None if the run is not complete."""
        return self._found.get((candidate.key, purpose, replicate))

    def first_block(self, purpose: Purpose) -> int:
        """Return the index of the first block for a purpose since the last change of the budget."""
        return self._first_blocks[purpose]

    def counted(self, result: TrialResult) -> TrialResult:
        """Return a stored result as the objective of the study counts it."""
        candidate = result.candidate
        # The first start of its model, or its own, which may have recorded graphs of it.
        first = (took_ns for other, took_ns in self._compiled if self.same_model(other, candidate))
        own = (took_ns for other, took_ns in self._compiled if other == candidate)
        return self._objective.counted(result, max(next(first, 0), next(own, 0)))

    def as_measured(self, result: TrialResult) -> TrialResult:
        """Return the result as it was measured, before `counted` converted it."""
        return self._raw.get(result.trial_id, result)

    def companion_of(self, result: TrialResult) -> TrialResult | None:
        """Return the trial that took turns with this one for comparison, if any."""
        return self._companions.get(result.group)

    def take_moved(self, *, before: TrialResult | None) -> list[TrialResult]:
        """Return the trials that were run because the study had moved to another machine, in order; each is returned
        once.

        Args:
            before: Include only trials begun before this one; None includes all.
        """
        end = math.inf if before is None else self._sequences[before.trial_id]
        taken = [result for result in self._moved if self._sequences[result.trial_id] < end]
        self._moved = self._moved[len(taken) :]
        return taken

    def searched(self, *, before: TrialResult | None) -> list[TrialResult]:
        """Return the stored results that searches requested, in order.

        Args:
            before: Include only trials begun before this one; None includes all.
        """
        end = math.inf if before is None else self._sequences[before.trial_id]
        found = (result for (_, purpose, _), result in self._found.items() if purpose in SEARCHING)
        earlier = [result for result in found if self._sequences[result.trial_id] < end]
        return sorted(earlier, key=lambda result: self._sequences[result.trial_id])

    def has_arrived(self, candidate: Candidate, place: str, starts: int) -> bool:
        """Say whether a candidate's trials on this machine can be compared with earlier trials. They can if there are
        no earlier trials, if the search has already continued on this machine, or if the candidate had at least
        `starts` runs here since the study moved.
        """
        if self._last_place is None:
            return True
        if self._last_place != place:
            return False
        return self._arrival is None or self._arrival[candidate.key] >= starts

    def begin(self, specs: Sequence[TrialSpec], purposes: Sequence[Purpose], group: str, replicate: int) -> list[Trial]:
        """Write the rows of trials that are about to run, and return them."""
        now = datetime.now(UTC).isoformat()
        trials = [
            Trial(
                trial_id=spec.trial_id,
                study_id=self._study_id,
                sequence=self._next_sequence + number,
                candidate=spec.candidate,
                purpose=purpose,
                group=group,
                replicate=replicate,
                state=TrialState.RUNNING,
                started_at=now,
            )
            for number, (spec, purpose) in enumerate(zip(specs, purposes, strict=True))
        ]
        self._next_sequence += len(trials)
        self._store.begin_trials(trials)
        return trials

    def complete(self, trials: Sequence[Trial], results: Sequence[TrialResult]) -> None:
        """Write the results of a group in one transaction, which completes the group."""
        self._store.complete_trials(results)
        for trial, result in zip(trials, results, strict=True):
            self._remember(trial, result)

    def _remember(self, trial: Trial, result: TrialResult) -> None:
        self.spent_s += result.duration_ns / 1e9
        self.num_trials += 1
        self._raw[result.trial_id] = result
        if result.startup is not None:
            self._compiled.append((result.candidate, result.startup.compile_ns))
        self._note_place(trial, result)
        self._sequences[trial.trial_id] = trial.sequence
        if trial.purpose is Purpose.MOVED:
            self._moved.append(result)
            self.num_moved += 1
        elif trial.purpose is Purpose.COMPANION:
            self._companions[trial.group] = result
        elif not _says_nothing(trial, result):
            self._found[(trial.candidate.key, trial.purpose, trial.replicate)] = result

    def _note_place(self, trial: Trial, result: TrialResult) -> None:
        if self._last_place not in (None, result.place):
            self._arrival, self._came_with = Counter(), trial.group
        if trial.purpose is Purpose.MOVED:
            self._arrival = Counter() if self._arrival is None else self._arrival
            self._arrival[trial.candidate.key] += 1
        elif trial.group != self._came_with:  # else a host was replaced while it ran: nothing was measured again yet
            self._arrival = None
        self._last_place = result.place


def _says_nothing(trial: Trial, result: TrialResult) -> bool:
    """Say whether a baseline failed because of its environment or deadline; a resumed study then measures it again."""
    is_baseline = trial.purpose is Purpose.BASELINE or trial.candidate.is_baseline
    if not is_baseline or result.failure is None:
        return False
    return result.failure.kind is FailureKind.TIMEOUT or repeats_after(result.failure) > 0
