"""Interfaces between the engine and its surroundings.

`TrialRunner` runs trials (processes on this machine, a cluster, a known cost surface). `StudyStore` stores studies
(memory, a database). Every implementation passes the contract tests in tests/contracts/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from steptune.tuner.records import (
    Artifact,
    Decision,
    Environment,
    Event,
    HardwareProfile,
    MeasureSettings,
    Purpose,
    Recommendation,
    Record,
    Study,
    StudyState,
    Topology,
    Trial,
    TrialResult,
    TrialSpec,
    WorkloadFacts,
)


class Progress(Record):
    """Progress of a task, shown to a waiting user."""

    trial_id: str
    text: str
    phase: str = ""


ProgressListener = Callable[[Progress], None]


class TrialRunner(Protocol):
    """Runner of the trials of one workload for one study."""

    def describe(self) -> Environment:
        """Return the hardware, its measured peaks and its software."""
        ...

    def measure_topology(self, hardware: HardwareProfile, known: Topology | None, seconds: float) -> Topology | None:
        """Measure the links between the ranks of a trial; None with one rank.

        Args:
            hardware: Hardware profile from `describe`.
            known: Topology from an earlier study, which is checked and returned if it still holds; None to measure
                anew.
            seconds: Time limit for the messages, apart from those that must be sent on a slow link.

        Raises:
            RunnerError: The ranks cannot communicate.
        """
        ...

    def inspect(self, longest_s: float | None = None) -> WorkloadFacts:
        """Inspect the workload and prepare the files that trials share.

        Args:
            longest_s: Seconds after which the inspection is given up.

        Raises:
            BudgetError: The inspection was given up.
            WorkloadError: A piece of the workload is missing or wrong; the message names it.
        """
        ...

    def begin_reference(self, request: Any, longest_s: float) -> None:
        """Begin to make the guard's reference while the next group of trials starts; the group's windows wait until the
        reference is made. `make_reference` with the same request finds this reference, or makes it again if this
        attempt failed.
        """
        ...

    def make_reference(self, request: Any, longest_s: float | None = None) -> None:
        """Make the guard's reference (a `steptune.tuner.trials.reference.ReferenceRequest`).

        Args:
            longest_s: Seconds after which the attempt is given up.

        Raises:
            BudgetError: The attempt was given up.
            BaselineError: The reference configuration cannot be run.
        """
        ...

    def run(
        self,
        specs: Sequence[TrialSpec],
        purposes: Sequence[Purpose],
        settings: MeasureSettings,
        group: str,
        listener: ProgressListener,
    ) -> list[TrialResult]:
        """Run a group of trials at the same time, taking turns in measured windows.

        A crash, a hang or exhausted memory is recorded in the trial's result; the other trials continue.

        Returns:
            One result for each spec, in order.
        """
        ...

    def fits_together(self, peaks_bytes: Sequence[int]) -> bool:
        """Say whether trials with these peak memories fit into memory at the same time, with a margin. Each peak is
        that of the trial's rank that uses the most memory.
        """
        ...

    def close(self) -> None:
        """End every process that the runner started."""
        ...


class StudyStore(Protocol):
    """Store of studies. Each method is one transaction; records are returned as copies.

    A trial is complete when `complete_trials` has returned, and completes once: a second completion is
    refused. Nothing complete is ever changed. Writing to a study that does not exist raises
    StudyNotFoundError; reading from it finds nothing. Only `get_study` accepts a part of an id.
    """

    def create_study(self, study: Study) -> None:
        """Record a new study.

        Raises:
            StoreError: There is a study with this id.
        """
        ...

    def update_study(self, study: Study) -> None:
        """Replace the facts, environment, state and message of a study.

        Raises:
            StudyNotFoundError: There is no such study.
        """
        ...

    def get_study(self, study_id: str) -> Study:
        """Return the study with this id, or the only one whose id begins or ends with it.

        Raises:
            StudyNotFoundError: No study matches, or more than one does.
        """
        ...

    def list_studies(self, limit: int = 50) -> list[Study]:
        """Return the most recent studies, newest first."""
        ...

    def set_state(self, study_id: str, state: StudyState, message: str = "") -> None:
        """Replace the state and message of a study.

        Raises:
            StudyNotFoundError: There is no such study.
        """
        ...

    def begin_trials(self, trials: Sequence[Trial]) -> None:
        """Record trials that are about to run: all of them or, on an error, none.

        Raises:
            StudyNotFoundError: There is no such study.
            StoreError: The id of a trial, or its sequence in its study, is taken.
        """
        ...

    def complete_trials(self, results: Sequence[TrialResult]) -> None:
        """Record the results of a group, each only once: all of them or, on an error, none.

        Raises:
            StoreError: A trial is unknown, already complete, or was given up as lost.
        """
        ...

    def lose_running_trials(self, study_id: str) -> int:
        """Mark as lost the trials that were running when their process died; return the number of them.

        Raises:
            StudyNotFoundError: There is no such study.
        """
        ...

    def trials(self, study_id: str) -> list[Trial]:
        """Return all trials in the order in which they began (their `sequence`)."""
        ...

    def replace_decisions(self, study_id: str, decisions: Sequence[Decision]) -> None:
        """Replace all recorded decisions of a study.

        Raises:
            StudyNotFoundError: There is no such study.
            StoreError: Two decisions have the same `sequence`.
        """
        ...

    def decisions(self, study_id: str) -> list[Decision]:
        """Return the decisions in the order of their `sequence`."""
        ...

    def save_recommendation(
        self,
        recommendation: Recommendation,
        *,
        decisions: Sequence[Decision] | None = None,
        state: StudyState | None = None,
    ) -> None:
        """Record the recommendation of a study; replace an earlier one.

        Args:
            decisions: Decisions that led to it; they replace the recorded ones.
            state: New state of the study. Unless the study already is in this state, the event `recommended` is
                recorded with it, so that an ended study has all of its events.

        Raises:
            StudyNotFoundError: There is no such study.
            StoreError: Two decisions have the same `sequence`.
        """
        ...

    def recommendation(self, study_id: str) -> Recommendation | None:
        """Return the recommendation of a study, if it has one."""
        ...

    def past_recommendations(self, study_id: str, device_kind: str) -> list[tuple[Study, Recommendation]]:
        """Return recommendations that made workloads faster on the same kind of device, with their studies, newest
        first: at most `store_rules.NUM_PAST_STUDIES`.

        Args:
            study_id: Study that learns from them: only studies of its owner count, where a store knows owners.
        """
        ...

    def past_decisions(self, study_id: str, hardware: HardwareProfile) -> list[Decision]:
        """Return decisions with a predicted upper limit and a measured gain, from finished studies on this kind of
        device, to compare predictions with measurements. The newest study comes first; the decisions of a study are in
        the order of its search. The result has at most `store_rules.NUM_PAST_STUDIES` studies and
        `store_rules.NUM_PAST_DECISIONS` decisions.

        Args:
            study_id: Study that learns from them: only studies of its owner count, where a store knows owners.
        """
        ...

    def save_topology(self, topology: Topology) -> None:
        """Record the links between ranks; replace an earlier measurement on this hardware with the same placement of
        ranks.
        """
        ...

    def topology(self, hardware: HardwareProfile, num_ranks: int, num_hosts: int) -> Topology | None:
        """Return the latest measured links for this hardware, number of ranks and number of hosts."""
        ...

    def add_event(self, study_id: str, kind: str, data: dict[str, Any]) -> None:
        """Append an event to a study.

        Raises:
            StudyNotFoundError: There is no such study.
        """
        ...

    def events(self, study_id: str, after: int = 0) -> list[Event]:
        """Return the events of a study whose `sequence` is above `after`, in order.

        Sequences grow over all studies of a store and are never used again, so a reader that
        remembers the last one misses nothing.
        """
        ...

    def add_artifact(self, study_id: str, trial_id: str | None, kind: str, digest: str, size_bytes: int) -> None:
        """Record that a file belongs to a study or to one of its trials; repeated calls record it once.

        Args:
            trial_id: None for a file of the whole study.
            kind: Kind of file ("trace", "timeline", ...).
            digest: SHA-256 of the file, under which an artifact directory keeps the file.

        Raises:
            StudyNotFoundError: There is no such study.
            StoreError: There is no such trial.
        """
        ...

    def artifacts(self, study_id: str) -> list[Artifact]:
        """Return the files of a study and its trials, in the order in which they were recorded."""
        ...
