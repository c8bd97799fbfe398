"""Running, diagnosis and storage of groups of trials that are alive at the same time and take turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec

from steptune.tuner.profiling.compile_findings import diagnose_compilation
from steptune.tuner.profiling.diagnosis import diagnose
from steptune.tuner.profiling.evidence import Evidence
from steptune.tuner.protocols import StudyStore, TrialRunner
from steptune.tuner.records import (
    Attempt,
    Candidate,
    Failure,
    FailureKind,
    MeasureSettings,
    Phase,
    Purpose,
    TrialResult,
    TrialSpec,
    new_id,
)
from steptune.tuner.search.knowledge import Knowledge
from steptune.tuner.search.ledger import Ledger
from steptune.tuner.search.preparation import Prepared
from steptune.tuner.search.starts import usual_start_s
from steptune.tuner.search.view import StudyView
from steptune.tuner.strategies.situations import situation_of

UNSEEN = 1.3
"""Memory assumed for a candidate that was never measured, as a multiple of the largest known peak in its group."""
MIN_TURN_S = 3.0
"""Maximum start-up time, in seconds, for which a companion trial is always worth running."""


class GroupRunner:
    """Runner of one study's groups of trials.

    Args:
        knowledge: Knowledge of the search, for start times and memory peaks of candidates.
        before_trials: Called before trials begin; may raise `StudyInterrupt`.
        place: Returns the current place: the machine, and its devices in use.
    """

    def __init__(
        self,
        prepared: Prepared,
        knowledge: Knowledge,
        *,
        store: StudyStore,
        runner: TrialRunner,
        ledger: Ledger,
        view: StudyView,
        before_trials: Callable[[], None],
        place: Callable[[], str],
    ) -> None:
        self.measure: MeasureSettings = prepared.measure()
        """Window settings of further trials."""
        self.specs = prepared.specs()
        self._study_id = prepared.study.study_id
        self._space = prepared.space
        self._knowledge = knowledge
        self._store = store
        self._runner = runner
        self._ledger = ledger
        self._view = view
        self._before_trials = before_trials
        self._place = place
        self._crowds: set[frozenset[str]] = set()
        """Sets of candidate keys that ran out of memory together."""
        self._crowded_bytes = math.inf
        """Smallest sum of the peaks of trials that ran out of memory together."""

    def run(
        self,
        candidates: Sequence[Candidate],
        purposes: Sequence[Purpose],
        replicate: int,
        longest_s: float | None = None,
    ) -> list[TrialResult]:
        """Run candidates in turns and store their results; no phase takes longer than `longest_s`.

        A candidate that runs out of memory beside another trial runs once more, alone.
        """
        self._before_trials()
        specs = [self.specs.spec(c, p, replicate, longest_s) for c, p in zip(candidates, purposes, strict=True)]
        group = new_id()
        trials = self._ledger.begin(specs, purposes, group, replicate)
        began = {"group": group, "trials": [spec.trial_id for spec in specs]}
        self._store.add_event(self._study_id, "trials_began", began)
        began_at = datetime.now(UTC).isoformat()
        results = self._run(specs, purposes, group)
        if len(results) > 1 and any(result.ran_out_of_memory for result in results):
            results = self._repeat_alone(specs, results, began_at)
        results = [self._diagnosed(result, spec) for result, spec in zip(results, specs, strict=True)]
        self._ledger.complete(trials, results)
        outcomes = {r.trial_id: r.failure.kind.value if r.failure else "completed" for r in results}
        self._store.add_event(self._study_id, "trials_ended", {"group": group, "outcomes": outcomes})
        return results

    def _run(self, specs: Sequence[TrialSpec], purposes: Sequence[Purpose], group: str) -> list[TrialResult]:
        """Run trials in turns, and record an event for each repeated one."""
        results = self._runner.run(specs, purposes, self.measure, group, self._view.on_progress)
        for result in results:
            for attempt in result.repeated:
                self._note_repeated(result, attempt)
        return results

    def _repeat_alone(
        self, specs: Sequence[TrialSpec], results: Sequence[TrialResult], began_at: str
    ) -> list[TrialResult]:
        """Run again, one at a time, the trials of a group that ran out of memory or were not measured because another
        trial ran out of memory.

        A companion is not repeated: it is useful only beside its trial.
        """
        repeated = []
        for spec, result in zip(specs, results, strict=True):
            unmeasured = result.ran_out_of_memory or (result.failure is None and not result.clean_windows)
            if unmeasured and result.purpose is not Purpose.COMPANION:
                result = self._alone(spec, result, len(specs) - 1, began_at)
            repeated.append(result)
        self._note_crowd([result.candidate for result in results], repeated)
        return repeated

    def _alone(self, spec: TrialSpec, before: TrialResult, num_beside: int, began_at: str) -> TrialResult:
        """Run one trial of a group once more, in a group of its own."""
        self._before_trials()
        attempt = Attempt(failure=_beside(before, num_beside), began_at=began_at, duration_ns=before.duration_ns)
        self._note_repeated(before, attempt)
        (result,) = self._run([spec], [before.purpose], new_id())
        return msgspec.structs.replace(result, repeated=(*before.repeated, attempt, *result.repeated))

    def _note_repeated(self, result: TrialResult, attempt: Attempt) -> None:
        failure = attempt.failure
        self._store.add_event(
            self._study_id,
            "trial_repeated",
            {"trial": result.trial_id, "candidate": result.candidate.label, "reason": failure.message},
        )

    # --- memory -------------------------------------------------------------------------------

    def together(self, candidates: Sequence[Candidate]) -> list[list[Candidate]]:
        """Divide candidates into groups that are measured at the same time: a single group if all are known to fit into
        memory together, else one group for each candidate.
        """
        return [list(candidates)] if self._fit_together(candidates) else [[candidate] for candidate in candidates]

    def takes_turns(self, candidate: Candidate, companion: Candidate) -> bool:
        """Say whether both candidates are expected to fit into memory, and the companion starts fast enough to be worth
        a run.
        """
        usual_s = usual_start_s(self._knowledge.results.get(companion.key, []))
        return usual_s <= max(MIN_TURN_S, 2 * self.measure.cap_s) and self._fit_together([companion, candidate])

    def _fit_together(self, candidates: Sequence[Candidate]) -> bool:
        """Say whether trials fit into memory together, by measured or estimated peaks; False if no peak is known."""
        if not candidates or frozenset(c.key for c in candidates) in self._crowds:
            return False
        known = [self._knowledge.likely_peak_bytes(candidate) for candidate in candidates]
        largest = max((peak for peak in known if peak is not None), default=None)
        if largest is None:
            return False
        peaks = [
            peak if peak is not None and self._was_measured(candidate) else UNSEEN * max(largest, peak or 0.0)
            for candidate, peak in zip(candidates, known, strict=True)
        ]
        return sum(peaks) < self._crowded_bytes and self._runner.fits_together([int(peak) for peak in peaks])

    def _was_measured(self, candidate: Candidate) -> bool:
        return any(result.peak_memory_bytes for result in self._knowledge.results.get(candidate.key, []))

    def _note_crowd(self, candidates: Sequence[Candidate], results: Sequence[TrialResult]) -> None:
        """Record a combination of candidates that ran out of memory together, so that larger combinations are not
        tried.
        """
        self._crowds.add(frozenset(candidate.key for candidate in candidates))
        peaks = {r.candidate.key: r.peak_memory_bytes for r in results if r.peak_memory_bytes}
        known = [peaks.get(c.key) or self._knowledge.likely_peak_bytes(c) for c in candidates]
        if None not in known:
            self._crowded_bytes = min(self._crowded_bytes, sum(peak for peak in known if peak is not None))

    def _diagnosed(self, result: TrialResult, spec: TrialSpec) -> TrialResult:
        """Return the result with its place and the findings of its profile. A workload error in a candidate's trial
        becomes `unsupported`: the candidate caused it, because the reference ran.
        """
        failure = result.failure
        if failure is not None and failure.kind is FailureKind.WORKLOAD_ERROR and not spec.candidate.is_baseline:
            failure = msgspec.structs.replace(failure, kind=FailureKind.UNSUPPORTED)
        situation = situation_of(result, self._space.workload, self._space.environment, spec.choices)
        profiled = diagnose(Evidence(situation=situation)) if situation is not None else ()
        findings = (*profiled, *diagnose_compilation(result.compilation))
        return msgspec.structs.replace(result, failure=failure, findings=findings, place=self._place())


def _beside(result: TrialResult, num_beside: int) -> Failure:
    """Return the reason, for the record, why a trial of a group is repeated alone."""
    others = "another trial was" if num_beside == 1 else f"{num_beside} other trials were"
    if result.failure is None:
        return Failure(
            kind=FailureKind.OUT_OF_MEMORY,
            phase=Phase.MEASURE,
            message=f"nothing was measured, because memory ran out while {others} running; the trial is repeated alone",
        )
    message = f"{result.failure.message}; {others} running, so the trial is repeated alone"
    return msgspec.structs.replace(result.failure, message=message)
