"""What reducing the gradients of a step costs on the measured links, with one choice or another.

DDP's buckets, levels and compression are choices of one thing: how gradients are averaged. Their costs are those of the
collectives that their hooks call (`tuner.training.hierarchy`, `tuner.training.compression`), by the alpha-beta model
(`tuner.network.collective_costs`). A flat reduction is that of the ring over all ranks as it was measured, not one put
together from its links.

Only ratios of costs are used: the breakdown says what communication takes today, waiting for others and for cores
included, and how much of that nothing hides. What can be hidden today can be hidden afterwards.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tuner.network.collective_costs import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, ring_ns, two_level_all_reduce_ns
from tuner.profiling.bounds import Situation, removable
from tuner.profiling.categories import Category
from tuner.records import Choice, Topology

MIB = 2**20
SLACK = 1.5
"""A bound allows a cost to be so many times smaller than the model of links that were fitted without error says."""
PARTS = {"fp16": 1 / 2, "bf16": 1 / 2, "int8": 1 / 4 + 1 / 256, "one_bit": 1 / 32 + 1 / 2048}
"""Of FP32 gradients: what is sent, the scales of blocks included."""
COPIED_PARTS = 5
"""Of the gradients: bytes that two levels write and read to pad a bucket, to fill it and to take it out again."""


class Reduction(NamedTuple):
    """Nanoseconds of a step's reductions, one after the other, and of the last, which no backward pass can hide."""

    total_ns: float
    last_ns: float


def reduction(situation: Situation, **changed: Choice) -> Reduction | None:
    """With the incumbent's choices and these instead; None where the links are not known, or DDP does not reduce."""
    topology = situation.environment.topology
    choices = {**situation.choices, **changed}
    if topology is None or choices.get("sharding", {}).get("mode", "ddp") not in ("ddp", "zero1"):
        return None
    times = [_bucket_ns(situation, topology, choices, size) for size in _buckets(situation, choices)]
    return Reduction(total_ns=sum(times), last_ns=times[-1])


def most_saved(situation: Situation, today: Reduction, then: Reduction) -> float:
    """The same as `saved`, if the model is wrong to the advantage of what is to be tried.

    Links that were measured beside other load have a large error of their fit, which either cost may have.
    """
    return saved(situation, today, then, slack=SLACK * (1 + _fit_error(situation)) ** 2)


def likely_saved(situation: Situation, today: Reduction, then: Reduction) -> float:
    """The same as `saved`, where the two use different links, whose errors do not cancel: the mean over a cost that is
    modelled too small by the error of the fit, as it is, or too large.
    """
    error = 1 + _fit_error(situation)
    return sum(saved(situation, today, then, slack=slack) for slack in (1 / error, 1.0, error)) / 3


def _fit_error(situation: Situation) -> float:
    topology = situation.environment.topology
    assert topology is not None, "costs are of known links"
    links = (topology.inside, topology.between, topology.whole)
    return max(link.fit_residual for link in links if link is not None)


def saved(situation: Situation, today: Reduction, then: Reduction, *, slack: float = 1.0) -> float:
    """Share of the step that is saved of exposed communication.

    Args:
        slack: The costs may be so many times smaller than the model says.
    """
    exposed = removable(situation, Category.COMMUNICATION)
    breakdown = situation.breakdown
    beside_ns = breakdown.overlapped.get(Category.COMMUNICATION, 0) / breakdown.num_steps
    taken = breakdown.share(Category.COMMUNICATION) + beside_ns / situation.step_ns
    left = [taken * cost_ns / slack / today.total_ns for cost_ns in then]
    return min(exposed, max(0.0, exposed - max(left[0] - (taken - exposed), left[1])))


def _buckets(situation: Situation, choices: dict[str, Choice]) -> list[float]:
    """Bytes of each, in the order of their reduction."""
    sizes = choices["ddp_buckets"]
    first, cap = (float(sizes[name] or 0) * MIB for name in ("first_bucket_mb", "bucket_cap_mb"))
    left = float(max(1, situation.workload.model.parameter_bytes))
    found = [min(first, left)]
    left -= found[0]
    whole, rest = divmod(left, cap)
    return [*found, *[cap] * int(whole), *([rest] if rest else [])]


def _bucket_ns(situation: Situation, topology: Topology, choices: dict[str, Choice], size_bytes: float) -> float:
    compression = choices["gradient_compression"]
    part = _sent_part(situation, compression)
    if choices["hierarchical_allreduce"]["levels"] == 2 and topology.inside and topology.between:
        ranks_per_host, num_hosts = topology.ranks_per_host, topology.num_hosts
        assert ranks_per_host is not None, "two levels have as many ranks on every host"
        copied_ns = COPIED_PARTS * size_bytes / (situation.environment.calibration.copy_bytes_per_s or 1e18) * 1e9
        return copied_ns + two_level_all_reduce_ns(
            size_bytes, ranks_per_host, num_hosts, topology.inside, topology.between, sent_part=part
        )
    ranks, link, sent_bytes = topology.num_ranks, topology.whole, part * size_bytes
    match compression["method"]:
        case "int8" | "one_bit":
            # The scales are sent by themselves.
            calls = ((stage, amount) for stage in (ALL_TO_ALL, ALL_GATHER) for amount in (sent_bytes, 0.0))
            return sum(ring_ns(stage, amount, ranks, link) for stage, amount in calls)
        case "dgc":
            return 2 * ring_ns(ALL_GATHER, ranks * sent_bytes / 2, ranks, link)
        case "powersgd":
            return 2 * ring_ns(ALL_REDUCE, sent_bytes / 2, ranks, link)
    return ring_ns(ALL_REDUCE, sent_bytes, ranks, link)


def _sent_part(situation: Situation, compression: Choice) -> float:
    """Bytes by those of the gradients, of one rank."""
    method = compression["method"]
    if method == "dgc":  # a value and its place, of four bytes each
        return min(2.0, 2 * float(compression["ratio"] or 0))
    if method == "powersgd":  # two thin matrices for a square one
        model = situation.workload.model
        side = math.sqrt(model.num_parameters / max(1, model.num_parameter_tensors))
        return min(1.0, 2 * float(compression["rank"] or 1) / max(1.0, side))
    return PARTS.get(str(method), 1.0)
