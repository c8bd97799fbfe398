"""device_prefetch: copy the next batch to the device while the current one is computed.

Mechanism: the loader's next batch is copied on a stream of its own, by the device's copy engine, while its compute
units work on the batch before. `as_bytes` copies the workload's byte form (images as uint8, a quarter of the bytes)
and converts it on that stream.

Helps: exposed copies to the device. Hurts: one more batch lies in device memory; where copies are hidden already it
brings nothing.

Numerics: `exact` (the same bytes, earlier); `as_bytes` is `rounding` (the device converts instead of the processor).

Sources: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html ,
https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported, needs_cuda
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.device_prefetch.choice import DevicePrefetchSetting
from steptune.tuner.strategies.device_prefetch.conflicts import CONFLICTS, DROPPED, TOGETHER

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan
    from steptune.tuner.workloads.workload import Workload


class DevicePrefetch(Strategy):
    setting = DevicePrefetchSetting
    conflicts = CONFLICTS
    dropped = DROPPED
    together = TOGETHER
    summary = "copy of the next batch on a side stream, in byte form if the workload provides one"
    needs_workload = "the script's own code copies batches to the device"
    attacks = (Category.COPY_H2D, Category.QUEUED)
    cures = (Cure.COPY_AHEAD,)
    usual_realisation = 0.8

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return ({"ahead": True, "as_bytes": True}, {"ahead": True, "as_bytes": False})

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if not choice["ahead"]:
            return Supported()
        if choice["as_bytes"] and not workload.byte_form:
            return Unsupported("requires Workload.byte_dataset and Workload.from_bytes")
        return needs_cuda(environment)

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING if choice["as_bytes"] else Numerics.EXACT

    def contribute(self, plan: Plan, choice: Choice) -> None:
        plan.loader.device_prefetch = bool(choice["ahead"])
        if choice["ahead"] and choice["as_bytes"]:
            plan.loader.as_bytes = True
            plan.dataset.append(_in_bytes)

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        current = situation.choices[self.name]
        if current["ahead"] and (current["as_bytes"] or not choice["as_bytes"]):
            return {}
        # Bytes are a quarter of the data for whoever loads them, too.
        waits = (Category.DATA_WAIT,) if choice["as_bytes"] else ()
        # The host waits for a copy on the stream that computes, and launches late what comes after it.
        return without(situation, Category.COPY_H2D, Category.QUEUED, *waits)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        from steptune.tuner.training.prefetcher import PrefetchingLoader

        ahead = isinstance(job.loader, PrefetchingLoader)
        return {"ahead": ahead, "as_bytes": ahead and job.plan.loader.as_bytes}


def _in_bytes(dataset: Any, workload: Workload) -> Any:
    return workload.byte_dataset(dataset)
