"""Trials of an unmodified script with a candidate's changes: each continues from a frozen copy of its process, or
starts its command again.

The command runs in a copy-on-write view of its folder, armed as in an inspection. Nothing of it is parsed: where the
changes are made, the inspection has recorded. Trials run one after another; a launcher's command has all its ranks.
"""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from steptune.tuner.errors import BaselineError, BudgetError, RunnerError
from steptune.tuner.hardware import usable_cores
from steptune.tuner.profiling.lanes import FULL_CELLS
from steptune.tuner.protocols import Progress, ProgressListener
from steptune.tuner.records import (
    Breakdown,
    Effect,
    Environment,
    FailureKind,
    GuardVerdict,
    HardwareProfile,
    MeasureSettings,
    MemoryPeak,
    Phase,
    Purpose,
    Startup,
    Topology,
    TrialResult,
    TrialSpec,
    Window,
    WorkloadFacts,
)
from steptune.tuner.scripts.copies import CopyError, FrozenCopy
from steptune.tuner.scripts.failures import failure_of
from steptune.tuner.scripts.guard_files import NUM_AUDITS, NUM_STEPS, NUM_WIDE, SEEN, Judge, ReferenceRuns
from steptune.tuner.scripts.launch import Ended, ran_script
from steptune.tuner.scripts.load_watch import LoadWatch
from steptune.tuner.scripts.look import Look, same_for_all
from steptune.tuner.scripts.machine import described
from steptune.tuner.scripts.traces import analyse_script
from steptune.tuner.strategies import STRATEGIES, Strategy
from steptune.tuner.strategies.api import Outside, Settings, Way
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.in_scripts import outside_of
from steptune.tuner.trials.analysis_files import keep_analysis
from steptune.tuner.trials.disturbance import FP32_ROUNDOFF
from steptune.tuner.trials.study_files import StudyFiles

FORK_LOOKS, FORK_MORE_S = 2.0, 30.0
"""Time limit of a trial from a frozen copy: a multiple of the inspection's time, plus a number of seconds."""
START_LOOKS = 4.0
"""Minimum time limit of a run of the command, as a multiple of the inspection's time."""
FAULTS_OF_COPIES = (FailureKind.WORKLOAD_ERROR, FailureKind.TIMEOUT)
"""Failures of a trial from a copy after which the command is started instead: the script's files or threads may not
work in a copy."""
WARM_UP_WINDOWS = 2.5
"""Minimum length of the warm-up, in windows."""
LEAST_WINDOWS = 2
"""Minimum number of timed windows with which a script may end before its trial does."""
NUM_LOSSES = 100
"""Number of first backward passes whose losses a verification compares."""
ROOM, EAGER_PEAKS, CORES_OF_A_RUN = 0.9, 2.0, 2
"""Limits for running the reference several times at once: share of the device's memory, assumed memory of an eager run
as a multiple of the peak in today's trial, and cores for each run."""
MOST_REFERENCE_SHARE = 0.1
"""Share of the remaining time that reference runs may take; beyond it, each roundoff disturbs one run instead of two.
"""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Way to start a script.

    Attributes:
        variables: Environment variables.
        texts: Other texts of files in its view, by their path below the folder.
        anew: Whether the command is started, not a trial from the frozen copy.
    """

    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    anew: bool = True


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
        listener: ProgressListener = lambda progress: None,
        variables: Mapping[str, str] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._look = look
        self._variables = dict(variables or {})
        self._check = check
        self._files = StudyFiles(directory)
        self._seed = seed
        self._strategies = strategies
        self._listener = listener
        self._runs = ReferenceRuns(directory)
        self._judge = Judge()
        self._own_roundoff = 0.0
        self._is_in_fp32 = look.record.device == "cpu" and not look.script.autocast  # which it may need
        self._peak_bytes = 0
        """Largest peak memory of a successful trial of today's settings, in bytes."""
        self._fastest_ns: dict[bool, float] = {}
        """Shortest mean step time of successful trials, separately for those that started the command and those from a
        copy."""

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
        self._own_roundoff = request.own_roundoff
        self._is_in_fp32 = self._is_in_fp32 and max(0.0, *request.unit_roundoffs) > FP32_ROUNDOFF
        self._judge.start()  # it loads torch while nothing is timed
        units = sorted({request.own_roundoff, *request.unit_roundoffs} - {0.0})
        began, variables = time.monotonic(), request.environment_variables
        today, repeated = (self._runs.reference, 0.0), (self._runs.repeated, 0.0)
        first, second = ([(self._runs.disturbed(unit, number), unit) for unit in units] for number in (0, 1))
        noises = {folder: number for number, (folder, _) in enumerate([today, repeated, *first, *second])}

        def left_s() -> float | None:
            return None if longest_s is None else longest_s - (time.monotonic() - began)

        def make(runs: Sequence[tuple[Path, float]]) -> None:
            missing = [(folder, unit) for folder, unit in runs if not (folder / SEEN).exists()]
            if not variables:
                self._run_together(missing, noises, left_s())
            for folder, unit in missing:
                if (folder / SEEN).exists():
                    continue
                remaining = left_s()
                if remaining is not None and remaining <= 0:
                    raise BudgetError("the budget was spent on the guard's reference")
                self._run_guarded(folder, unit, noises[folder], remaining, variables)

        make([today])
        made = time.monotonic()
        make([repeated, *first])
        took_s = time.monotonic() - made
        if longest_s is not None and took_s * (1 + len(second) / (1 + len(first))) < MOST_REFERENCE_SHARE * longest_s:
            make(second)
        self._judge.wait_until_loaded()

    def _run_together(
        self, runs: Sequence[tuple[Path, float]], noises: Mapping[Path, int], longest_s: float | None
    ) -> None:
        """Run today's settings several times at once, untimed, as far as the device's memory permits. A run that fails
        beside others is repeated alone later.
        """
        copy, at_once = self._look.copy, min(len(runs), self._num_together())
        if copy is None or at_once < 2 or not (self._runs.reference / SEEN).exists():
            return
        reference = str(copy.shared(self._runs.reference))
        ended_early = threading.Event()

        def check() -> None:
            if ended_early.is_set():
                raise CopyError("a parallel run ended the study")
            if self._check is not None:
                self._check()

        def run(folder: Path, unit: float) -> None:
            guard = self._guard(reference, disturb=unit, noise=noises[folder], in_fp32=self._is_in_fp32)
            trial = {**self._trial({}, guard, None), "only_guard": True}
            log = self._files.logs / f"{folder.name}.log"
            with (
                contextlib.suppress(CopyError),
                copy.ran(trial, log, self._longest_fork_s(longest_s), check) as ended,
            ):
                if (ended.folder / SEEN).exists():
                    _keep_guard(ended.folder, folder)

        with ThreadPoolExecutor(at_once) as pool:
            try:
                list(pool.map(run, *zip(*runs, strict=True)))
            except BaseException:  # an interrupt: the pool waits for what it has begun
                ended_early.set()
                raise

    def _num_together(self) -> int:
        """Return the number of runs of today's settings that fit on the device at once, without compilation."""
        hardware, cores = self._environment.hardware, usable_cores()
        if self._look.record.device != "cuda" or not self._peak_bytes:
            return 1
        fit = int(hardware.devices[0].memory_bytes * ROOM / (EAGER_PEAKS * self._peak_bytes))
        return max(1, min(fit, cores // CORES_OF_A_RUN))

    def _run_guarded(
        self, folder: Path, unit: float, number: int, longest_s: float | None, variables: Mapping[str, str]
    ) -> None:
        """Run today's settings through the guarded steps, and keep the files in the folder."""
        reference = None if folder == self._runs.reference else str(self._runs.reference)
        guard = self._guard(reference, disturb=unit, noise=number, in_fp32=self._is_in_fp32)
        trial = {**self._trial({}, guard, None), "only_guard": True}
        log = self._files.logs / f"{folder.name}.log"
        way = Start(command=self._look.command, variables=variables, anew=bool(variables))
        began = time.monotonic()
        with self._ran(trial, way, log, longest_s) as ended:
            if (ended.folder / SEEN).exists():
                _keep_guard(ended.folder, folder)
                return
            why = failure_of(ended, log)
        left_s = None if longest_s is None else longest_s - (time.monotonic() - began)
        if ended.timed_out and (not ended.forked or (left_s is not None and left_s <= 0)):
            raise BudgetError("the budget was spent on the guard's reference")
        if ended.forked:
            self._without_copy(why.message)
            self._run_guarded(folder, unit, number, left_s, variables)
            return
        out_of_memory = why.kind is FailureKind.OUT_OF_MEMORY
        raise BaselineError(f"the guard's reference failed: {why.message}", out_of_memory=out_of_memory)

    def _guard(
        self,
        reference: str | None,
        *,
        disturb: float = 0.0,
        noise: int = 0,
        in_fp32: bool,
        outputs: bool = False,
    ) -> dict[str, Any]:
        """Return the guard's settings for a run of the script, as plain values.

        Args:
            in_fp32: Whether steps in FP32 follow.
            outputs: Whether modules' outputs in 16 bits are compared with FP32.
        """
        return {
            "steps": NUM_STEPS,
            "audits": NUM_AUDITS,
            "wide": NUM_WIDE if in_fp32 else 0,
            "outputs": outputs,
            "seed": self._seed,
            "disturb": disturb,
            "noise": noise,
            "reference": reference,
        }

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
        """End the copy from which trials start, and the process that judges candidates."""
        self._judge.close()
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
        has_reference = (self._runs.reference / SEEN).exists()
        is_first = purpose is Purpose.BASELINE and not is_again
        guard = None
        if spec.guard and self._runs.is_made:
            is_low = max(spec.unit_roundoff, self._own_roundoff) > FP32_ROUNDOFF
            guard = self._guard(
                str(self._runs.reference),
                in_fp32=is_low and self._is_in_fp32,
                outputs=spec.unit_roundoff > self._own_roundoff and not changes.get("compile"),
            )
        elif spec.candidate.is_baseline and not has_reference and (not anew or is_first):
            guard = self._guard(None, in_fp32=self._is_in_fp32)  # one run less: candidates begin with the same steps
        measure = _measure(spec, settings)
        if spec.candidate.is_baseline and not anew:
            measure["profile"] = False  # the look has recorded its steps
        trial = self._trial(changes, guard, measure)
        way = Start(command=self._look.command, variables=spec.environment_variables, anew=anew)
        result = self._timed(spec, purpose, settings, group, trial, way, applied)[0]
        if result.interpreter == "forked" and result.failure is not None and result.failure.kind in FAULTS_OF_COPIES:
            again = self._run_anew(spec, purpose, settings, group, listener)
            if again.failure is None:
                self._without_copy(result.failure.message)
            return again
        if result.ok and spec.candidate.is_baseline:
            self._peak_bytes = max(self._peak_bytes, result.peak_memory_bytes)
        if result.ok:
            times = [window.duration_ns / window.num_steps for window in result.windows]
            self._fastest_ns[anew] = min(sum(times) / len(times), self._fastest_ns.get(anew, math.inf))
        return result

    def _run_anew(
        self, spec: TrialSpec, purpose: Purpose, settings: MeasureSettings, group: str, listener: ProgressListener
    ) -> TrialResult:
        """Run a trial that starts the command, whatever changes the trial makes."""
        copy, self._look.copy = self._look.copy, None
        try:
            return self._run(spec, purpose, settings, group, listener, is_again=True)
        finally:
            self._look.copy = copy

    def _starts_anew(self, spec: TrialSpec, purpose: Purpose, applied: Mapping[str, Outside]) -> bool:
        """Say whether a trial must start the command: its changes need another process, or its figures are compared
        with figures of runs that started the command.
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
        """True if confirmations start the command again: on a CPU, forks share the host's memory layout, which differs
        between starts. On a GPU, context, memory and kernels are made after the fork.
        """
        return self._look.record.device != "cuda"

    def _without_copy(self, reason: str) -> None:
        """Start the command for each further trial."""
        self._look.close()
        self._look.why_no_copy = reason

    @property
    def why_no_copy(self) -> str:
        """Reason why trials start the command instead of a copy; empty if they use a copy."""
        return self._look.why_no_copy

    def run_start(
        self, way: Start, spec: TrialSpec, settings: MeasureSettings
    ) -> tuple[TrialResult, Mapping[str, Any]]:
        """Run a script once without making changes to it, timed like a trial; return the result and the first process's
        record.

        Args:
            spec: Specification of the candidate that the script represents.
        """
        trial = {**self._trial({}, None, _measure(spec, settings)), "seed": spec.seed, "num_losses": NUM_LOSSES}
        return self._timed(spec, Purpose.CONFIRM, settings, "", trial, way, {})

    def frozen(self, way: Start, log: Path) -> Look:
        """Start the command in another way, run it up to its first steps, and return the inspection with a frozen copy.

        Raises:
            CopyError: The run leaves no copy, or does not train.
        """
        look, began_ns = self._look, time.perf_counter_ns()
        with contextlib.ExitStack() as kept:
            started = self._started(
                self._trial({}, None, None), way, log, START_LOOKS * look.seconds, frozen_seed=self._seed
            )
            ended = kept.enter_context(started)
            record = next((record for record in ended.records if record.complete), None)
            if record is None:
                raise CopyError(failure_of(ended, log).message)
            copy = FrozenCopy(ended.folder, record, began_ns, look.folder)
            found = Look(way.command, look.folder, look.record, look.analysis, look.seconds)
            found.keep(copy, kept.pop_all())
        return found

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
        with LoadWatch() as load, self._ran(trial, way, log, self._longest_s(spec, way)) as ended:
            load.stop()
            result = TrialResult(
                trial_id=spec.trial_id,
                candidate=spec.candidate,
                purpose=purpose,
                group=group,
                interpreter="forked" if ended.forked else "started",
                steps_per_epoch=self._look.facts.steps_per_epoch,
            )
            seen = _read(ended.folder / "trial-0.json")
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
        windows = self._windows(seen, settings, load)
        phases = _phases(seen, windows, began_ns)
        record = ended.records[0] if ended.records else None
        whole = record is not None and (record.complete or (len(windows) >= LEAST_WINDOWS and not ended.status))
        if not windows or not whole or ended.timed_out:
            return msgspec.structs.replace(result, failure=failure_of(ended, log), phases_ns=phases)
        if not (self._runs.reference / SEEN).exists() and (ended.folder / SEEN).exists():
            _keep_guard(ended.folder, self._runs.reference)
        verdict = self._verdict(spec, ended) if spec.guard and self._runs.is_made else None
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
            effects=_effects(applied, seen["applied"]),
            phases_ns={**phases, Phase.REPORT.value: 0},
        )

    def _later_ns(self, ended: Ended) -> int:
        """Return the extra time that a candidate's confirmation runs take compared with its fork, for forecasts of the
        budget.
        """
        copy = self._look.copy
        return copy.spared_ns if copy is not None and ended.forked and self._confirms_anew else 0

    def _verdict(self, spec: TrialSpec, ended: Ended) -> GuardVerdict:
        candidate = ended.folder / SEEN
        if not candidate.exists():
            raise RunnerError(f"trial {spec.trial_id} was measured without its guarded steps")
        own, device = self._own_roundoff, self._look.record.device
        compiles = bool(spec.choices.get(CompileSetting.strategy, {}).get("mode"))
        request = self._runs.request(candidate, spec.unit_roundoff, own, device, is_compiled=compiles)
        return self._judge.verdict(request)

    def _windows(self, seen: Mapping[str, Any], settings: MeasureSettings, load: LoadWatch) -> tuple[Window, ...]:
        batch = self._look.facts.global_batch
        found = []
        for number, window in enumerate(seen.get("windows", ())):
            begin_ns = window.pop("begin_ns")
            share = load.share(begin_ns, begin_ns + window["duration_ns"])
            busy = f"other programs used {share:.0%} of the cores" if share > settings.foreign_cpu_share else None
            found.append(
                Window(
                    round=number,
                    position=-1,
                    num_samples=window["num_steps"] * batch,
                    num_units=window["num_steps"] * batch,
                    queue_depth_start=0,
                    queue_depth_end=0,
                    foreign_cpu_share=share,
                    void=busy if settings.quiet_machine else None,
                    marked=None if settings.quiet_machine else busy,
                    **window,
                )
            )
        return tuple(found)

    def _profiled(self, spec: TrialSpec, ended: Ended, step_ns: int) -> tuple[Breakdown, ...]:
        """Return the breakdown of the recorded steps, and keep their analysis for result pages; and their traces, if
        asked for.
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

    # --- the command ----------------------------------------------------------------------------

    def _trial(
        self, changes: Mapping[str, Any], guard: dict[str, Any] | None, measure: dict[str, Any] | None
    ) -> dict[str, Any]:
        script = self._look.script
        none = {"warm_up_s": 0.0, "window_s": 0.0, "min_rounds": 1, "max_rounds": 1, "half_width": 1.0, "cap_s": 0.0}
        return {
            "pattern": self._look.record.step.optimizers,
            "loader": script.loader_number,
            "loader_place": script.places.get("loader", ""),
            "models": script.models,
            "changes": dict(changes),
            "seed": self._seed,
            "guard": guard,
            "only_guard": False,
            "num_losses": 0,
            "measure": measure or {**none, "profile": False, "queue": 0},
        }

    @contextlib.contextmanager
    def _ran(self, trial: Mapping[str, Any], way: Start, log: Path, longest_s: float | None) -> Iterator[Ended]:
        copy = self._look.copy
        if copy is not None and not way.anew:
            try:
                with copy.ran(self._for_copy(copy, trial), log, self._longest_fork_s(longest_s), self._check) as ended:
                    yield ended
                return
            except CopyError as error:
                self._without_copy(str(error))
        with self._started(trial, way, log, longest_s) as ended:
            yield ended

    def _started(
        self, trial: Mapping[str, Any], way: Start, log: Path, longest_s: float | None, frozen_seed: int | None = None
    ) -> contextlib.AbstractContextManager[Ended]:
        return ran_script(
            way.command,
            trial=trial,
            variables={**same_for_all(), **self._variables, **way.variables},
            texts=way.texts,
            frozen_seed=frozen_seed,
            folder=self._look.folder,
            log=log,
            longest_s=longest_s,
            check=self._check,
        )

    def _longest_s(self, spec: TrialSpec, way: Start) -> float:
        deadlines = spec.deadlines
        starting = deadlines.build_s + deadlines.guard_s + deadlines.warm_up_s
        if way.anew:  # what is usual may be known of forks only
            starting = max(starting, START_LOOKS * self._look.seconds)
        if deadlines.starting_s is not None:
            starting = min(starting, deadlines.starting_s)
        return starting + deadlines.measure_s + deadlines.profile_s + deadlines.report_s

    def _for_copy(self, copy: FrozenCopy, trial: Mapping[str, Any]) -> dict[str, Any]:
        """Return a trial's task with the paths of its files in the copy's view."""
        guard = trial["guard"]
        if guard is None or guard["reference"] is None:
            return dict(trial)
        return {**trial, "guard": {**guard, "reference": str(copy.shared(Path(guard["reference"])))}}

    def _longest_fork_s(self, longest_s: float | None) -> float:
        """Return the time limit of a trial from the copy, shorter than that of a run of the command, so that a hang is
        found early.
        """
        longest = FORK_LOOKS * self._look.seconds + FORK_MORE_S
        return longest if longest_s is None else min(longest, longest_s)


def _measure(spec: TrialSpec, settings: MeasureSettings) -> dict[str, Any]:
    """Return the settings of the windows as plain values."""
    return {
        "warm_up_s": WARM_UP_WINDOWS * settings.window_s,
        "window_s": settings.window_s,
        "min_rounds": settings.min_rounds,
        "max_rounds": settings.max_rounds,
        "half_width": settings.half_width,
        "cap_s": settings.cap_s,
        "profile": spec.profile,
        "queue": _queue(spec),
    }


def _queue(spec: TrialSpec) -> int:
    """Return the number of batches that the candidate's loader may have loaded ahead."""
    loading = Settings(spec.choices)[DataLoadingSetting]
    return loading.num_workers * (loading.prefetch_factor or 0)


def _phases(seen: Mapping[str, Any], windows: Sequence[Window], began_ns: int) -> dict[str, int]:
    """Return the time of each phase; the sum is the time of the trial."""
    whole = time.perf_counter_ns() - began_ns
    first = seen.get("first_step_ns", 0)
    build = first - began_ns if first else whole
    warm_up = seen.get("warm_up_ns", 0)
    measure = sum(window.duration_ns for window in windows)
    return {
        Phase.BUILD.value: build,
        Phase.WARM_UP.value: warm_up,
        Phase.MEASURE.value: measure,
        Phase.PROFILE.value: max(0, whole - build - warm_up - measure),
    }


def _keep_guard(seen: Path, folder: Path) -> None:
    """Keep the files of the guarded steps, all or none."""
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for pattern in ("guard-*.pt", "batches-of-*.pt"):
        for path in seen.glob(pattern):
            shutil.copyfile(path, partial / path.name)
    partial.rename(folder)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return found


def _effects(applied: Mapping[str, Outside], seen: Mapping[str, str]) -> tuple[Effect, ...]:
    """Return, for each choice, whether it took effect in the script; it did not if its object never appeared."""
    effects = []
    for name, outside in applied.items():
        missing = [change for change in outside.changes if change not in seen]
        detail = outside.words if not missing else f"{', '.join(missing)}: the script never reached the code to change"
        effects.append(Effect(strategy=name, took=not missing, detail=detail))
    return tuple(effects)
