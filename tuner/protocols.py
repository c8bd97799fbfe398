"""The interfaces between the engine and what surrounds it.

`TrialRunner`: something that runs trials (processes on this machine, a cluster, a known cost surface).
`StudyStore`: something that remembers studies (memory, a database). Every implementation passes the
contract tests in tests/contracts/.
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
    """Progress for a person who waits."""

    trial_id: str
    text: str
    phase: str = ""


ProgressListener = Callable[[Progress], None]


class TrialRunner(Protocol):
    """Runs trials of one workload for one study."""

    def describe(self) -> Environment:
        """The hardware, its ceilings and its software."""
        ...

    def measure_topology(self, hardware: HardwareProfile, known: Topology | None, seconds: float) -> Topology | None:
        """The links between the ranks of a trial; None with one rank.

        Args:
            hardware: As `describe` said.
            known: What an earlier study measured: it is checked, and given back where it still holds. None to measure
                anew.
            seconds: That the messages may take, apart from those that must be sent on a slow link.

        Raises:
            RunnerError: The ranks cannot communicate.
        """
        ...

    def inspect(self, longest_s: float | None = None) -> WorkloadFacts:
        """Looks at the workload and prepares the files that trials share.

        Args:
            longest_s: Seconds after which it is given up.

        Raises:
            BudgetError: It was given up.
            WorkloadError: Names what is missing or wrong.
        """
        ...

    def begin_reference(self, request: Any, longest_s: float) -> None:
        """Begin to make the guard's reference while the next group starts. Its windows wait for the end, and
        `make_reference` of the same request finds it made; where that failed, it makes it again.
        """
        ...

    def make_reference(self, request: Any, longest_s: float | None = None) -> None:
        """Make the guard's reference (a `steptune.tuner.trials.reference.ReferenceRequest`).

        Args:
            longest_s: Seconds after which it is given up.

        Raises:
            BudgetError: It was given up.
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
        """Run a group of trials that live at the same time and take turns in measured windows.

        Whatever a trial does (crash, hang, exhaust memory), its result says so; the others go on.

        Returns:
            One result for each spec, in order.
        """
        ...

    def fits_together(self, peaks_bytes: Sequence[int]) -> bool:
        """Say whether trials of these peak memories can live at the same time, with a margin."""
        ...

    def close(self) -> None:
        """End every process that the runner started."""
        ...


class StudyStore(Protocol):
    """Remembers studies. Each method is one transaction; records are returned as copies.

    A trial is complete when `complete_trials` has returned, and completes once: a second completion is
    refused. Nothing complete is ever changed. Writing to a study that does not exist raises
    StudyNotFoundError; reading from it finds nothing. Only `get_study` takes a part of an id.
    """

    def create_study(self, study: Study) -> None:
        """Record a new study.

        Raises:
            StoreError: There is a study with this id.
        """
        ...

    def update_study(self, study: Study) -> None:
        """Replace facts, environment, state and message.

        Raises:
            StudyNotFoundError: There is no such study.
        """
        ...

    def get_study(self, study_id: str) -> Study:
        """The study with this id, or the only one whose id begins or ends with it.

        Raises:
            StudyNotFoundError: There is none, or more than one.
        """
        ...

    def list_studies(self, limit: int = 50) -> list[Study]:
        """The newest first."""
        ...

    def set_state(self, study_id: str, state: StudyState, message: str = "") -> None:
        """Replace state and message.

        Raises:
            StudyNotFoundError: There is no such study.
        """
        ...

    def begin_trials(self, trials: Sequence[Trial]) -> None:
        """Records trials that are about to run: all of them or, on an error, none.

        Raises:
            StudyNotFoundError: There is no such study.
            StoreError: The id of a trial, or its sequence in its study, is taken.
        """
        ...

    def complete_trials(self, results: Sequence[TrialResult]) -> None:
        """Record the results of a group, once: all of them or, on an error, none.

        Raises:
            StoreError: A trial is unknown, already complete, or was given up as lost.
        """
        ...

    def lose_running_trials(self, study_id: str) -> int:
        """Marks trials that were running when their process died; returns how many.

        Raises:
            StudyNotFoundError: There is no such study.
        """
        ...

    def trials(self, study_id: str) -> list[Trial]:
        """All trials in the order in which they began (their `sequence`)."""
        ...

    def replace_decisions(self, study_id: str, decisions: Sequence[Decision]) -> None:
        """The story of the search so far; replaces what was there.

        Raises:
            StudyNotFoundError: There is no such study.
            StoreError: Two decisions have the same `sequence`.
        """
        ...

    def decisions(self, study_id: str) -> list[Decision]:
        """Decisions in the order of their `sequence`."""
        ...

    def save_recommendation(
        self,
        recommendation: Recommendation,
        *,
        decisions: Sequence[Decision] | None = None,
        state: StudyState | None = None,
    ) -> None:
        """Record the answer of a study; replace an earlier one.

        Args:
            decisions: The story that led to it; replaces what was there.
            state: The study's from now on. With it comes the event `recommended`, unless the study is in it already:
                whoever sees the study ended finds all of its events.

        Raises:
            StudyNotFoundError: There is no such study.
            StoreError: Two decisions have the same `sequence`.
        """
        ...

    def recommendation(self, study_id: str) -> Recommendation | None:
        """The answer of a study, if it has one."""
        ...

    def past_recommendations(self, study_id: str, device_kind: str) -> list[tuple[Study, Recommendation]]:
        """Recommendations that made workloads faster on the same kind of device, with their studies, newest first: at
        most `store_rules.NUM_PAST_STUDIES`.

        Args:
            study_id: That shall learn from them: only studies of its owner count, where a store knows owners.
        """
        ...

    def past_decisions(self, study_id: str, hardware: HardwareProfile) -> list[Decision]:
        """Decisions with a predicted bound and a measured gain, of finished studies on this kind of
        device: what bounds were worth. The newest study first, each in the order of its search; of at most
        `store_rules.NUM_PAST_STUDIES`, and at most `store_rules.NUM_PAST_DECISIONS`.

        Args:
            study_id: That shall learn from them: only studies of its owner count, where a store knows owners.
        """
        ...

    def save_topology(self, topology: Topology) -> None:
        """Record the links between ranks; replace what was measured before on this hardware with ranks so placed."""
        ...

    def topology(self, hardware: HardwareProfile, num_ranks: int, num_hosts: int) -> Topology | None:
        """The links between so many ranks on so many hosts of this hardware, as they were measured last."""
        ...

    def add_event(self, study_id: str, kind: str, data: dict[str, Any]) -> None:
        """Append to what happened in a study.

        Raises:
            StudyNotFoundError: There is no such study.
        """
        ...

    def events(self, study_id: str, after: int = 0) -> list[Event]:
        """Events of a study whose `sequence` is above `after`, in order.

        Sequences grow over all studies of a store and are never used again, so a reader that
        remembers the last one misses nothing.
        """
        ...

    def add_artifact(self, study_id: str, trial_id: str | None, kind: str, digest: str, size_bytes: int) -> None:
        """Record that a file belongs to a study or to one of its trials; once, however often it is said.

        Args:
            trial_id: None for a file of the whole study.
            kind: What it is ("trace", "timeline", ...).
            digest: Its SHA-256, under which an artifact directory keeps it.

        Raises:
            StudyNotFoundError: There is no such study.
            StoreError: There is no such trial.
        """
        ...

    def artifacts(self, study_id: str) -> list[Artifact]:
        """The files of a study and its trials, in the order in which they were recorded."""
        ...
