"""A `StudyStore` in memory, whose contents are lost when the process ends.

It serves searches without a database, and tests; it passes the same contract tests as the database.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace

from steptune.tuner import store_rules
from steptune.tuner.records import (
    Artifact,
    Decision,
    Event,
    HardwareProfile,
    Recommendation,
    Study,
    StudyState,
    Topology,
    Trial,
    TrialResult,
    TrialState,
    Verdict,
)
from steptune.tuner.store_rules import copy_of, number, parse_time


class MemoryStudyStore:
    """Store that keeps copies of records; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._studies: dict[str, Study] = {}
        self._trials: dict[str, Trial] = {}
        self._decisions: dict[str, list[Decision]] = {}
        self._recommendations: dict[str, Recommendation] = {}
        self._events: list[Event] = []
        self._artifacts: list[Artifact] = []
        self._topologies: dict[tuple[str, tuple[int, ...]], Topology] = {}

    def create_study(self, study: Study) -> None:
        with self._lock:
            if study.study_id in self._studies:
                raise store_rules.study_repeated(study.study_id)
            parse_time(study.created_at)
            self._studies[study.study_id] = copy_of(study)

    def update_study(self, study: Study) -> None:
        with self._lock:
            self._studies[study.study_id] = replace(
                self._study(study.study_id),
                facts=None if study.facts is None else copy_of(study.facts),
                environment=None if study.environment is None else copy_of(study.environment),
                state=study.state,
                message=study.message,
            )

    def set_budget(self, study_id: str, budget_s: float) -> Study:
        """Change the budget of a study, as the store in a database does."""
        with self._lock:
            study = self._study(study_id)
            study = self._studies[study_id] = replace(study, settings=replace(study.settings, budget_s=budget_s))
            self._append_event(study_id, store_rules.BUDGET_CHANGED, {"budget_s": budget_s})
            return copy_of(study)

    def get_study(self, study_id: str) -> Study:
        with self._lock:
            if study_id not in self._studies:
                matches = [known for known in self._studies if store_rules.fits(known, study_id)]
                study_id = store_rules.only_match(study_id, matches, [study.study_id for study in self._newest()])
            return copy_of(self._studies[study_id])

    def list_studies(self, limit: int = 50) -> list[Study]:
        with self._lock:
            return [copy_of(study) for study in self._newest()[:limit]]

    def set_state(self, study_id: str, state: StudyState, message: str = "") -> None:
        with self._lock:
            self._studies[study_id] = replace(self._study(study_id), state=state, message=message)

    def begin_trials(self, trials: Sequence[Trial]) -> None:
        with self._lock:
            begun = dict(self._trials)
            for trial in trials:
                store_rules.check_begins(trial)
                self._study(trial.study_id)
                numbers = {other.sequence for other in begun.values() if other.study_id == trial.study_id}
                if trial.trial_id in begun or trial.sequence in numbers:
                    raise store_rules.trial_repeated(trial)
                parse_time(trial.started_at)
                begun[trial.trial_id] = copy_of(trial)
            self._trials = begun

    def complete_trials(self, results: Sequence[TrialResult]) -> None:
        with self._lock:
            completed = dict(self._trials)
            for result in results:
                trial = completed.get(result.trial_id)
                if trial is None or trial.state is not TrialState.RUNNING:
                    raise store_rules.completion_refused(result.trial_id, trial.state if trial else None)
                state = store_rules.state_after(result)
                attempts = trial.attempts + len(result.repeated)
                completed[result.trial_id] = replace(trial, state=state, attempts=attempts, result=copy_of(result))
            self._trials = completed

    def lose_running_trials(self, study_id: str) -> int:
        with self._lock:
            self._study(study_id)
            running = [trial for trial in self._of_study(study_id) if trial.state is TrialState.RUNNING]
            for trial in running:
                self._trials[trial.trial_id] = replace(trial, state=TrialState.LOST)
            return len(running)

    def trials(self, study_id: str) -> list[Trial]:
        with self._lock:
            return [copy_of(trial) for trial in self._of_study(study_id)]

    def replace_decisions(self, study_id: str, decisions: Sequence[Decision]) -> None:
        with self._lock:
            self._study(study_id)
            self._decisions[study_id] = [copy_of(decision) for decision in store_rules.in_order(decisions)]

    def decisions(self, study_id: str) -> list[Decision]:
        with self._lock:
            return [copy_of(decision) for decision in self._decisions.get(study_id, [])]

    def save_recommendation(
        self,
        recommendation: Recommendation,
        *,
        decisions: Sequence[Decision] | None = None,
        state: StudyState | None = None,
    ) -> None:
        study_id = recommendation.study_id
        ordered = None if decisions is None else [copy_of(one) for one in store_rules.in_order(decisions)]
        with self._lock:
            study = self._study(study_id)
            parse_time(recommendation.created_at)
            self._recommendations[study_id] = copy_of(recommendation)
            if ordered is not None:
                self._decisions[study_id] = ordered
            if state is not None and (study.state, study.message) != (state, ""):
                self._studies[study_id] = replace(study, state=state, message="")
                self._append_event(study_id, *store_rules.recommended(recommendation))

    def recommendation(self, study_id: str) -> Recommendation | None:
        with self._lock:
            found = self._recommendations.get(study_id)
            return None if found is None else copy_of(found)

    def past_recommendations(self, study_id: str, device_kind: str) -> list[tuple[Study, Recommendation]]:
        with self._lock:
            found = [
                (copy_of(study), copy_of(past))
                for study in self._newest()
                if (past := self._recommendations.get(study.study_id)) is not None
                and past.hardware.device_kind == device_kind
                and past.verdict is Verdict.FASTER
            ]
        return found[: store_rules.NUM_PAST_STUDIES]

    def past_decisions(self, study_id: str, hardware: HardwareProfile) -> list[Decision]:
        with self._lock:
            alike = [
                study
                for study in self._newest()
                if study.state is StudyState.COMPLETED
                and study.environment is not None
                and study.environment.hardware.device_kind == hardware.device_kind
            ]
            found = [
                copy_of(decision)
                for study in alike[: store_rules.NUM_PAST_STUDIES]
                for decision in self._decisions.get(study.study_id, [])
                if number(decision.predicted_bound) is not None and number(decision.measured_gain) is not None
            ]
        return found[: store_rules.NUM_PAST_DECISIONS]

    def save_topology(self, topology: Topology) -> None:
        with self._lock:
            parse_time(topology.measured_at)
            self._topologies[topology.hardware_fingerprint, topology.host_of_rank] = copy_of(topology)

    def topology(self, hardware: HardwareProfile, num_ranks: int, num_hosts: int) -> Topology | None:
        wanted = (hardware.fingerprint, num_ranks, num_hosts)
        with self._lock:
            found = [
                topology
                for topology in self._topologies.values()
                if (topology.hardware_fingerprint, topology.num_ranks, topology.num_hosts) == wanted
            ]
            newest = max(found, key=lambda topology: parse_time(topology.measured_at), default=None)
            return None if newest is None else copy_of(newest)

    def add_event(self, study_id: str, kind: str, data: dict[str, Any]) -> None:
        with self._lock:
            self._study(study_id)
            self._append_event(study_id, kind, data)

    def events(self, study_id: str, after: int = 0) -> list[Event]:
        with self._lock:
            later = self._events[max(0, after) :]
            return [copy_of(event) for event in later if event.study_id == study_id]

    def add_artifact(self, study_id: str, trial_id: str | None, kind: str, digest: str, size_bytes: int) -> None:
        with self._lock:
            self._study(study_id)
            trial = self._trials.get(trial_id) if trial_id is not None else None
            if trial_id is not None and (trial is None or trial.study_id != study_id):
                raise store_rules.unknown_trial(trial_id)
            wanted = (study_id, trial_id, kind, digest)
            if any((a.study_id, a.trial_id, a.kind, a.digest) == wanted for a in self._artifacts):
                return
            self._artifacts.append(
                Artifact(
                    study_id=study_id,
                    trial_id=trial_id,
                    kind=kind,
                    digest=digest,
                    size_bytes=size_bytes,
                    created_at=_now(),
                )
            )

    def artifacts(self, study_id: str) -> list[Artifact]:
        with self._lock:
            return [copy_of(artifact) for artifact in self._artifacts if artifact.study_id == study_id]

    def _study(self, study_id: str) -> Study:
        if study_id not in self._studies:
            raise store_rules.unknown_study(study_id)
        return self._studies[study_id]

    def _append_event(self, study_id: str, kind: str, data: dict[str, Any]) -> None:
        event = Event(sequence=len(self._events) + 1, study_id=study_id, at=_now(), kind=kind, data=data)
        self._events.append(copy_of(event))

    def _newest(self) -> list[Study]:
        return sorted(
            self._studies.values(), key=lambda study: (parse_time(study.created_at), study.study_id), reverse=True
        )

    def _of_study(self, study_id: str) -> list[Trial]:
        return sorted(
            (trial for trial in self._trials.values() if trial.study_id == study_id), key=lambda trial: trial.sequence
        )


def _now() -> str:
    return datetime.now(UTC).isoformat()
