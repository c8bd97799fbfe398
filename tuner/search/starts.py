"""What the start of a process took, and what the next one of the same candidate will take."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from tuner.records import Phase, TrialResult

WARM_SHARE = 0.2
"""Of a compilation's time is needed again where its code is in the study's cache (0.11 to 0.18 on an H200)."""


def cold_compile_s(result: TrialResult) -> float:
    """Seconds of compilation that the next start will not need in full; 0 where nothing was compiled anew."""
    startup = result.startup
    return startup.compile_ns / 1e9 if startup is not None and startup.compile_cold else 0.0


def usual_start_s(results: Sequence[TrialResult]) -> float:
    """Mean seconds from the request of a trial to its first window, without a guard, once compiled."""
    starts = [_start_s(result) for result in results if result.startup]
    return fmean(starts) if starts else 0.0


def _start_s(result: TrialResult) -> float:
    startup = result.startup
    assert startup is not None
    guard_s = result.phases_ns.get(Phase.GUARD.value, 0) / 1e9
    compile_s = startup.compile_ns / 1e9
    # Compilation is part of the first steps: of the guard's where there is one, which the next start may not have.
    steps_s = max(0.0, startup.warm_up_ns / 1e9 - max(guard_s, compile_s))
    warm_s = compile_s * (WARM_SHARE if startup.compile_cold else 1.0)
    return startup.build_ns / 1e9 + steps_s + warm_s
