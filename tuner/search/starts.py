"""Start-up times of a candidate's processes: measured, and expected for the next run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from steptune.tuner.records import Phase, TrialResult


def warm_compile_s(cold_s: float) -> float:
    """Return the expected seconds of a compilation with a warm cache, from the seconds that it took with a cold one.

    The longer the cold compilation, the smaller the share; a power law fits studies on an H200 (7 s: 2 to 3, 35 s: 6,
    50 s: 6 to 8, 90 s: 5, 130 s: 8; `benchmarks/results/single_gpu_trials.jsonl`).
    """
    return min(cold_s, 1.3 * float(cold_s**0.4))


def cold_compile_s(result: TrialResult) -> float:
    """Return the seconds of a cold compilation, which the next run need not repeat in full; 0 if the compilation was
    not cold.
    """
    startup = result.startup
    return startup.compile_ns / 1e9 if startup is not None and startup.compile_cold else 0.0


def usual_start_s(results: Sequence[TrialResult]) -> float:
    """Return the mean seconds from the request of a trial to its first window, assuming a warm compilation cache and no
    guard.
    """
    starts = [_start_s(result) for result in results if result.startup]
    return fmean(starts) if starts else 0.0


def _start_s(result: TrialResult) -> float:
    startup = result.startup
    assert startup is not None
    guard_s = result.phases_ns.get(Phase.GUARD.value, 0) / 1e9
    compile_s = startup.compile_ns / 1e9
    # Compilation is part of the first steps: of the guard's where there is one, which the next start may not have.
    steps_s = max(0.0, startup.warm_up_ns / 1e9 - max(guard_s, compile_s))
    warm_s = warm_compile_s(compile_s) if startup.compile_cold else compile_s
    return startup.build_ns / 1e9 + steps_s + warm_s
