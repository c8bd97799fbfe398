"""Groups of trials that live at the same time and take turns: run, diagnosed, stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from steptune.tuner.profiling.bounds import situation_of
from steptune.tuner.profiling.compile_findings import diagnose_compilation
from steptune.tuner.profiling.diagnosis import Evidence, diagnose
from steptune.tuner.protocols import StudyStore, TrialRunner
from steptune.tuner.records import Candidate, FailureKind, MeasureSettings, Purpose, TrialResult, TrialSpec, new_id
from steptune.tuner.search.knowledge import Knowledge
from steptune.tuner.search.ledger import Ledger
from steptune.tuner.search.preparation import Prepared
from steptune.tuner.search.starts import usual_start_s
from steptune.tuner.search.view import StudyView

MIN_TURN_S = 3.0
"""A companion that starts within this time is always worth its start."""


class GroupRunner:
    """Runs groups of trials of one study.

    Args:
        knowledge: Of the search: what trials of each candidate took so far.
        before_trials: Called before trials begin; may raise `StudyInterrupt`.
        place: Which machine and devices of it this is.
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
        place: str,
    ) -> None:
        self.measure: MeasureSettings = prepared.measure()
        """Windows of the trials to come."""
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

    def run(
        self,
        candidates: Sequence[Candidate],
        purposes: Sequence[Purpose],
        replicate: int,
        longest_s: float | None = None,
    ) -> list[TrialResult]:
        """Runs candidates in turns and stores their results; no phase takes longer than `longest_s`."""
        self._before_trials()
        specs = [self.specs.spec(c, p, replicate, longest_s) for c, p in zip(candidates, purposes, strict=True)]
        group = new_id()
        trials = self._ledger.begin(specs, purposes, group, replicate)
        began = {"group": group, "trials": [spec.trial_id for spec in specs]}
        self._store.add_event(self._study_id, "trials_began", began)
        results = self._runner.run(specs, purposes, self.measure, group, self._view.on_progress)
        results = [
            msgspec.structs.replace(self._diagnosed(result, spec), place=self._place)
            for result, spec in zip(results, specs, strict=True)
        ]
        self._ledger.complete(trials, results)
        outcomes = {r.trial_id: r.failure.kind.value if r.failure else "completed" for r in results}
        self._store.add_event(self._study_id, "trials_ended", {"group": group, "outcomes": outcomes})
        return results

    def together(self, candidates: Sequence[Candidate]) -> list[list[Candidate]]:
        """What is measured at the same time: all in turns where they fit together, else one by one."""
        fit = bool(candidates) and self._runner.fits_together([self._peak_bytes(c, unknown=0) for c in candidates])
        return [list(candidates)] if fit else [[candidate] for candidate in candidates]

    def takes_turns(self, candidate: Candidate, companion: Candidate) -> bool:
        """Whether both fit together, and starting the companion again costs no more than it is worth."""
        theirs = self._knowledge.results.get(companion.key, [])
        if not theirs:
            return self._runner.fits_together([0, 0])
        peak = self._peak_bytes(companion, unknown=0)
        own = self._peak_bytes(candidate, unknown=int(1.3 * peak))
        cheap = usual_start_s(theirs) <= max(MIN_TURN_S, 2 * self.measure.cap_s)
        return cheap and self._runner.fits_together([own, peak])

    def _peak_bytes(self, candidate: Candidate, *, unknown: int) -> int:
        results = self._knowledge.results.get(candidate.key, [])
        return max((result.peak_memory_bytes for result in results), default=unknown)

    def _diagnosed(self, result: TrialResult, spec: TrialSpec) -> TrialResult:
        """With the findings of its profile; an error of the workload under a candidate is the candidate's,
        because the reference ran.
        """
        failure = result.failure
        if failure is not None and failure.kind is FailureKind.WORKLOAD_ERROR and not spec.candidate.is_baseline:
            failure = msgspec.structs.replace(failure, kind=FailureKind.UNSUPPORTED)
            result = msgspec.structs.replace(result, failure=failure)
        situation = situation_of(result, self._space.workload, self._space.environment, spec.choices)
        profiled = diagnose(Evidence(situation=situation)) if situation is not None else ()
        return msgspec.structs.replace(result, findings=(*profiled, *diagnose_compilation(result.compilation)))
