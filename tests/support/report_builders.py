"""A study that went well, in records: what reports and exports are made of."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pandas as pd

from steptune.tuner.memory_store import MemoryStudyStore
from steptune.tuner.records import (
    BASELINE,
    Alternative,
    Breakdown,
    Candidate,
    CaptureQuality,
    Certificate,
    Choice,
    Cost,
    Decision,
    Device,
    Effect,
    Failure,
    FailureKind,
    Finding,
    Gain,
    GuardCheck,
    GuardVerdict,
    HardwareProfile,
    Interval,
    MemoryPeak,
    Move,
    Numerics,
    Part,
    Phase,
    Purpose,
    Recommendation,
    SampleUnit,
    Study,
    StudySettings,
    StudyState,
    Trial,
    TrialResult,
    TrialState,
    Verdict,
    Window,
)
from steptune.tuner.strategies import STRATEGIES

STUDY_ID = "01kg6p7c2qv8mwz0y4x9t3r5ab"
BATCH = 32
WORKERS: Choice = {"num_workers": 2, "persistent_workers": True}
WORKERS_AND_THREADS = Candidate(choices={"data_loading": WORKERS, "cpu_threads": {"num_threads": 1}})
WINNER = WORKERS_AND_THREADS.with_choice("optimizer_implementation", {"implementation": "fused"})
STEP_BEFORE = {
    "data_wait": 15_800_000,
    "epoch_restart": 0,
    "compute_matmul": 4_900_000,
    "compute_normalisation": 900_000,
    "compute_reduction": 240_000,
    "compute_elementwise": 1_350_000,
    "optimizer": 710_000,
    "host": 1_020_000,
}
STEP_AFTER = {
    "data_wait": 1_300_000,
    "epoch_restart": 60_000,
    "compute_matmul": 5_300_000,
    "compute_normalisation": 950_000,
    "compute_reduction": 260_000,
    "compute_elementwise": 1_420_000,
    "optimizer": 240_000,
    "host": 760_000,
}


def stored(
    study: Study,
    trials: Sequence[Trial] = (),
    decisions: Sequence[Decision] = (),
    recommendation: Recommendation | None = None,
) -> MemoryStudyStore:
    """A store that holds one study."""
    store = MemoryStudyStore()
    store.create_study(study)
    store.begin_trials([msgspec.structs.replace(t, state=TrialState.RUNNING, result=None) for t in trials])
    for trial in trials:
        if trial.result is not None:
            store.complete_trials([trial.result])
    store.replace_decisions(study.study_id, decisions)
    if recommendation is not None:
        store.save_recommendation(recommendation)
    return store


def cpu_hardware() -> HardwareProfile:
    return HardwareProfile(
        devices=(Device(kind="cpu", name="AMD EPYC 7B13", memory_bytes=24 << 30),),
        num_cores=2,
        cpu_name="AMD EPYC 7B13",
        memory_bytes=24 << 30,
        versions={"torch": "2.13.0+cpu", "python": "3.11.7"},
    )


def complete(candidate: Candidate) -> dict[str, Choice]:
    return {s.name: {**s.defaults, **candidate.choices.get(s.name, {})} for s in STRATEGIES}


def environment_variables(choices: dict[str, Choice]) -> dict[str, str]:
    return {name: value for s in STRATEGIES for name, value in s.environment_variables(choices[s.name]).items()}


def make_breakdown(per_step_ns: dict[str, int], num_steps: int = 20) -> Breakdown:
    total = {name: value * num_steps for name, value in per_step_ns.items()}
    step_ns = sum(per_step_ns.values())
    return Breakdown(
        rank=0,
        device="cpu",
        num_steps=num_steps,
        step_time_ns=step_ns * num_steps,
        categories=total,
        quality=CaptureQuality(num_events=40_000, num_steps=num_steps, overhead_ratio=1.12),
        unprofiled_step_time_ns=step_ns,
        rescaled=per_step_ns,
    )


def make_windows(step_ns: float, count: int = 6, seed: int = 0) -> tuple[Window, ...]:
    noise = random.Random(seed)
    windows = []
    for number in range(count):
        num_steps = 20
        duration = int(step_ns * num_steps * (1 + noise.gauss(0, 0.006)))
        step = duration // num_steps
        windows.append(
            Window(
                round=number,
                position=0,
                num_steps=num_steps,
                num_samples=num_steps * BATCH,
                num_units=num_steps * BATCH,
                duration_ns=duration,
                step_p20_ns=int(step * 0.98),
                step_p50_ns=step,
                step_p80_ns=int(step * 1.03),
                queue_depth_start=0,
                queue_depth_end=0,
                foreign_cpu_share=0.01,
            )
        )
    return tuple(windows)


GUARD = GuardVerdict(
    passed=True,
    num_steps=8,
    checks=(
        GuardCheck(name="loss", kind="pointwise", passed=True, observed=3.1e-7, tolerance=2.0e-5),
        GuardCheck(name="gradient norm", kind="pointwise", passed=True, observed=8.8e-7, tolerance=4.0e-5),
    ),
    losses=tuple(0.69 - 0.01 * step for step in range(8)),
    reference_losses=tuple(0.69 - 0.01 * step for step in range(8)),
)
INPUT_BOUND = Finding(
    rule="input_bound",
    severity="high",
    message="input-bound: 63 % of the step waits for data",
    advice="load with worker processes, keep them between epochs, or keep decoded samples",
    strategies=("data_loading", "dataset_cache", "cpu_threads"),
    bound=0.63,
)


def make_result(
    trial_id: str,
    candidate: Candidate,
    step_ns: float,
    *,
    purpose: Purpose = Purpose.EXPLORE,
    group: str = "",
    breakdown: dict[str, int] | None = None,
    findings: Sequence[Finding] = (),
    failure: Failure | None = None,
    seed: int = 0,
) -> TrialResult:
    return TrialResult(
        trial_id=trial_id,
        candidate=candidate,
        purpose=purpose,
        group=group or trial_id,
        windows=() if failure else make_windows(step_ns, seed=seed),
        memory=(MemoryPeak(rank=0, resident_bytes=612 << 20),),
        breakdowns=(make_breakdown(breakdown),) if breakdown else (),
        findings=tuple(findings),
        guard=None if failure else GUARD,
        effects=(Effect(strategy="data_loading", took=True, detail="as asked"),),
        failure=failure,
        phases_ns={"build": 300_000_000, "guard": 900_000_000, "measure": 4_000_000_000},
    )


def make_study(**fields) -> Study:
    defaults = {
        "study_id": STUDY_ID,
        "workload": "examples/photo_resnet.py:PhotoResNet",
        "settings": StudySettings(budget_s=480),
        "created_at": "2026-11-21T09:30:00+00:00",
        "directory": "/tmp/steptune/study",
        "state": StudyState.COMPLETED,
        "steptune_version": "0.1.0",
    }
    return Study(**{**defaults, **fields})


def make_trials(results: Sequence[TrialResult]) -> list[Trial]:
    return [
        Trial(
            trial_id=result.trial_id,
            study_id=STUDY_ID,
            sequence=number,
            candidate=result.candidate,
            purpose=result.purpose,
            group=result.group,
            replicate=0,
            state=TrialState.FAILED if result.failure else TrialState.COMPLETED,
            started_at="2026-11-21T09:31:00+00:00",
            result=result,
        )
        for number, result in enumerate(results, start=1)
    ]


FAILED_COMPILE = Failure(
    kind=FailureKind.TIMEOUT, phase=Phase.WARM_UP, message="the warm_up phase did not end within 300 s"
)
NOT_TRIED = (
    Decision(
        sequence=20,
        stage="space",
        verdict="not_tried",
        reason="pinned memory needs CUDA",
        moves=(Move(strategy="data_loading", choice={"pin_memory": True}),),
    ),
    Decision(
        sequence=21,
        stage="space",
        verdict="not_tried",
        reason="bf16 products are emulated here: measured 38 GFLOP/s against 96 GFLOP/s in FP32",
        moves=(Move(strategy="precision", choice={"level": "O2", "dtype": "bfloat16"}),),
        predicted_bound=0.0,
    ),
    Decision(
        sequence=22,
        stage="move",
        verdict="not_tried",
        reason="could save at most 0.4 % of the step, below the noise of 1.2 %",
        moves=(Move(strategy="backend_flags", choice={"flush_denormals": True}),),
        predicted_bound=0.004,
    ),
    Decision(
        sequence=23,
        stage="space",
        verdict="not_tried",
        reason="lossy: needs your consent (--allow lossy)",
        moves=(Move(strategy="precision", choice={"level": "O3", "dtype": "bfloat16"}),),
    ),
)


def make_story() -> tuple[list[Trial], list[Decision]]:
    """Four starts of the baseline, six candidates, one failure, and five blocks of confirmation."""
    before, after = float(sum(STEP_BEFORE.values())), float(sum(STEP_AFTER.values()))
    numbers = itertools.count(1)
    results: list[TrialResult] = []
    decisions: list[Decision] = []

    def run(candidate: Candidate, step_ns: float, **details) -> str:
        number = next(numbers)
        trial_id = f"trial{number:04d}"
        results.append(make_result(trial_id, candidate, step_ns, seed=number, **details))
        return trial_id

    def decide(stage: str, verdict: str, reason: str, candidate: Candidate, ids: list[str], **details) -> None:
        moves = tuple(Move(strategy=s, choice=c) for s, c in candidate.choices.items())
        decisions.append(
            Decision(
                sequence=len(decisions) + 1,
                stage=stage,
                verdict=verdict,
                reason=reason,
                candidate=candidate,
                moves=details.pop("moves", moves),
                trial_ids=tuple(ids),
                **details,
            )
        )

    starts = [
        run(BASELINE, before * spread, purpose=Purpose.BASELINE, breakdown=STEP_BEFORE, findings=[INPUT_BOUND])
        for spread in (1.0, 1.01, 0.995, 1.004)
    ]
    decide("baseline", "measured", "4 starts", BASELINE, starts)
    workers = Candidate(choices={"data_loading": WORKERS})
    ids = [run(workers, before * 0.52), run(workers, before * 0.525, purpose=Purpose.REPLICATE)]
    decide(
        "recipe",
        "accepted",
        "for the finding: input-bound: 63 % of the step waits for data",
        workers,
        ids,
        predicted_bound=0.63,
        measured_gain=0.915,
        measured_se=0.011,
    )
    ids = [run(WORKERS_AND_THREADS, before * 0.43)]
    decide(
        "together",
        "accepted",
        "loader workers and operator threads share the cores",
        WORKERS_AND_THREADS,
        ids,
        predicted_bound=0.31,
        measured_gain=0.21,
        measured_se=0.012,
        moves=(Move(strategy="cpu_threads", choice={"num_threads": 1}),),
    )
    compiled = WORKERS_AND_THREADS.with_choice("compile", {"mode": "default"})
    ids = [run(compiled, before, failure=FAILED_COMPILE)]
    decide(
        "move",
        "failed",
        "timeout in warm_up",
        compiled,
        ids,
        predicted_bound=0.28,
        moves=(Move(strategy="compile", choice={"mode": "default"}),),
    )
    channels = WORKERS_AND_THREADS.with_choice("memory_format", {"layout": "channels_last"})
    ids = [run(channels, before * 0.445)]
    decide(
        "move",
        "no_gain",
        "could save at most 19 % of the step",
        channels,
        ids,
        predicted_bound=0.19,
        measured_gain=-0.034,
        measured_se=0.012,
        moves=(Move(strategy="memory_format", choice={"layout": "channels_last"}),),
    )
    ids = [run(WINNER, after, breakdown=STEP_AFTER)]
    decide(
        "move",
        "accepted",
        "could save at most 6 % of the step",
        WINNER,
        ids,
        predicted_bound=0.06,
        measured_gain=0.041,
        measured_se=0.009,
        moves=(Move(strategy="optimizer_implementation", choice={"implementation": "fused"}),),
    )
    blocks = [
        run(candidate, step, purpose=Purpose.CONFIRM, group=f"block{block}")
        for block in range(5)
        for candidate, step in ((BASELINE, before), (WINNER, after))
    ]
    decide("confirm", "confirmed", "5 blocks of fresh processes", WINNER, blocks, measured_gain=1.42, measured_se=0.02)
    return make_trials(results), [*decisions, *NOT_TRIED]


def make_recommendation(candidate: Candidate = WINNER, **fields) -> Recommendation:
    choices = complete(candidate)
    before, after = sum(STEP_BEFORE.values()), sum(STEP_AFTER.values())
    defaults = {
        "study_id": STUDY_ID,
        "created_at": "2026-11-21T09:41:00+00:00",
        "workload": "examples/photo_resnet.py:PhotoResNet",
        "workload_signature": "8c1f02ab34d5e677",
        "global_batch": BATCH,
        "sample_unit": SampleUnit.SAMPLE,
        "verdict": Verdict.FASTER,
        "candidate": candidate,
        "choices": choices,
        "environment_variables": environment_variables(choices),
        "hardware": cpu_hardware(),
        "baseline_units_per_s": BATCH * 1e9 / before,
        "units_per_s": BATCH * 1e9 / after,
        "gain": Gain(
            ratio=2.42,
            interval=Interval(low=2.37, high=2.47),
            prediction=Interval(low=2.34, high=2.50),
            num_blocks=5,
            num_finalists=2,
        ),
        "parts": make_parts(),
        "shares_before": {name: value / before for name, value in STEP_BEFORE.items()},
        "shares_after": {name: value / after for name, value in STEP_AFTER.items()},
        "bottleneck_before": "input",
        "bottleneck_after": "compute",
        "guard": GUARD,
        "certificate": Certificate(
            remaining_bound=0.008,
            status="estimated",
            noise=0.012,
            ended="no bound above noise",
            not_tried=NOT_TRIED,
            audits=2,
        ),
        "cost": Cost(tuning_s=462.0, num_trials=20, payback_tuning_steps=31_500.0),
        "alternatives": (
            Alternative(
                candidate=WORKERS_AND_THREADS,
                gain=2.33,
                peak_memory_bytes=590 << 20,
                numerics=Numerics.ROUNDING,
                guard="same for 8 steps",
            ),
        ),
        "peak_memory_bytes": 1460 << 20,
        "baseline_peak_memory_bytes": 612 << 20,
        "steptune_version": "0.1.0",
    }
    return Recommendation(**{**defaults, **fields})


def make_parts() -> tuple[Part, ...]:
    return (
        Part(
            strategy="data_loading",
            choice=WORKERS,
            gain=1.92,
            interval=Interval(low=1.87, high=1.96),
            num_blocks=5,
            bound=0.63,
            reason="63 % of the step waited for data; two workers load while the model computes",
            numerics=Numerics.SAMPLING,
        ),
        Part(
            strategy="cpu_threads",
            choice={"num_threads": 1},
            gain=1.21,
            interval=Interval(low=1.18, high=1.24),
            num_blocks=5,
            bound=0.31,
            reason="loader workers and operator threads share the cores",
            numerics=Numerics.ROUNDING,
        ),
        Part(
            strategy="optimizer_implementation",
            choice={"implementation": "fused"},
            gain=1.04,
            interval=Interval(low=1.02, high=1.06),
            num_blocks=5,
            bound=0.06,
            reason="the update is one kernel that reads and writes every element once",
            numerics=Numerics.ROUNDING,
        ),
    )


def without_gain(**fields) -> Recommendation:
    """Nothing was better than what the user runs today."""
    rate = BATCH * 1e9 / sum(STEP_BEFORE.values())
    ratio = Gain(
        ratio=1.003,
        interval=Interval(low=0.992, high=1.014),
        prediction=Interval(low=0.985, high=1.021),
        num_blocks=5,
        num_finalists=1,
    )
    return make_recommendation(
        BASELINE,
        **{
            "verdict": Verdict.NO_SIGNIFICANT_GAIN,
            "gain": None,
            "unproven_gain": ratio,
            "parts": (),
            "units_per_s": rate,
            "shares_after": {},
            "bottleneck_after": "input",
            "alternatives": (),
            **fields,
        },
    )


def complete_study() -> MemoryStudyStore:
    trials, decisions = make_story()
    return stored(make_study(), trials, decisions, make_recommendation())


def running_study(num_trials: int) -> MemoryStudyStore:
    """A study of which the first trials are known, and one more is running."""
    trials, decisions = make_story()
    known = trials[:num_trials]
    running = msgspec.structs.replace(trials[num_trials], result=None)
    ids = {trial.trial_id for trial in known}
    told = [d for d in decisions if d.trial_ids and set(d.trial_ids) <= ids]
    return stored(make_study(state=StudyState.RUNNING), [*known, running], told)


def failed_study() -> MemoryStudyStore:
    """Nothing could be measured."""
    failure = Failure(
        kind=FailureKind.WORKLOAD_ERROR, phase=Phase.BUILD, message="FileNotFoundError: photos/ does not exist"
    )
    results = [make_result(f"trial{n}", BASELINE, 1.0, purpose=Purpose.BASELINE, failure=failure) for n in range(1, 3)]
    decision = Decision(
        sequence=1,
        stage="baseline",
        verdict="failed",
        reason=failure.message,
        candidate=BASELINE,
        trial_ids=("trial1", "trial2"),
    )
    study = make_study(state=StudyState.FAILED, message="the baseline could not be measured")
    return stored(study, make_trials(results), [decision])


def table(rows: Sequence[NamedTuple]) -> pd.DataFrame:
    """Rows as a frame, of which tests can ask for columns."""
    return pd.DataFrame(rows)
