"""Estimates of the loading time that a different `data_loading` choice saves."""

from __future__ import annotations

from steptune.tuner.costs.bounds import Savings, Situation, part_of, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.strategies.api import Settings
from steptune.tuner.strategies.cpu_threads.choice import CpuThreadsSetting
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.larger_global_batch.choice import LargerGlobalBatchSetting

FASTER_IN_A_WORKER = 2.0
"""Assumed speedup from making a batch in a single-threaded worker process. In the main process, several threads wait
for each other over small tensors. A ResNet over JPEG files on two cores showed 1.4.
"""


def without_crowding(situation: Situation) -> Savings:
    """Return the maximum savings if loader workers stop taking cores from the step's own computation.

    Where the step computes on the host, and its threads and the workers are more than the cores, each second that a
    worker computes, or queues for a core, delays the step by a second at most.
    """
    settings, hardware = Settings(situation.choices), situation.environment.hardware
    workers = settings[DataLoadingSetting].num_workers
    threads = settings[CpuThreadsSetting].num_threads or hardware.num_cores
    ranks = max(1, situation.environment.num_ranks)
    if hardware.device_kind != "cpu" or not workers or ranks * (workers + threads) <= hardware.num_cores:
        return {}
    busy = 1.0 if situation.input is None else situation.input.runnable_share
    computing = without(situation, *(c for c in Category if c not in (Category.DATA_WAIT, Category.EPOCH_RESTART)))
    share = sum(computing.values())
    return part_of(computing, min(1.0, workers * busy / share)) if share else {}


def pipelined_input(situation: Situation, num_workers: int) -> float:
    """Return the share of the step that loader workers can hide: the wait for data, limited by the workers' own rate.

    T' >= max(everything but the wait, batch time / (FASTER_IN_A_WORKER * workers)). The time of one batch is known only
    when the incumbent loads in the main process, where the wait is that time.
    """
    wait = situation.time_ns((Category.DATA_WAIT, Category.EPOCH_RESTART))
    rest = situation.step_ns - wait
    current = Settings(situation.choices)[DataLoadingSetting].num_workers
    batch_ns = situation.time_ns((Category.DATA_WAIT,)) if current == 0 else 0.0
    floor = max(rest, batch_ns / (FASTER_IN_A_WORKER * max(1, num_workers)))
    return max(0.0, 1.0 - floor / situation.step_ns)


def input_without_workers(situation: Situation) -> float:
    """Return the expected saving, as a share of the step, of loading in the main process. Starting the incumbent's
    workers and waiting for them is saved, but the device waits while a batch is loaded. Negative if loading in the main
    process takes longer.

    This is an estimate: samples that are cached, or requested as a batch, load faster than in the inspection.
    """
    wait = situation.time_ns((Category.DATA_WAIT, Category.EPOCH_RESTART))
    merged = Settings(situation.choices)[LargerGlobalBatchSetting].factor
    per_rank = merged * situation.workload.global_batch / max(1, situation.environment.num_ranks)
    sample_ns = situation.workload.dataset.sample_ns
    assert sample_ns is not None, "the time of a sample must be known"
    batch_ns = sample_ns * per_rank
    return (wait - batch_ns) / situation.step_ns
