"""A study as `steptune tune` runs it (the same driver, in this process), whose processes and files stay for what
is timed beside its answer.

By-hand configurations are candidates like any other: they run in the same study, from the same initial state
and batches, with its compile cache, and are compared in blocks of fresh processes as the confirmation does.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from steptune.tuner.estimates import log_rate
from steptune.tuner.memory_store import MemoryStudyStore
from steptune.tuner.records import (
    BASELINE,
    Candidate,
    Choice,
    Deadlines,
    MeasureSettings,
    Numerics,
    Phase,
    Purpose,
    Recommendation,
    Study,
    StudySettings,
    TrialResult,
    new_id,
)
from steptune.tuner.search.confirmation import judge, plan_blocks
from steptune.tuner.search.driver import StudyDriver
from steptune.tuner.search.space import Space
from steptune.tuner.search.specs import SpecMaker
from steptune.tuner.search.starts import cold_compile_s, warm_compile_s
from steptune.tuner.search.view import StudyView
from steptune.tuner.strategies import STRATEGIES, strategy_named
from steptune.tuner.strategies.api import Unsupported
from steptune.tuner.strategies.combine import conflict, normalise
from steptune.tuner.trials.runner import LocalRunner
from steptune.tuner.workloads.reference import format_reference, parse_reference

NEARLY = 0.95
"""Share of the final gain whose time is of interest."""
INPUT_STRATEGIES = ("data_loading", "dataset_cache", "device_prefetch", "cpu_threads")
"""Strategies that a figure obtained with inputs that lie on the device has no need of."""
MAX_BLOCKS = 8
CAP_S = 3.0
"""Seconds of windows of one start."""
LEAST_S = 20.0
"""No process is started with less time left, but for the first block."""
OTHER_S = 12.0
"""Seconds that one start of another configuration is taken to need."""
OTHERS_AFTER = (3, 5)


@dataclass
class Tuned:
    """A finished study."""

    study: Study
    recommendation: Recommendation
    store: MemoryStudyStore
    runner: LocalRunner
    seconds: float
    gains: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the beginning, and the best gain known then."""
    stages: list[tuple[float, str]] = field(default_factory=list)
    """Seconds since the beginning, and the stage that began then."""

    def __post_init__(self) -> None:
        assert self.study.environment is not None
        assert self.study.facts is not None
        self.space = Space(self.study.environment, self.study.facts, self.study.settings)
        self._specs = SpecMaker(self.study, self.space, BASELINE)

    def seconds_to_nearly_all(self) -> float | None:
        """Until the best gain known was 95 % of the final one, as logarithms."""
        final = math.log1p(self.gains[-1][1]) if self.gains else 0.0
        return next((s for s, gain in self.gains if final > 0 and math.log1p(gain) >= NEARLY * final), None)

    def candidate(self, choices: Mapping[str, Choice]) -> tuple[Candidate | None, str]:
        """A by-hand configuration on top of what the workload runs today, with the recommendation's loader; or None,
        and why it cannot be run here.
        """
        facts, environment = self.space.workload, self.space.environment
        known = {strategy.name for strategy in STRATEGIES}
        for name in choices:
            if name not in known:
                return None, f"there is no strategy {name!r}"
        own = self.recommendation.candidate.choices
        loader = {name: own[name] for name in INPUT_STRATEGIES if name in own}
        candidate = normalise(Candidate(choices={**loader, **choices}), facts)
        for name, choice in candidate.choices.items():
            strategy = strategy_named(name)
            support = strategy.supports(strategy.complete(choice, facts), environment, facts)
            if isinstance(support, Unsupported):
                return None, f"{name}: {support.reason}"
        reason = conflict(candidate, environment, facts)
        return (None, reason) if reason else (candidate, "")

    def run(self, candidates: Sequence[Candidate], number: int, left_s: float) -> list[TrialResult]:
        """One start of each, in turns, without a guard or a profile; no phase may take longer than what is left."""
        limit = max(LEAST_S, left_s)
        deadlines = Deadlines(**{f"{phase.value}_s": limit for phase in Phase})
        specs = [
            msgspec.structs.replace(self._specs.spec(c, Purpose.CONFIRM, number), deadlines=deadlines)
            for c in candidates
        ]
        measure = msgspec.structs.replace(self.study.settings.measure, cap_s=CAP_S)
        return self.runner.run(specs, [Purpose.CONFIRM] * len(specs), measure, new_id(), lambda progress: None)


def settings_of(minutes: float, foreign_load: float, allow: str = "") -> StudySettings:
    """Settings of a study of so many minutes; `foreign_load` as of `steptune tune --foreign-load`."""
    return StudySettings(
        budget_s=60 * minutes,
        allow=(Numerics(allow),) if allow else (),
        measure=MeasureSettings(foreign_cpu_share=foreign_load),
    )


def add_foreign_load(parser: argparse.ArgumentParser) -> None:
    usual = MeasureSettings().foreign_cpu_share
    parser.add_argument("--foreign-load", type=float, default=usual, help="share of the cores that others may use")


@contextmanager
def tuned(workload: str, settings: StudySettings, say: str = "") -> Iterator[Tuned]:
    """Runs a study to its recommendation."""
    with tempfile.TemporaryDirectory(prefix="steptune-bench-") as folder:
        reference = format_reference(parse_reference(workload))
        now = datetime.now(UTC).isoformat()
        study = Study(study_id=new_id(), workload=reference, settings=settings, created_at=now, directory=folder)
        store = MemoryStudyStore()
        store.create_study(study)
        gains: list[tuple[float, float]] = []

        stages: list[tuple[float, str]] = []

        def on_change(view: StudyView) -> None:
            if not stages or stages[-1][1] != view.stage:
                stages.append((view.elapsed_s, view.stage))
                print(f"{say}{view.elapsed_s:6.0f} s  {view.stage}", flush=True)
            if view.best_gain is not None and (not gains or gains[-1][1] != view.best_gain):
                gains.append((view.elapsed_s, view.best_gain))
                print(f"{say}{view.elapsed_s:6.0f} s  {view.best_gain:+.1%}  {view.best_label}", flush=True)

        runner = LocalRunner(
            workload=reference,
            directory=Path(folder),
            device=settings.device or "",
            num_ranks=settings.num_ranks,
            memory_limit_bytes=settings.memory_limit_bytes,
            task_deadline_s=settings.budget_s,
        )
        try:
            began = time.monotonic()
            driver = StudyDriver(study, store, runner, on_change=on_change)
            recommendation = driver.run()
            seconds = time.monotonic() - began
            yield Tuned(driver.study, recommendation, store, runner, seconds, gains, stages)
        finally:
            runner.close()


def side_by_side(
    study: Tuned, contenders: Sequence[Candidate], others: Sequence[Candidate], deadline: float
) -> list[dict[str, TrialResult]]:
    """Blocks of one start of each contender in random order, as many as the time allows. The others start once after
    the third block, or with what time is left where there are fewer, and once more after the fifth.

    Returns:
        Of each block the results by candidate key, failures included.
    """
    blocks: list[dict[str, TrialResult]] = []
    block_s, rounds_of_others = LEAST_S, 0
    for block in plan_blocks(contenders[0], contenders[1:], MAX_BLOCKS, study.study.settings.seed):
        reserved_s = OTHER_S * len(others) if len(blocks) >= OTHERS_AFTER[0] and not rounds_of_others else 0.0
        if blocks and deadline - time.monotonic() < block_s + reserved_s:
            break
        began = time.monotonic()
        blocks.append(_block(study, block.order, blocks, block.number, deadline))
        colds_s = [cold_compile_s(result) for result in blocks[-1].values()]
        cold_s = sum(colds_s) - sum(map(warm_compile_s, colds_s))
        block_s = time.monotonic() - began - cold_s  # what was compiled is found in the cache the next time
        if len(blocks) in OTHERS_AFTER:
            _add_others(study, others, blocks[rounds_of_others], deadline)
            rounds_of_others += 1
    if not rounds_of_others:
        _add_others(study, others, blocks[0], deadline)
    return blocks


def _add_others(study: Tuned, others: Sequence[Candidate], block: dict[str, TrialResult], deadline: float) -> None:
    for number, candidate in enumerate(others):
        left_s = deadline - time.monotonic()
        if left_s > LEAST_S:
            (block[candidate.key],) = study.run([candidate], number, left_s)


def _block(
    study: Tuned, order: Sequence[Candidate], before: Sequence[dict[str, TrialResult]], number: int, deadline: float
) -> dict[str, TrialResult]:
    """In turns where all are known to fit together, else one by one."""
    peaks = [max((b[c.key].peak_memory_bytes for b in before if c.key in b), default=0) for c in order]
    together = all(peaks) and study.runner.fits_together(peaks)
    groups = [list(order)] if together else [[candidate] for candidate in order]
    results: dict[str, TrialResult] = {}
    for group in groups:
        found = study.run(group, number, deadline - time.monotonic())
        results.update({result.candidate.key: result for result in found})
    return results


def compared(ours: Candidate, other: Candidate, blocks: Sequence[dict[str, TrialResult]]) -> dict:
    """Rate of `ours` over that of another candidate, with the confirmation's interval."""
    good = [{key: result for key, result in block.items() if result.ok} for block in blocks]
    results = [block[other.key] for block in blocks if other.key in block]
    row: dict = {
        "choices": other.choices,
        "num_starts": len(results),
        "failure": next((_told(result) for result in results if not result.ok), None),
        "units_per_s": _rate(results),
        "peak_mib": max((result.peak_memory_bytes for result in results), default=0) >> 20,
    }
    if other == ours:
        return {**row, "ratio": 1.0, "interval": None, "same": True}
    (finalist,) = judge(other, [ours], good)
    gain = finalist.gain
    if gain is not None:
        interval = [round(gain.interval.low, 4), round(gain.interval.high, 4)]
        return {**row, "ratio": round(gain.ratio, 4), "interval": interval}
    point = math.exp(statistics.fmean(finalist.log_ratios)) if finalist.log_ratios else None
    return {**row, "ratio": point and round(point, 4), "interval": None}


def _rate(results: Sequence[TrialResult]) -> float | None:
    rates = [log_rate(result).mean for result in results if result.ok]
    return round(math.exp(statistics.fmean(rates)), 1) if rates else None


def _told(result: TrialResult) -> str:
    failure = result.failure
    return f"{failure.kind.value} in {failure.phase.value}: {failure.message[:300]}" if failure else "no clean window"


def answer(study: Tuned) -> dict:
    """A study's answer in the form of results files."""
    found = study.recommendation
    verdicts = [
        trial.result.guard.passed
        for trial in study.store.trials(study.study.study_id)
        if trial.result and trial.result.guard
    ]
    hardware = found.hardware
    return {
        "hardware": {
            "devices": [device.name for device in hardware.devices],
            "kind": hardware.device_kind,
            "cpu": hardware.cpu_name,
            "cores": hardware.num_cores,
            "versions": hardware.versions,
        },
        "verdict": found.verdict.value,
        "recommended": found.candidate.choices,
        "unit": found.sample_unit.value,
        "baseline_units_per_s": round(found.baseline_units_per_s, 1),
        "units_per_s": round(found.units_per_s, 1),
        "gain": found.gain and round(found.gain.ratio, 4),
        "gain_interval": found.gain and [round(found.gain.interval.low, 4), round(found.gain.interval.high, 4)],
        "num_blocks": found.gain and found.gain.num_blocks,
        "trials": found.cost.num_trials,
        "tuning_s": round(study.seconds, 1),
        "seconds_to_95_percent_of_gain": study.seconds_to_nearly_all(),
        "compile_s": round(found.cost.compile_s, 1),
        "payback_steps": found.cost.payback_steps,
        "peak_mib": found.peak_memory_bytes >> 20,
        "baseline_peak_mib": found.baseline_peak_memory_bytes >> 20,
        "guard": found.guard
        and {"passed": found.guard.passed, "reason": found.guard.reason, "skipped_steps": found.guard.skipped_steps},
        "guard_verdicts": {"passed": sum(verdicts), "rejected": len(verdicts) - sum(verdicts)},
        "bottleneck": [found.bottleneck_before, found.bottleneck_after],
        "shares_before": _rounded(found.shares_before),
        "shares_after": _rounded(found.shares_after),
        "remaining_bound": found.certificate.remaining_bound,
        "ended": found.certificate.ended,
    }


def told(study: Tuned) -> list[dict]:
    """Every trial in a line: what was tried when, how fast it was, and what became of it."""
    began = datetime.fromisoformat(study.study.created_at)
    lines = []
    for trial in study.store.trials(study.study.study_id):
        result = trial.result
        started_s = (datetime.fromisoformat(trial.started_at) - began).total_seconds()
        line: dict = {"at_s": round(started_s, 1), "purpose": trial.purpose.value, "choices": trial.candidate.choices}
        if result is not None:
            line |= {
                "group": result.group,
                "units_per_s": _rate([result]),
                "failure": None if result.ok else _told(result),
                "guard": result.guard and result.guard.reason,
                "effects": {e.strategy: e.detail for e in result.effects if e.strategy in trial.candidate.choices},
                "phases_s": {name: round(ns / 1e9, 2) for name, ns in result.phases_ns.items()},
                "compile_s": result.startup and round(result.startup.compile_ns / 1e9, 1),
                "peak_mib": result.peak_memory_bytes >> 20,
                "step_ms": _step_ms(result),
                "void": [window.void for window in result.windows if window.void],
                "unmeasured": result.unmeasured,
                "repeated": [attempt.failure.message for attempt in result.repeated],
            }
        lines.append(line)
    return lines


def json_lines(records: Sequence[Mapping]) -> str:
    return "".join(json.dumps(record, default=str) + "\n" for record in records)


def _step_ms(result: TrialResult) -> dict[str, float]:
    """Step time of a profiled trial by category, in ms."""
    return {
        name: round(ns / 1e6, 3)
        for breakdown in result.breakdowns[:1]
        for name, ns in breakdown.per_step_ns.items()
        if ns > 0
    }


def _rounded(shares: Mapping[str, float]) -> dict[str, float]:
    return {name: round(share, 4) for name, share in shares.items() if share > 0}
