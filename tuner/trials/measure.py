"""Measurement of windows of a running job.

A window is a stretch of whole steps, from the loader's `next()` to the end of the optimizer's step,
with the profiler off and the device synchronised at its two edges only. It begins at a given batch of
the study's fixed order: the loader is moved there and what it still holds of the old position is
consumed first, untimed. So candidates are timed from the same sample on and with their queues in the
state that they have in a running epoch.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from steptune.tuner.records import DeviceReading, InputActivity, Window
from steptune.tuner.training.loader import outstanding_batches, ready_batches
from steptune.tuner.training.prefetcher import as_loaded
from steptune.tuner.trials.contention import CpuReading, foreign_share, own_seconds, read_cpu
from steptune.tuner.trials.device_watch import DeviceWatch
from steptune.tuner.trials.input_activity import InputMeter
from steptune.tuner.workloads.batches import EndlessBatches
from steptune.tuner.workloads.workload import first_length

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob

RESTART_EPOCHS = 2
MAX_COMPUTING_S = 1.0
"""Maximum pause, in seconds, before the change to the next epoch is timed. The pause simulates the computation of the
epoch's steps.
"""
QUEUES_PER_WINDOW = 3
AHEAD_SHARE = 0.75
"""Share of the loader's queue that must be filled for the loader to count as ahead of the model."""


class Stepper:
    """Runner of a job's steps on an endless stream of batches from its loader."""

    def __init__(self, job: TrainingJob, order: EndlessBatches | None) -> None:
        self.job = job
        self.order = order
        self.iterator: Iterator[Any] = iter(job.loader)
        self.last_loss: torch.Tensor | None = None

    def next_batch(self) -> Any:
        try:
            return next(self.iterator)
        except StopIteration:  # an iterable dataset has ended: its next epoch follows
            self.iterator = iter(self.job.loader)
            return next(self.iterator)

    def step(self) -> None:
        self.last_loss = self.job.step(self.next_batch())

    def synchronise(self) -> None:
        if self.job.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.job.device)

    def pause(self) -> None:
        """Stop the loader's workers, so that a trial that waits for its turn takes no processor time."""
        self._signal_workers(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_workers(signal.SIGCONT)

    def _signal_workers(self, number: int) -> None:
        for worker in getattr(self.iterator, "_workers", ()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, number)

    def move_to(self, position: int) -> None:
        """Move the loader to a batch, and discard the batches that it holds from the old position."""
        if self.order is not None:
            self.order.seek(position)
        for _ in range(outstanding_batches(self.iterator)):
            self.step()


def take_window(
    stepper: Stepper,
    *,
    round_number: int,
    position: int,
    num_steps: int,
    foreign_limit: float,
    total: Callable[[Sequence[float]], Sequence[float]] = lambda values: values,
    most: Callable[[Sequence[float]], Sequence[float]] = lambda values: values,
    watch: DeviceWatch | None = None,
) -> Window:
    """Time at least `num_steps` steps beginning at batch `position`. Samples are counted over all ranks; times are the
    slowest rank's.

    Where the loader is not ahead of the model, the window spans several times what it may hold, so
    that batches made before the window do not flatter it. Where batches are made of pools, or not every step averages
    the models of ranks, it spans whole rounds: a part of a pool may hold its shortest samples. It is void where others
    used the machine, or where a device was throttled or shared (`device_state.py`).

    Args:
        total: Function that sums values over the ranks.
        most: Function that returns the maximum of values over the ranks, and thereby starts the ranks together.
    """
    stepper.resume()
    stepper.move_to(position)
    stepper.synchronise()
    num_steps = int(most([_num_steps(stepper, num_steps)])[0])
    timed = _time_steps(stepper, num_steps, watch or DeviceWatch())
    stepper.pause()
    objected = float(timed.objection is not None)
    own_s = own_seconds(timed.cpu_before, timed.cpu_after)
    num_samples, num_units, own_s, objections = total([timed.num_samples, timed.num_units, own_s, objected])
    share = foreign_share(timed.cpu_before, timed.cpu_after, own_s)
    times = most([float(timed.duration_ns), *np.quantile(timed.steps_ns, (0.2, 0.5, 0.8)).tolist()])
    duration, p20, p50, p80 = (int(value) for value in times)
    return Window(
        round=round_number,
        position=position,
        num_steps=num_steps,
        num_samples=int(num_samples),
        num_units=int(num_units),
        duration_ns=duration,
        step_p20_ns=p20,
        step_p50_ns=p50,
        step_p80_ns=p80,
        queue_depth_start=timed.queue_depth_start,
        queue_depth_end=timed.queue_depth_end,
        foreign_cpu_share=share,
        void=_why_void(share, foreign_limit, timed.objection, any_rank_objects=bool(objections)),
        input=timed.input_activity,
        device=timed.device,
    )


def _num_steps(stepper: Stepper, least: int) -> int:
    """Return the number of steps in a window: at least `least`, rounded up to whole rounds. If the loader's queue is
    not nearly full, return at least several times its capacity.
    """
    capacity = stepper.job.plan.loader.capacity
    if ready_batches(stepper.iterator) < AHEAD_SHARE * capacity:
        least = max(least, QUEUES_PER_WINDOW * capacity)
    pool = stepper.order.pool if stepper.order is not None else 1
    steps = math.lcm(pool, stepper.job.steps_per_round)
    return -(-least // steps) * steps


@dataclass(frozen=True, kw_only=True)
class _TimedSteps:
    """Steps of a window, as timed by this rank.

    Attributes:
        objection: Reason for which its device voids the window, or None.
    """

    num_samples: float
    num_units: float
    duration_ns: int
    steps_ns: np.ndarray
    queue_depth_start: int
    queue_depth_end: int
    cpu_before: CpuReading | None
    cpu_after: CpuReading | None
    input_activity: InputActivity
    device: DeviceReading | None
    objection: str | None


def _time_steps(stepper: Stepper, num_steps: int, watch: DeviceWatch) -> _TimedSteps:
    """Time the steps of a window. The states of the machine and the device are read before and after the steps."""
    workload = stepper.job.workload
    num_samples = num_units = 0.0
    ticks = np.empty(num_steps + 1, dtype=np.int64)
    depth_start = ready_batches(stepper.iterator)
    meter = InputMeter(stepper.iterator)
    watch.begin()
    before = read_cpu(time.perf_counter())
    ticks[0] = time.perf_counter_ns()
    for number in range(num_steps):
        batch = meter.next(stepper.next_batch)
        counted = as_loaded(stepper.iterator, batch)
        num_samples += first_length(counted)
        num_units += workload.num_units(counted)
        stepper.last_loss = stepper.job.step(batch)
        ticks[number + 1] = time.perf_counter_ns()
    stepper.synchronise()
    end = time.perf_counter_ns()
    after = read_cpu(time.perf_counter())
    activity = meter.finish()
    reading, objection = watch.end()
    return _TimedSteps(
        num_samples=num_samples,
        num_units=num_units,
        duration_ns=end - int(ticks[0]),
        steps_ns=np.diff(ticks),
        queue_depth_start=depth_start,
        queue_depth_end=ready_batches(stepper.iterator),
        cpu_before=before,
        cpu_after=after,
        input_activity=activity,
        device=reading,
        objection=objection,
    )


def _why_void(foreign_share: float, limit: float, objection: str | None, *, any_rank_objects: bool) -> str | None:
    if foreign_share > limit:
        return f"other programs used {foreign_share:.0%} of the cores"
    if objection is None and any_rank_objects:
        return "the device of another rank was throttled or shared"
    return objection


def epoch_restart_ns(
    make_loader: Callable[[Any], Any], batches: list[list[int]], steady_wait_ns: float, step_time_ns: int = 0
) -> int:
    """Measure the time from the last batch of an epoch to the first batch of the next, beyond the usual wait for a
    batch.

    Args:
        make_loader: Function that builds a loader of the measured settings over a finite batch sampler.
        batches: The batches of one (short) epoch.
        steady_wait_ns: Wait for one batch in the middle of an epoch.
        step_time_ns: Time of a step, during which workers that begin an epoch ahead load for the next one.
    """
    loader = make_loader(batches)
    ahead = getattr(loader, "epochs_ahead", False)  # other workers have nothing to do before an epoch's end
    computing_s = min(MAX_COMPUTING_S, len(batches) * step_time_ns / 1e9) if ahead else 0.0
    for _ in loader:
        pass
    costs = []
    for _ in range(RESTART_EPOCHS):
        iterator = iter(loader)
        for _ in range(len(batches)):
            next(iterator)
        time.sleep(computing_s)
        began = time.perf_counter_ns()
        next(iterator, None)
        del iterator
        iterator = iter(loader)
        next(iterator)
        costs.append(time.perf_counter_ns() - began)
        del iterator
    return max(0, int(np.median(costs) - steady_wait_ns))
