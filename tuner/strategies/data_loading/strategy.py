"""data_loading: how the DataLoader reads ahead.

Mechanism: worker processes load and collate batches while the model computes; `prefetch_factor`
batches per worker wait in a queue; `persistent_workers` keeps the processes from one epoch to the
next; `epochs_ahead` lets them begin the next epoch before the current one ends
(`training/epochs_ahead.py`); `pin_memory` copies batches to page-locked memory, from which the device
copies faster and asynchronously.

Helps: when the step waits for data, or short epochs pay for starting workers again and again.
Hurts: workers compete with the model for cores, cost memory, and each batch is copied between
processes, so that samples which load in no time are better loaded without workers. More workers than
cores can still help where loading waits for a disk or a network.

Numerics: `sampling`. The same indices in the same order; random augmentation draws from other
generators.

Source: https://docs.pytorch.org/docs/stable/data.html
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import (
    Savings,
    Situation,
    jointly,
    removable,
    without,
)
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice, Effect, Environment, Numerics, Scalar, ScriptFacts, WorkloadFacts
from steptune.tuner.strategies.api import (
    HARDLY,
    NeedsWorkload,
    Outside,
    Strategy,
    Support,
    Supported,
    Unsupported,
    Way,
)
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.data_loading.conflicts import DROPPED, TOGETHER
from steptune.tuner.strategies.data_loading.costs import input_without_workers, pipelined_input, without_crowding

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan


WITHOUT_WORKERS_PART = 0.9
"""Share of its estimated saving that loading without workers usually realises. The estimate uses the measured time of a
sample.
"""
SHORT_EPOCH_STEPS = 1000
"""Maximum length of an epoch, in steps, at which loading the next epoch ahead is worth a trial."""
PINNED_PART = 0.5
"""Share of the time spent on copies and on waiting for them that pinned memory is expected to save."""


class DataLoading(Strategy):
    setting = DataLoadingSetting
    dropped = DROPPED
    together = TOGETHER
    summary = (
        "DataLoader settings: worker processes, prefetch depth, pinned memory, persistent workers, early start of "
        "the next epoch"
    )
    attacks = (Category.DATA_WAIT, Category.EPOCH_RESTART, Category.COPY_H2D, Category.QUEUED)
    cures = (
        Cure.MAKE_BATCHES_SOONER,
        Cure.READ_LESS_OFTEN,
        Cure.KEEP_WORKERS,
        Cure.PIN_BATCHES,
    )
    usual_realisation = 0.6
    trial_cost_s = 2.0

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        cores = max(1, environment.hardware.num_cores // environment.num_ranks)
        counts = sorted({1, cores // 2 or 1, cores, cores + cores // 2, 2 * cores}, key=lambda n: (abs(n - cores), n))
        pinned = (True, False) if environment.hardware.device_kind == "cuda" else (False,)
        kept = workload.script is None or self._keeps_workers(workload)
        ahead: list[Choice] = [
            {**self.defaults, "num_workers": n, "prefetch_factor": depth, "persistent_workers": kept, "pin_memory": pin}
            for depth in (2, 4)
            for n in counts
            for pin in pinned
        ]
        pin_only: list[Choice] = [{**self.neutral(workload), "pin_memory": True}] if len(pinned) > 1 else []
        if (workload.steps_per_epoch or math.inf) <= SHORT_EPOCH_STEPS and workload.script is None:
            ahead += [{**choice, "epochs_ahead": True} for choice in ahead if choice["prefetch_factor"] == 2]
        if not self.neutral(workload)["num_workers"]:
            return (*ahead, *pin_only)
        alone: list[Choice] = [{**self.defaults, "pin_memory": pin} for pin in pinned]
        return (*ahead, *pin_only, *alone)

    def _keeps_workers(self, workload: WorkloadFacts) -> bool:
        today = self.neutral(workload)
        return bool(today["num_workers"] and today["persistent_workers"])

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        changes_between_epochs = workload.script is not None and not self._keeps_workers(workload)
        if choice["persistent_workers"] and choice["num_workers"] and changes_between_epochs:
            return Unsupported(
                "persistent workers would miss changes that the script makes to its dataset between epochs, and "
                "Steptune does not know the script's loop"
            )
        if choice["epochs_ahead"] and (reason := _unknown_order(environment, workload)):
            return Unsupported(reason)
        if choice["pin_memory"] and environment.hardware.device_kind != "cuda":
            return Unsupported("pinned memory requires a CUDA device")
        if workload.dataset.kind == "iterable" and int(choice["num_workers"] or 0) > 1:
            return Unsupported(
                f"requires at most 1 worker for an iterable dataset, got {choice['num_workers']}: every worker "
                "reads the whole stream unless the dataset splits it with get_worker_info(); use a map-style "
                "dataset to tune num_workers"
            )
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.SAMPLING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        plan.loader.num_workers = int(choice["num_workers"] or 0)
        plan.loader.prefetch_factor = int(choice["prefetch_factor"] or 2)
        plan.loader.persistent_workers = bool(choice["persistent_workers"])
        plan.loader.pin_memory = bool(choice["pin_memory"])
        plan.loader.epochs_ahead = bool(choice["epochs_ahead"])

    def outside(self, choice: Choice, script: ScriptFacts) -> Outside | NeedsWorkload:
        if script.loader is None:
            return NeedsWorkload("the script makes its batches without a DataLoader")
        workers = int(choice["num_workers"] or 0)
        settings: dict[str, Scalar] = {
            "num_workers": workers,
            "pin_memory": choice["pin_memory"],
            "prefetch_factor": choice["prefetch_factor"] if workers else None,
            "persistent_workers": bool(choice["persistent_workers"] and workers),
        }
        said = ", ".join(f"{name}={value}" for name, value in settings.items() if name == "num_workers" or value)
        changes = {f"loader.{name}": value for name, value in settings.items()}
        return Outside(way=Way.FORK, changes=changes, words=f"{script.loader}({said})", at="loader")

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        current = situation.choices[self.name]
        hidden = self._hidden_at_most(situation, choice)
        starts = min(hidden, removable(situation, Category.EPOCH_RESTART))
        found: Savings = {Category.EPOCH_RESTART: starts, Category.DATA_WAIT: hidden - starts}
        if int(choice["num_workers"] or 0) < int(current["num_workers"] or 0):
            found = jointly(found, without_crowding(situation))
        if choice["pin_memory"] and not current["pin_memory"]:
            # The host waits for a copy of pageable memory, and launches late what comes after it.
            return jointly(found, without(situation, Category.COPY_H2D, Category.QUEUED))
        return found

    def expected(self, situation: Situation, choice: Choice) -> float | None:
        """Return the expected saving: workers hide the wait for data, and pinned memory lets copies overlap work of the
        host. Without a wait to hide, workers only pass batches on, so pinned memory alone is tried first. Little is
        expected of giving up workers where the time of a sample is not known.
        """
        best = self._hidden_at_most(situation, choice)
        hidden = best
        if not choice["num_workers"] and situation.choices[self.name]["num_workers"]:
            if situation.workload.dataset.sample_ns is None:
                return HARDLY
            hidden = input_without_workers(situation)
        if choice["num_workers"] and not hidden:
            return HARDLY
        if hidden < 0:
            return max(-1.0, hidden)
        part = self.usual_realisation if choice["num_workers"] else WITHOUT_WORKERS_PART
        return part * hidden + PINNED_PART * (self.bound(situation, choice) - best)

    def _hidden_at_most(self, situation: Situation, choice: Choice) -> float:
        """Return an upper bound of the share of the step that a choice hides. If the choice drops the current workers,
        this is all the time spent on starting them and waiting for them, because the loading time of a batch in the
        main process is not known well enough.
        """
        if choice["num_workers"]:
            return pipelined_input(situation, int(choice["num_workers"]))
        if situation.choices[self.name]["num_workers"]:
            return removable(situation, Category.DATA_WAIT, Category.EPOCH_RESTART)
        return 0.0

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        loader = job.loader
        return {
            "num_workers": loader.num_workers,
            "persistent_workers": loader.persistent_workers,
            "pin_memory": loader.pin_memory,
            "prefetch_factor": loader.prefetch_factor,
            "epochs_ahead": getattr(loader, "epochs_ahead", False),
        }

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        wanted = dict(choice)
        if not wanted["num_workers"]:
            wanted = {"num_workers": 0, "pin_memory": wanted["pin_memory"]}
        return super().took_effect(evidence, wanted)


def _unknown_order(environment: Environment, workload: WorkloadFacts) -> str | None:
    """Return the reason why the samples of the next epoch are not known before that epoch begins; None if they are
    known.
    """
    if workload.script is not None:
        return "Steptune does not know when the epochs of a script begin"
    if workload.dataset.kind == "iterable":
        return "the end of an iterable dataset's epoch is not known in advance"
    if environment.hardware.device_kind == "cpu" and workload.randomness != "none":
        return (
            "the model and the shuffling sampler share a random generator, so the order of the next epoch is not "
            "known in advance"
        )
    return None
