"""The trials of one study between the driver and its store: what is there is never run again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from tuner.protocols import StudyStore
from tuner.records import Candidate, Purpose, Trial, TrialResult, TrialSpec, TrialState


class Ledger:
    """Results by what was asked for, and the rows that are written."""

    def __init__(self, store: StudyStore, study_id: str) -> None:
        self._store = store
        self._study_id = study_id
        store.lose_running_trials(study_id)
        stored = store.trials(study_id)
        self._next_sequence = max((trial.sequence for trial in stored), default=0) + 1
        self._found: dict[tuple[str, Purpose, int], TrialResult] = {}
        self._companions: dict[str, TrialResult] = {}
        self.spent_s = 0.0
        self.num_trials = 0
        for trial in stored:
            if trial.result is not None and trial.state in (TrialState.COMPLETED, TrialState.FAILED):
                self._remember(trial, trial.result)

    def find(self, candidate: Candidate, purpose: Purpose, replicate: int) -> TrialResult | None:
        """The result of this start of this candidate, if it is complete."""
        return self._found.get((candidate.key, purpose, replicate))

    def companion_of(self, result: TrialResult) -> TrialResult | None:
        """The trial that took turns with it for comparison, if one did."""
        return self._companions.get(result.group)

    def begin(self, specs: Sequence[TrialSpec], purposes: Sequence[Purpose], group: str, replicate: int) -> list[Trial]:
        """Writes rows of trials that are about to run."""
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
        """Writes the results of a group in one transaction: then the group is complete."""
        self._store.complete_trials(results)
        for trial, result in zip(trials, results, strict=True):
            self._remember(trial, result)

    def _remember(self, trial: Trial, result: TrialResult) -> None:
        self.spent_s += result.duration_ns / 1e9
        self.num_trials += 1
        if trial.purpose is Purpose.COMPANION:
            self._companions[trial.group] = result
        else:
            self._found[(trial.candidate.key, trial.purpose, trial.replicate)] = result
