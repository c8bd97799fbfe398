"""Guard of a script's trials: runs of today's settings as its reference, and verdicts on candidates."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from steptune.tuner.errors import BaselineError, BudgetError, RunnerError
from steptune.tuner.hardware import usable_cores
from steptune.tuner.records import Environment, FailureKind, GuardVerdict, TrialSpec
from steptune.tuner.scripts.copies import CopyError
from steptune.tuner.scripts.failures import failure_of
from steptune.tuner.scripts.guard_files import NUM_AUDITS, NUM_STEPS, NUM_WIDE, SEEN, Judge, ReferenceRuns
from steptune.tuner.scripts.launch import Ended
from steptune.tuner.scripts.starts import ScriptStarts, Start
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.trials.disturbance import FP32_ROUNDOFF
from steptune.tuner.trials.study_files import StudyFiles

ROOM, EAGER_PEAKS, CORES_OF_A_RUN = 0.9, 2.0, 2
"""Limits for running the reference several times at once: maximum share of the device's memory, assumed memory of an
eager run as a multiple of the peak in today's trial, and minimum cores for each run.
"""
MOST_REFERENCE_SHARE = 0.1
"""Maximum share of the remaining time that reference runs may take. For each unit roundoff, two runs are disturbed, or
only one if two would exceed this share.
"""


class ScriptGuard:
    """Guard of a script's trials.

    Args:
        starts: Starts of the script.
        files: Files of the study.
        describe: Function that returns the environment.
    """

    def __init__(self, starts: ScriptStarts, files: StudyFiles, describe: Callable[[], Environment]) -> None:
        self._starts = starts
        self._files = files
        self._describe = describe
        self._runs = ReferenceRuns(files.directory)
        self._judge = Judge()
        self._own_roundoff = 0.0
        look = starts.look
        self._is_in_fp32 = look.record.device == "cpu" and not look.script.autocast  # which it may need
        self.peak_bytes = 0
        """Largest peak memory of a successful trial of today's settings, in bytes."""

    def close(self) -> None:
        """End the process that judges candidates."""
        self._judge.close()

    def make_reference(self, request: Any, longest_s: float | None = None) -> None:
        """Run today's settings through the guarded steps: as they are, repeated, and disturbed by unit roundoffs."""
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
        copy, at_once = self._starts.look.copy, min(len(runs), self._num_together())
        if copy is None or at_once < 2 or not self._has_reference:
            return
        reference = str(copy.shared(self._runs.reference))
        ended_early = threading.Event()

        def check() -> None:
            if ended_early.is_set():
                raise CopyError("a parallel run ended the study")
            if self._starts.check is not None:
                self._starts.check()

        def run(folder: Path, unit: float) -> None:
            guard = self._settings(reference, disturb=unit, noise=noises[folder], in_fp32=self._is_in_fp32)
            trial = {**self._starts.task({}, guard, None), "only_guard": True}
            log = self._files.logs / f"{folder.name}.log"
            with (
                contextlib.suppress(CopyError),
                copy.ran(trial, log, self._starts.longest_fork_s(longest_s), check) as ended,
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
        hardware, cores = self._describe().hardware, usable_cores()
        if self._starts.look.record.device != "cuda" or not self.peak_bytes:
            return 1
        fit = int(hardware.devices[0].memory_bytes * ROOM / (EAGER_PEAKS * self.peak_bytes))
        return max(1, min(fit, cores // CORES_OF_A_RUN))

    def _run_guarded(
        self, folder: Path, unit: float, number: int, longest_s: float | None, variables: Mapping[str, str]
    ) -> None:
        """Run today's settings through the guarded steps, and keep the files in the folder."""
        reference = None if folder == self._runs.reference else str(self._runs.reference)
        guard = self._settings(reference, disturb=unit, noise=number, in_fp32=self._is_in_fp32)
        trial = {**self._starts.task({}, guard, None), "only_guard": True}
        log = self._files.logs / f"{folder.name}.log"
        way = Start(command=self._starts.look.command, variables=variables, anew=bool(variables))
        began = time.monotonic()
        with self._starts.ran(trial, way, log, longest_s) as ended:
            if (ended.folder / SEEN).exists():
                _keep_guard(ended.folder, folder)
                return
            why = failure_of(ended, log)
        left_s = None if longest_s is None else longest_s - (time.monotonic() - began)
        if ended.timed_out and (not ended.forked or (left_s is not None and left_s <= 0)):
            raise BudgetError("the budget was spent on the guard's reference")
        if ended.forked:
            self._starts.lose_copy(why.message)
            self._run_guarded(folder, unit, number, left_s, variables)
            return
        out_of_memory = why.kind is FailureKind.OUT_OF_MEMORY
        raise BaselineError(f"the guard's reference failed: {why.message}", out_of_memory=out_of_memory)

    def _settings(
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
            "seed": self._starts.seed,
            "disturb": disturb,
            "noise": noise,
            "reference": reference,
        }

    def steps_of(self, spec: TrialSpec, *, begins_reference: bool, compiles: bool) -> dict[str, Any] | None:
        """Return the settings of a trial's guarded steps; None without them.

        Args:
            begins_reference: Whether a trial of today's settings makes the reference if there is none, so that one run
                less is needed.
        """
        if spec.guard and self._runs.is_made:
            is_low = max(spec.unit_roundoff, self._own_roundoff) > FP32_ROUNDOFF
            return self._settings(
                str(self._runs.reference),
                in_fp32=is_low and self._is_in_fp32,
                outputs=spec.unit_roundoff > self._own_roundoff and not compiles,
            )
        if spec.candidate.is_baseline and begins_reference and not self._has_reference:
            return self._settings(None, in_fp32=self._is_in_fp32)
        return None

    @property
    def _has_reference(self) -> bool:
        return (self._runs.reference / SEEN).exists()

    def verdict(self, spec: TrialSpec, ended: Ended) -> GuardVerdict | None:
        """Return the verdict on a trial, and keep its guarded steps if they are the first of today's settings."""
        candidate = ended.folder / SEEN
        if not self._has_reference and candidate.exists():
            _keep_guard(ended.folder, self._runs.reference)
        if not spec.guard or not self._runs.is_made:
            return None
        if not candidate.exists():
            raise RunnerError(f"trial {spec.trial_id} was measured without its guarded steps")
        own, device = self._own_roundoff, self._starts.look.record.device
        compiles = bool(spec.choices.get(CompileSetting.strategy, {}).get("mode"))
        request = self._runs.request(candidate, spec.unit_roundoff, own, device, is_compiled=compiles)
        return self._judge.verdict(request)


def _keep_guard(seen: Path, folder: Path) -> None:
    """Keep the files of the guarded steps, all or none."""
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for pattern in ("guard-*.pt", "batches-of-*.pt"):
        for path in seen.glob(pattern):
            shutil.copyfile(path, partial / path.name)
    partial.rename(folder)
