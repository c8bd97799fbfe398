"""The tasks of a step under DDP: buckets of gradients are reduced during the backward pass; with ZeRO-1, ranks also
send their parts of the updated parameters at the end of the step.

    before | forward | backward, in pieces: one a bucket | optimizer
                             reduction of each bucket, as soon as its piece is done

All micro-batches but the last only compute (`no_sync`). The update waits for all reductions. Under ZeRO-1 a rank
updates its part, and all parts are then sent to all ranks, which nothing hides.

A reduction is an all-reduce over all ranks, one in two levels (`hierarchical_allreduce`), or a compressed exchange,
over all ranks or between hosts only.
"""

from __future__ import annotations

from collections.abc import Mapping

from steptune.tuner.prediction.cluster import Cluster
from steptune.tuner.prediction.compression import sending_ns, sent_part_between
from steptune.tuner.prediction.step import ComputeStep
from steptune.tuner.prediction.timeline import Lane, Task
from steptune.tuner.prediction.volumes import Volumes, buckets
from steptune.tuner.records import Choice
from steptune.tuner.strategies.api import Settings
from steptune.tuner.strategies.ddp_buckets.choice import DdpBucketsSetting
from steptune.tuner.strategies.gradient_compression.choice import GradientCompressionSetting
from steptune.tuner.strategies.hierarchical_allreduce.choice import HierarchicalAllreduceSetting
from steptune.tuner.strategies.sharding.choice import ShardingSetting
from steptune.tuner.training.compression.own_cost import OwnCost


def data_parallel_tasks(
    step: ComputeStep,
    volumes: Volumes,
    cluster: Cluster,
    choices: Mapping[str, Choice],
    own_costs: Mapping[str, OwnCost],
) -> list[Task]:
    """Return the compute and communication tasks of a step under DDP or ZeRO-1.

    Args:
        choices: Complete choices, with mode "ddp" or "zero1" in `sharding`.
        own_costs: Compute time of compressions, by method.
    """
    last = 1 / step.num_micro_batches
    until_backward_ns = step.before_ns + step.forward_ns + (1 - last) * step.backward_ns
    tasks = [Task(lane=Lane.COMPUTE, work_ns=until_backward_ns)]
    reductions: list[int] = []
    costs_ns: dict[float, float] = {}
    for elements in buckets(volumes, choices[DdpBucketsSetting.strategy]):
        share = elements / volumes.num_trained
        if elements not in costs_ns:
            costs_ns[elements] = reduction_ns(elements, volumes, cluster, choices, own_costs)
        tasks.append(Task(lane=Lane.COMPUTE, work_ns=share * last * step.backward_ns))
        tasks.append(Task(lane=Lane.COMMUNICATION, work_ns=costs_ns[elements], after=(len(tasks) - 1,)))
        reductions.append(len(tasks) - 1)
    in_parts = Settings(choices)[ShardingSetting].mode == "zero1"
    update_ns = step.update_ns(cluster.num_ranks if in_parts else 1)
    tasks.append(Task(lane=Lane.COMPUTE, work_ns=update_ns, after=tuple(reductions[-1:])))
    if in_parts:
        # Broadcasts from every rank of its part: the bytes of an all-gather, call by call.
        part_bytes = volumes.num_trained * volumes.formats.updated
        tasks.append(Task(lane=Lane.COMMUNICATION, work_ns=cluster.all_gather_ns(part_bytes), after=(len(tasks) - 1,)))
    return tasks


def reduction_ns(
    num_elements: float,
    volumes: Volumes,
    cluster: Cluster,
    choices: Mapping[str, Choice],
    own_costs: Mapping[str, OwnCost],
) -> float:
    """Return the time of reducing one bucket, until its average is on all ranks."""
    if cluster.num_ranks == 1:
        return 0.0
    compression = choices[GradientCompressionSetting.strategy]
    formats = volumes.formats
    message_bytes = num_elements * (formats.gradient if compression["method"] else formats.reduced)
    if Settings(choices)[HierarchicalAllreduceSetting].levels == 2:
        inside_ns = cluster.scattered_inside_ns(message_bytes) + cluster.gathered_inside_ns(message_bytes)
        if compression["method"] is None:
            return inside_ns + cluster.reduced_between_ns(message_bytes)
        method = str(compression["method"])
        part = sent_part_between(method, volumes)
        compressing_ns = own_costs[method].of(num_elements / cluster.devices_per_host)
        return inside_ns + cluster.reduced_between_ns(message_bytes, part) + compressing_ns
    if compression["method"] is None:
        return cluster.all_reduce_ns(message_bytes)
    own_ns = own_costs[str(compression["method"])].of(num_elements)
    return own_ns + sending_ns(compression, num_elements, volumes, cluster)
