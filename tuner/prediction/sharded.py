"""The tasks of a step under FSDP2: the parameters of each unit are all-gathered just ahead of its compute, and its
gradients are reduce-scattered.

    forward      gather 1 | gather 2 ...           unit u computes when it is gathered; unit u + prefetch + 1 is
                            compute 1 | compute 2   gathered when unit u has computed
    backward     the same in the reverse order, gathered again where parameters were freed; after each unit its
                 gradients are reduced and scattered

Hybrid sharding gathers and scatters inside every host, then all-reduces each part between hosts. Every micro-batch
gathers and scatters. A rank updates its part.
"""

from __future__ import annotations

from collections.abc import Mapping

from steptune.tuner.prediction.cluster import Cluster
from steptune.tuner.prediction.overheads import scattered_bytes
from steptune.tuner.prediction.step import ComputeStep
from steptune.tuner.prediction.timeline import Lane, Task
from steptune.tuner.prediction.volumes import Volumes
from steptune.tuner.records import Choice
from steptune.tuner.strategies.api import Settings
from steptune.tuner.strategies.sharding.choice import ShardingSetting
from steptune.tuner.strategies.situations import exchange_of


def sharded_tasks(step: ComputeStep, volumes: Volumes, cluster: Cluster, choices: Mapping[str, Choice]) -> list[Task]:
    """Return the compute and communication tasks of a step under FSDP2.

    Args:
        choices: Complete choices, with mode "full", "grad_op" or "hybrid" in `sharding`.
    """
    exchange = exchange_of(choices)
    hybrid = exchange.mode == "hybrid"
    units = volumes.num_units
    ahead = Settings(choices)[ShardingSetting].prefetch
    gather_bytes = volumes.num_elements * volumes.formats.gathered / units
    scatter_bytes = volumes.num_trained * scattered_bytes(exchange, volumes) / units
    gather_ns = cluster.gathered_inside_ns(gather_bytes) if hybrid else cluster.all_gather_ns(gather_bytes)
    if hybrid:
        scatter_ns = cluster.scattered_inside_ns(scatter_bytes) + cluster.reduced_between_ns(scatter_bytes)
    else:
        scatter_ns = cluster.reduce_scatter_ns(scatter_bytes)
    tasks = [Task(lane=Lane.COMPUTE, work_ns=step.before_ns)]
    count = step.num_micro_batches
    for number in range(count):
        reduces = exchange.reduce_each or number == count - 1
        _pass(tasks, step.forward_ns / count, units, ahead, gather_ns, None)
        regathered_ns = gather_ns if exchange.frees else None
        _pass(tasks, step.backward_ns / count, units, ahead, regathered_ns, scatter_ns if reduces else None)
    parts = cluster.devices_per_host if hybrid else cluster.num_ranks
    scattered = tuple(n for n, task in enumerate(tasks) if task.lane is Lane.COMMUNICATION)[-1:]
    tasks.append(Task(lane=Lane.COMPUTE, work_ns=step.update_ns(parts), after=scattered))
    return tasks


def _pass(
    tasks: list[Task], compute_ns: float, units: int, ahead: int, gather_ns: float | None, scatter_ns: float | None
) -> None:
    """Append the tasks of one pass over all units."""
    computed = [len(tasks) - 1] * (ahead + 1)  # what each gather comes after: at first what was before this pass
    gathered: list[int] = []

    def gather(unit: int) -> None:
        if gather_ns is not None and unit < units:
            gathered.append(len(tasks))
            tasks.append(Task(lane=Lane.COMMUNICATION, work_ns=gather_ns, after=(computed[unit],)))

    last_compute = len(tasks) - 1
    for unit in range(min(ahead, units)):
        gather(unit)
    for unit in range(units):
        gather(unit + ahead)
        after = (last_compute, *gathered[unit : unit + 1])
        tasks.append(Task(lane=Lane.COMPUTE, work_ns=compute_ns / units, after=after))
        last_compute = len(tasks) - 1
        computed.append(last_compute)
        if scatter_ns is not None:
            tasks.append(Task(lane=Lane.COMMUNICATION, work_ns=scatter_ns, after=(last_compute,)))
