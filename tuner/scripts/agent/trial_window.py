"""Timed windows of a trial: whole steps without a profiler, until they agree or their time is up.

A step in which the script does something else (an evaluation, a checkpoint, a rollout) belongs to no window. Time in
the loader is not taken for such work: restarting an epoch belongs to training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

from .files import SharedFolder
from .tensor_blocks import TensorBlock
from .window import STEADY_STEPS, Phase, Window, median, synchronise

INTRUDES, INTRUDES_SHARE = 3.0, 0.5
"""Thresholds of a step's time without loading: a multiple of the usual time, and a share of a window. A step above both
is taken to contain other work; shorter excesses are noise of the machine.
"""
SLOW_GUARDED_WARM_UP_STEPS = 2
"""Number of warm-up steps if steps are slow and guarded steps have already warmed up the same code. A trial then needs
no more steps than the inspection of the script (`window.LEAST_STEPS`), unless its loader works ahead.
"""
MOST_QUEUED = 32
"""Maximum number of additional warm-up steps, in which batches that were loaded ahead are used up."""


class TrialWindow(Window):
    """Timed windows of one process.

    Args:
        settings: Settings of the windows: warm_up_s, window_s, min_rounds, max_rounds, half_width, cap_s, profile,
            queue (batches that a loader may hold), guarded (whether guarded steps came before).
        loader_ns: Time in the loader during each step; the list grows by one with each step.

    Attributes:
        windows: Timed windows, as plain values.
        num_interrupted: Number of windows that other work interrupted.
    """

    def __init__(
        self,
        folder: SharedFolder,
        step_times_ns: Sequence[int],
        remaining: Callable[[], tuple[int, int] | None],
        settings: dict[str, Any],
        loader_ns: Sequence[int],
        blocks: Callable[[], list[TensorBlock]] = list,
    ) -> None:
        super().__init__(folder, step_times_ns, remaining, blocks)
        self._settings = settings
        self._loader_ns = loader_ns
        self._began_s = 0.0
        self._warmed_s = time.monotonic()
        self.windows: list[dict[str, int]] = []
        self.num_interrupted = 0
        self.num_warm_up = 0
        self.warm_up_ns = 0

    def _is_warm(self) -> bool:
        queued = min(MOST_QUEUED, self._settings["queue"])
        if self.num_steps == 1:
            self._warmed_s = time.monotonic()
        if time.monotonic() - self._warmed_s < self._settings["warm_up_s"]:
            return False
        if self._settings["guarded"] and self.num_steps and self._is_slow():
            return bool(self.num_steps >= SLOW_GUARDED_WARM_UP_STEPS + queued)
        return bool(self.num_steps >= STEADY_STEPS + queued) and super()._is_warm()

    def _begin_timing(self) -> None:
        super()._begin_timing()
        if self.phase is not Phase.TIMING:
            return
        self.num_warm_up, self.warm_up_ns = self.num_steps, sum(self._times_ns)
        usual_s = median(self._times_ns[-STEADY_STEPS:]) / 1e9
        self._block_steps = max(1, math.ceil(self._settings["window_s"] / max(usual_s, 1e-6)))
        self._began_s = time.monotonic()

    def _time_step(self) -> None:
        if self._begin_at is None:
            self._count_block()
        if self._begin_at is not None and self.num_steps >= self._begin_at and self._fits():
            self._begin_recording()

    def _count_block(self) -> None:
        if self._is_intruded():
            self.num_interrupted += 1
            self._begin_block()
            return
        num = self.num_steps - self._block_from
        if num < self._block_steps:
            return
        synchronise()
        now_ns = perf_counter_ns()
        self._block_times_ns.append((now_ns - self._block_begin_ns) / num)
        times = sorted(self._times_ns[-num:])
        self.windows.append(
            {
                "num_steps": num,
                "begin_ns": self._block_begin_ns,
                "duration_ns": now_ns - self._block_begin_ns,
                "step_p20_ns": times[len(times) // 5],
                "step_p50_ns": times[len(times) // 2],
                "step_p80_ns": times[min(len(times) - 1, 4 * len(times) // 5)],
            }
        )
        self._begin_block()
        if self._is_done():
            self._announce()

    def _begin_block(self) -> None:
        synchronise()
        self._block_from, self._block_begin_ns = self.num_steps, perf_counter_ns()

    def _is_intruded(self) -> bool:
        before = [step - loader for step, loader in zip(self._times_ns[:-1], self._loader_ns, strict=False)]
        usual_ns = median(before[-64:])
        own_ns = self._times_ns[-1] - self._loader_ns[-1]
        return bool(own_ns > max(INTRUDES * usual_ns, INTRUDES_SHARE * 1e9 * self._settings["window_s"]))

    def _is_done(self) -> bool:
        settings, count = self._settings, len(self.windows)
        spent = time.monotonic() - self._began_s >= settings["cap_s"]
        if spent or count >= settings["max_rounds"]:
            return True
        if count < settings["min_rounds"]:
            return False
        times = self._block_times_ns
        mean = sum(times) / count
        deviation = math.sqrt(sum((value - mean) ** 2 for value in times) / (count - 1))
        return bool(2 * deviation / math.sqrt(count) < settings["half_width"] * mean)

    def _begin_recording(self) -> None:
        if self._settings["profile"]:
            super()._begin_recording()
        else:
            self.phase, self.complete = Phase.OVER, True
