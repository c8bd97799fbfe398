"""Trials of an unmodified script with a candidate's changes. Each trial continues from a frozen copy of the script's
process, or starts the script's command again.

The command runs in a copy-on-write view of its folder, armed as in an inspection. The script is not parsed: the
inspection has recorded where the changes are made. Trials run one after another; the command of a launcher starts all
ranks.
"""

from __future__ import annotations

import functools
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from steptune.tuner.profiling.lanes import FULL_CELLS
from steptune.tuner.protocols import Progress, ProgressListener
from steptune.tuner.records import (
    Attempt,
    Breakdown,
    Environment,
    FailureKind,
    HardwareProfile,
    MeasureSettings,
    MemoryPeak,
    Phase,
    Purpose,
    Startup,
    Topology,
    TrialResult,
    TrialSpec,
    WorkloadFacts,
)
from steptune.tuner.scripts.failures import failure_of
from steptune.tuner.scripts.guard import ScriptGuard
from steptune.tuner.scripts.launch import Ended
from steptune.tuner.scripts.load_watch import LoadWatch
from steptune.tuner.scripts.look import Look
from steptune.tuner.scripts.machine import described
from steptune.tuner.scripts.starts import ScriptStarts, Start
from steptune.tuner.scripts.traces import analyse_script
from steptune.tuner.scripts.trial_records import effects_of, measure_settings, phases_of, read_record, windows_of
from steptune.tuner.strategies import STRATEGIES, Strategy
from steptune.tuner.strategies.api import Outside, Way
from steptune.tuner.strategies.in_scripts import outside_of
from steptune.tuner.trials.analysis_files import keep_analysis
from steptune.tuner.trials.study_files import StudyFiles

FAULTS_OF_COPIES = (FailureKind.WORKLOAD_ERROR, FailureKind.TIMEOUT)
"""Failures after which a trial from a frozen copy is repeated by starting the command, because the script's files or
threads may not work in a copy.
"""
LEAST_WINDOWS = 2
"""Minimum number of timed windows for a trial to count although the script ended before the trial was complete."""
NUM_LOSSES = 100
"""Number of first backward passes whose losses a verification compares."""


class ScriptRunner:
    """`TrialRunner` whose trials are runs of a command.

    Args:
        look: Inspection of the command.
        directory: Directory of the study.
        variables: Environment variables of every run.
        check: Called several times a second during a run; an exception from it ends the run.
    """

    def __init__(
        self,
        look: Look,
        directory: Path,
        *,
        seed: int = 0,
        strategies: Sequence[Strategy] = STRATEGIES,
        variables: Mapping[str, str] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._look = look
        self._files = StudyFiles(directory)
        self._strategies = strategies
        self.starts = ScriptStarts(look, seed=seed, variables=variables, check=check)
        self._guard = ScriptGuard(self.starts, self._files, self.describe)
        self._fastest_ns: dict[bool, float] = {}
        """Shortest mean step time of successful trials, separately for trials that started the command and trials that
        continued from a frozen copy of its process.
        """

    # --- looking --------------------------------------------------------------------------------

    def describe(self) -> Environment:
        return self._environment

    @functools.cached_property
    def _environment(self) -> Environment:
        self._files.directory.mkdir(parents=True, exist_ok=True)
        self._files.make_folders()
        record = self._look.record
        found = described(record.device, self._files.directory, record.num_ranks)
        versions = {**found.hardware.versions, "torch": record.torch, "python": record.python}
        return msgspec.structs.replace(found, hardware=msgspec.structs.replace(found.hardware, versions=versions))

    def measure_topology(self, hardware: HardwareProfile, known: Topology | None, seconds: float) -> Topology | None:
        return None

    def inspect(self, longest_s: float | None = None) -> WorkloadFacts:
        return self._look.facts

    # --- the guard's reference ------------------------------------------------------------------

    def begin_reference(self, request: Any, longest_s: float) -> None:
        """Do nothing: runs of the reference would disturb the trial that runs at the same time."""

    def make_reference(self, request: Any, longest_s: float | None = None) -> None:
        self._guard.make_reference(request, longest_s)

    # --- trials ---------------------------------------------------------------------------------

    def run(
        self,
        specs: Sequence[TrialSpec],
        purposes: Sequence[Purpose],
        settings: MeasureSettings,
        group: str,
        listener: ProgressListener,
    ) -> list[TrialResult]:
        return [
            self._run(spec, purpose, settings, group, listener) for spec, purpose in zip(specs, purposes, strict=True)
        ]

    def fits_together(self, peaks_bytes: Sequence[int]) -> bool:
        return False

    def close(self) -> None:
        """End the frozen copy of the process from which trials continue, and the process that judges candidates."""
        self._guard.close()
        self._look.close()

    def _run(
        self,
        spec: TrialSpec,
        purpose: Purpose,
        settings: MeasureSettings,
        group: str,
        listener: ProgressListener,
        *,
        is_again: bool = False,
    ) -> TrialResult:
        """Run a trial.

        Args:
            is_again: Whether the trial failed from the frozen copy, perhaps because of its guarded steps.
        """
        listener(Progress(trial_id=spec.trial_id, text=f"{spec.candidate.label}: starting the script", phase="build"))
        applied = outside_of(spec.candidate, spec.choices, self._look.script, self._strategies)
        changes = {name: value for outside in applied.values() for name, value in outside.changes.items()}
        anew = self._starts_anew(spec, purpose, applied)
        is_first = purpose is Purpose.BASELINE and not is_again
        compiles = bool(changes.get("compile"))
        guard = self._guard.steps_of(spec, begins_reference=not anew or is_first, compiles=compiles)
        measure = measure_settings(spec, settings)
        if spec.candidate.is_baseline and not anew:
            measure["profile"] = False  # the look has recorded its steps
        trial = self.starts.task(changes, guard, measure)
        way = Start(command=self._look.command, variables=spec.environment_variables, anew=anew)
        began = datetime.now(UTC).isoformat()
        result = self._timed(spec, purpose, settings, group, trial, way, applied)[0]
        failure = result.failure
        if failure is not None and failure.signal is not None and measure["profile"]:
            # The profiler of a GPU can crash where training does not.
            listener(Progress(trial_id=spec.trial_id, text=f"{failure.message}; repeating without a profile"))
            unprofiled = msgspec.structs.replace(spec, profile=False)
            again = self._run(unprofiled, purpose, settings, group, listener, is_again=is_again)
            attempt = Attempt(failure=failure, began_at=began, duration_ns=result.duration_ns)
            return msgspec.structs.replace(again, repeated=(attempt, *again.repeated))
        if result.interpreter == "forked" and result.failure is not None and result.failure.kind in FAULTS_OF_COPIES:
            again = self._run_anew(spec, purpose, settings, group, listener)
            if again.failure is None:
                self.starts.lose_copy(result.failure.message)
            return again
        if result.ok and spec.candidate.is_baseline:
            self._guard.peak_bytes = max(self._guard.peak_bytes, result.peak_memory_bytes)
        if result.ok:
            times = [window.duration_ns / window.num_steps for window in result.windows]
            self._fastest_ns[anew] = min(sum(times) / len(times), self._fastest_ns.get(anew, math.inf))
        return result

    def _run_anew(
        self, spec: TrialSpec, purpose: Purpose, settings: MeasureSettings, group: str, listener: ProgressListener
    ) -> TrialResult:
        """Run a trial by starting the command, even if its changes could be made in a frozen copy."""
        copy, self._look.copy = self._look.copy, None
        try:
            return self._run(spec, purpose, settings, group, listener, is_again=True)
        finally:
            self._look.copy = copy

    def _starts_anew(self, spec: TrialSpec, purpose: Purpose, applied: Mapping[str, Outside]) -> bool:
        """Say whether a trial must start the command: its changes need a new process, or its figures are compared with
        those of runs that started the command.
        """
        if self._look.copy is None or spec.environment_variables:
            return True
        if any(outside.way is Way.START for outside in applied.values()):
            return True
        if purpose not in (Purpose.CONFIRM, Purpose.CONTRIBUTION):
            return False
        return self._confirms_anew or self._fastest_ns.get(True, math.inf) < self._fastest_ns.get(False, math.inf)

    @property
    def _confirms_anew(self) -> bool:
        """True if confirmations start the command again. On a CPU they do, because forks share the host's memory
        layout, which differs between starts; on a GPU, context, memory and kernels are made after the fork.
        """
        return self._look.record.device != "cuda"

    @property
    def why_no_copy(self) -> str:
        """Reason why trials cannot continue from a frozen copy of the script's process, and start the script's command
        instead; empty if they can.
        """
        return self._look.why_no_copy

    def run_start(
        self, way: Start, spec: TrialSpec, settings: MeasureSettings
    ) -> tuple[TrialResult, Mapping[str, Any]]:
        """Run a script once without making changes to it, timed like a trial; return the result and the first process's
        record.

        Args:
            spec: Specification of the candidate that the script represents.
        """
        trial = {
            **self.starts.task({}, None, measure_settings(spec, settings)),
            "seed": spec.seed,
            "num_losses": NUM_LOSSES,
        }
        return self._timed(spec, Purpose.CONFIRM, settings, "", trial, way, {})

    def _timed(
        self,
        spec: TrialSpec,
        purpose: Purpose,
        settings: MeasureSettings,
        group: str,
        trial: Mapping[str, Any],
        way: Start,
        applied: Mapping[str, Outside],
    ) -> tuple[TrialResult, Mapping[str, Any]]:
        """Run the command once; return the result, and the record of its first process."""
        log = self._files.logs / f"{spec.trial_id}.log"
        began_ns = time.perf_counter_ns()
        with LoadWatch() as load, self.starts.ran(trial, way, log, self.starts.longest_s(spec, way)) as ended:
            load.stop()
            result = TrialResult(
                trial_id=spec.trial_id,
                candidate=spec.candidate,
                purpose=purpose,
                group=group,
                interpreter="forked" if ended.forked else "started",
                steps_per_epoch=self._look.facts.steps_per_epoch,
            )
            seen = read_record(ended.folder / "trial-0.json")
            return self._told(result, seen, spec, settings, ended, load, began_ns, log, applied), seen

    def _told(
        self,
        result: TrialResult,
        seen: Mapping[str, Any],
        spec: TrialSpec,
        settings: MeasureSettings,
        ended: Ended,
        load: LoadWatch,
        began_ns: int,
        log: Path,
        applied: Mapping[str, Outside],
    ) -> TrialResult:
        """Return the result with the records of its processes."""
        windows = windows_of(seen, settings, load, self._look.facts.global_batch)
        phases = phases_of(seen, windows, began_ns)
        record = ended.records[0] if ended.records else None
        whole = record is not None and (record.complete or (len(windows) >= LEAST_WINDOWS and not ended.status))
        if not windows or not whole or ended.timed_out:
            return msgspec.structs.replace(result, failure=failure_of(ended, log), phases_ns=phases)
        verdict = self._guard.verdict(spec, ended)
        step_ns = round(sum(w.duration_ns for w in windows) / sum(w.num_steps for w in windows))
        return msgspec.structs.replace(
            result,
            windows=windows,
            contended=any(window.marked or window.void for window in windows),
            startup=Startup(
                build_ns=phases[Phase.BUILD.value] + self._later_ns(ended),
                user_code_ns=0,
                first_step_ns=phases[Phase.BUILD.value],
                warm_up_ns=seen["warm_up_ns"],
                warm_up_steps=seen["num_warm_up"],
                steady=True,
            ),
            memory=(MemoryPeak(rank=0, **seen["memory"]),),
            breakdowns=self._profiled(spec, ended, step_ns),
            guard=verdict,
            effects=effects_of(applied, seen["applied"]),
            phases_ns={**phases, Phase.REPORT.value: 0},
        )

    def _later_ns(self, ended: Ended) -> int:
        """Return how many nanoseconds longer a confirmation run of a candidate takes than its trial from a frozen copy,
        for forecasts of the budget.
        """
        copy = self._look.copy
        return copy.spared_ns if copy is not None and ended.forked and self._confirms_anew else 0

    def _profiled(self, spec: TrialSpec, ended: Ended, step_ns: int) -> tuple[Breakdown, ...]:
        """Return the breakdown of the recorded steps; keep their analysis for result pages and, if asked for, their
        traces.
        """
        if not spec.profile:
            return ()
        traces = ended.traces or (self._look.traces if spec.candidate.is_baseline else ())
        folder = self._files.trial_directory(spec.trial_id)
        if spec.keep_trace:
            folder.mkdir(parents=True, exist_ok=True)
            for rank, trace in enumerate(path for path in traces if path.exists()):
                shutil.copyfile(trace, self._files.trace(spec.trial_id, rank))
        if ended.traces:
            analysis = analyse_script(ended.traces, next(iter(ended.records), None), step_ns, FULL_CELLS)
        elif spec.candidate.is_baseline:  # the look has recorded them
            analysis = self._look.analysis
        else:  # the script ended before
            return ()
        folder.mkdir(parents=True, exist_ok=True)
        keep_analysis(self._files, spec.trial_id, analysis)
        return tuple(breakdown for rank in analysis.ranks for breakdown in rank.breakdowns)
