"""Warm-up of a job until the step time is steady and nothing is compiled any more."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from statistics import median

from steptune.tuner.training.compilation import end_compile_workers, num_graphs
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.measure import Stepper

MIN_STEPS = 3
MAX_STEPS = 200
SPAN = 5
MIN_S = 0.5
CAP_S = 8.0
TOLERANCE = 0.10


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Durations of the warm-up steps, and whether the step time had become steady."""

    step_ns: tuple[int, ...]
    steady: bool

    @property
    def steady_step_ns(self) -> int:
        return int(median(self.step_ns[-SPAN:]))

    @property
    def excess_ns(self) -> int:
        """Time by which the warm-up exceeds the same number of steady steps: compilation, capture, autotuning, first
        memory accesses.
        """
        return max(0, sum(self.step_ns) - len(self.step_ns) * self.steady_step_ns)


def warm_up(stepper: Stepper, coordinator: Coordinator) -> WarmUp:
    """Run steps until two successive groups of steps compile nothing and have median step times within a tenth of each
    other, or until a cap, which is reported. End compile workers after the first step without compilation.

    The cap counts from the last compilation, so that a long compilation does not use it up.
    """
    durations: list[int] = []
    compiled = compilations()
    began = quiet_since = time.perf_counter()
    quiet_from = 0
    while True:
        stepper.synchronise()
        start = time.perf_counter_ns()
        stepper.step()
        stepper.synchronise()
        durations.append(time.perf_counter_ns() - start)
        if compilations() != compiled:
            compiled = compilations()
            quiet_since, quiet_from = time.perf_counter(), len(durations)
        else:
            end_compile_workers()
        steady = _is_steady(durations[quiet_from:]) and time.perf_counter() - began >= MIN_S
        quiet_steps = len(durations) - quiet_from
        spent = quiet_steps >= MIN_STEPS and (time.perf_counter() - quiet_since > CAP_S or quiet_steps >= MAX_STEPS)
        ended, steady = coordinator.agree((steady or spent, steady))
        if ended:
            return WarmUp(step_ns=tuple(durations), steady=steady)


def _is_steady(durations: list[int]) -> bool:
    # A group is a quarter of a second of steps or five, whichever is less: slow steps need fewer.
    span = SPAN if not durations or durations[-1] < 50_000_000 else 2 if durations[-1] < 1_000_000_000 else 1
    if len(durations) < max(MIN_STEPS, 2 * span):
        return False
    last, previous = median(durations[-span:]), median(durations[-2 * span : -span])
    return abs(last - previous) <= TOLERANCE * previous


def compilations() -> int:
    """Return a counter that changes whenever torch.compile has compiled something in this process (0 before its first
    use).
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    return num_graphs() + int(utils.counters["inductor"]["fxgraph_cache_miss"])
