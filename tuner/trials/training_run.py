"""Training of a configuration for a number of steps, as a user would train, to record its loss curve.

On as many ranks as the study has, each on its part of every batch: statistics over a batch are not those of one
process.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from steptune.tuner.records import Choice, Record
from steptune.tuner.strategies.combine import make_plan
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.initial_state import build_initialised
from steptune.tuner.training.prefetcher import as_loaded
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.measure import Stepper
from steptune.tuner.trials.messages import Channel, TaskProgress
from steptune.tuner.trials.rank_device import rank_device
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.trials.trial import fill_cache, loader_worker_init
from steptune.tuner.workloads.loading import load_workload

if TYPE_CHECKING:
    import torch

    from steptune.tuner.workloads.workload import Workload

MAX_UNTIMED_STEPS = 10
"""Maximum number of untimed steps at the beginning, for compilation, the start of loader workers, and the filling of
their queue.
"""


class TrainRequest(Record):
    """Request of the parent to train a configuration."""

    workload: str
    study_directory: str
    choices: dict[str, Choice]
    device: str
    num_steps: int
    seed: int
    run_id: str = ""
    """Name of the rendezvous folder of this run's ranks, if there are several; unique to the run."""


class LossCurve(Record):
    """Losses by step, and the duration of the steps after the untimed ones."""

    losses: tuple[float, ...]
    """Losses by step, averaged over the ranks."""
    duration_s: float
    """Seconds taken by the steps after the first `num_untimed_steps`; `num_units` covers the same steps."""
    num_units: int
    """Samples or tokens of all ranks in the timed steps."""
    num_untimed_steps: int = 0
    skipped_steps: int = 0
    """Number of updates that a loss scaler skipped."""

    @property
    def finite(self) -> bool:
        return all(math.isfinite(loss) for loss in self.losses)


def train(request: TrainRequest, rank: int, num_ranks: int, channel: Channel) -> LossCurve:
    """Train from the study's initial state through the configuration's own loader. Every rank returns the same
    result.
    """
    files = StudyFiles(Path(request.study_directory))
    workload = load_workload(request.workload)
    workload.directory = files.data
    device = rank_device(request.device, rank)
    coordinator = Coordinator(rank, num_ranks, channel, files.trial_directory(request.run_id), device)
    stepper = _at_the_beginning(workload, request, files, device, rank, num_ranks)
    num_untimed = min(MAX_UNTIMED_STEPS, request.num_steps // 2)
    losses: list[float] = []
    units = 0.0
    began = last_said = time.monotonic()
    for number in range(request.num_steps):
        if number == num_untimed:
            stepper.synchronise()
            began, units = time.monotonic(), 0.0
        batch = stepper.next_batch()
        units += workload.num_units(as_loaded(stepper.iterator, batch))
        losses.append(float(stepper.job.step(batch)))
        if time.monotonic() - last_said > 1.0:
            last_said = time.monotonic()
            coordinator.send(TaskProgress(text=f"step {number + 1} of {request.num_steps}, loss {losses[-1]:.4g}"))
    stepper.synchronise()
    duration_s = coordinator.agree(time.monotonic() - began)
    *losses, units = coordinator.total([*losses, units])
    return LossCurve(
        losses=tuple(loss / num_ranks for loss in losses),
        duration_s=duration_s,
        num_units=round(units),
        num_untimed_steps=num_untimed,
        skipped_steps=stepper.job.skipped_steps,
    )


def _at_the_beginning(
    workload: Workload, request: TrainRequest, files: StudyFiles, device: torch.device, rank: int, num_ranks: int
) -> Stepper:
    """Build a job of the configuration with the study's initial state and order of batches."""
    import torch

    torch.manual_seed(request.seed)
    order = files.order(rank, num_ranks)
    job = assemble(
        workload,
        make_plan(request.choices),
        device=device,
        rank=rank,
        num_ranks=num_ranks,
        make_model=lambda: build_initialised(workload.model, files.initial_state),
        batch_sampler=order,
        worker_init=loader_worker_init,
    )
    if order is not None:
        order = job.loader.batch_sampler  # in the batches of the plan
    fill_cache(job, files)
    torch.manual_seed(request.seed)
    return Stepper(job, order)
