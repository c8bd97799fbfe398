"""Cost of averaging the gradients of a step on the measured links, for each choice of how to communicate.

DDP's buckets, levels and compression all decide how gradients are averaged. Their costs are those of the
collectives that their hooks call (`tuner.training.hierarchy`, `tuner.training.compression`), by the alpha-beta model
(`tuner.network.collective_costs`). FSDP scatters gradients, and gathers weights besides. The cost of a
flat reduction is that of the measured ring over all ranks, not one composed from single links.

Only ratios of costs are used: the breakdown says what communication takes today, waiting for others and for cores
included, and how much of that is exposed. What can be hidden today can be hidden afterwards.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from steptune.tuner.costs.bounds import Situation, removable
from steptune.tuner.costs.categories import Category
from steptune.tuner.costs.formats import (
    CHOSEN_BYTES,
    FP32_BYTES,
    SENT_BYTES,
    Formats,
    formats_of,
    num_fsdp_units,
    widening_bytes,
)
from steptune.tuner.costs.sockets import with_sockets
from steptune.tuner.network.collective_costs import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    ring_ns,
    two_level_all_reduce_ns,
)
from steptune.tuner.network.exchange import Exchange
from steptune.tuner.records import Topology
from steptune.tuner.training.compression.own_cost import own_costs

MIB = 2**20
SLACK = 1.5
"""Maximum factor by which a cost may be below the model's estimate; bounds assume this factor."""
COPIED_PARTS = 5
"""Number of gradient-sized reads and writes that a two-level reduction needs to pad, fill and empty a bucket."""


class Reduction(NamedTuple):
    """Nanoseconds of a step's reductions: `total_ns` for all of them in sequence, and `last_ns` for the part that no
    compute can hide (the last reduction, the first gathering of weights, and sending an update).
    """

    total_ns: float
    last_ns: float


def reduction(situation: Situation, *, compressing: bool = False, **changed: Any) -> Reduction | None:
    """Return the cost of reductions under the incumbent's exchange, with the fields in `changed` replaced; None if the
    links are unknown or ranks exchange something else (activations of a sharded model, or weights every few steps).

    Args:
        compressing: Add the time of compression itself, which is no part of a bound.
    """
    topology = situation.environment.topology
    if topology is None:
        return None
    exchange = replace(situation.exchange, **changed)
    if exchange.model_ranks > 1 or exchange.every != 1:
        return None
    topology = with_sockets(topology, exchange.sockets, situation.exchange_today.sockets)
    if exchange.is_sharded:
        return _sharded(situation, topology, exchange)
    formats = formats_of(situation.workload.model, topology.num_ranks, exchange)
    sizes = _buckets(situation, exchange, formats)
    times = [_bucket_ns(situation, topology, exchange, formats, num_elements) for num_elements in sizes]
    if compressing:
        times = [sum(both) for both in zip(times, _compressing_ns(situation, exchange, sizes), strict=True)]
    updates_ns = 0.0
    if exchange.mode == "zero1":  # each rank's part of the update, sent to all when it is made
        bytes_sent = max(1, situation.workload.model.num_trained) * formats.updated
        updates_ns = ring_ns(ALL_GATHER, bytes_sent, topology.num_ranks, topology.whole)
    return Reduction(total_ns=sum(times) + updates_ns, last_ns=times[-1] + updates_ns)


def most_saved(situation: Situation, today: Reduction, then: Reduction) -> float:
    """Return the largest share of the step that a change could save: the result of `saved` if the cost model's error
    favours the change.

    Links that were measured under other load have a large fit error, which may affect either cost.
    """
    return saved(situation, today, then, slack=SLACK * (1 + _fit_error(situation)) ** 2)


def likely_saved(situation: Situation, today: Reduction, then: Reduction) -> float:
    """Return the expected share of the step that a change saves if the old and the new costs are on different links.
    The errors of these links do not cancel, so the share is the mean of `saved` over three new costs: as modelled,
    divided by the fit error, and multiplied by it.
    """
    error = 1 + _fit_error(situation)
    return sum(saved(situation, today, then, slack=slack) for slack in (1 / error, 1.0, error)) / 3


def _fit_error(situation: Situation) -> float:
    topology = situation.environment.topology
    assert topology is not None, "communication costs require a measured topology"
    links = (topology.inside, topology.between, topology.whole)
    return max(link.fit_residual for link in links if link is not None)


def saved(situation: Situation, today: Reduction, then: Reduction, *, slack: float = 1.0) -> float:
    """Return the exposed communication that a different gradient exchange saves, as a share of the step.

    Args:
        slack: Factor by which the new costs may be smaller than modelled.
    """
    exposed = removable(situation, Category.COMMUNICATION)
    breakdown = situation.breakdown
    beside_ns = breakdown.overlapped.get(Category.COMMUNICATION, 0) / breakdown.num_steps
    taken = breakdown.share(Category.COMMUNICATION) + beside_ns / situation.step_ns
    left = [taken * cost_ns / slack / today.total_ns for cost_ns in then]
    return min(exposed, max(0.0, exposed - max(left[0] - (taken - exposed), left[1])))


def _sharded(situation: Situation, topology: Topology, exchange: Exchange) -> Reduction:
    """Return the cost of reductions with FSDP units of equal size: each unit's weights are all-gathered ahead of each
    pass, and its gradients are reduce-scattered after each backward pass.
    """
    model = situation.workload.model
    formats = formats_of(model, topology.num_ranks, exchange)
    sent = SENT_BYTES.get(str(exchange.compression), formats.reduced)  # others need whole buckets
    units = num_fsdp_units(model, exchange)
    gathered_bytes = max(1, model.num_parameters) * formats.gathered / units
    reduced_bytes = max(1, situation.workload.model.num_trained) * sent / units
    ranks, link = topology.num_ranks, topology.whole
    reduce_ns = 0.0
    if exchange.mode == "hybrid" and topology.inside and topology.between and topology.ranks_per_host:
        ranks, link = topology.ranks_per_host, topology.inside
        part_bytes = reduced_bytes / ranks
        reduce_ns = ring_ns(ALL_REDUCE, part_bytes, topology.num_hosts, topology.between, num_sharing=ranks)
    gather_ns = ring_ns(ALL_GATHER, gathered_bytes, ranks, link)
    reduce_ns += ring_ns(REDUCE_SCATTER, reduced_bytes, ranks, link)
    gathers = exchange.num_micro_batches * (2 if exchange.frees else 1)
    reduces = exchange.num_micro_batches if exchange.reduce_each else 1
    return Reduction(total_ns=units * (gathers * gather_ns + reduces * reduce_ns), last_ns=gather_ns + reduce_ns)


def _buckets(situation: Situation, exchange: Exchange, formats: Formats) -> list[float]:
    """Return the number of elements in each DDP bucket, in the order of reduction."""
    first, cap = (size_mb * MIB / formats.gradient for size_mb in (exchange.first_bucket_mb, exchange.bucket_cap_mb))
    left = float(max(1, situation.workload.model.num_trained))
    found = [min(first, left)]
    left -= found[0]
    whole, rest = divmod(left, cap)
    return [*found, *[cap] * int(whole), *([rest] if rest else [])]


def _bucket_ns(
    situation: Situation, topology: Topology, exchange: Exchange, formats: Formats, num_elements: float
) -> float:
    element_bytes = formats.reduced if exchange.compression is None else formats.gradient
    sent_bytes = num_elements * _sent_bytes(situation, exchange, element_bytes)
    copy_rate = situation.environment.calibration.copy_bytes_per_s or 1e18
    widening_ns = num_elements * widening_bytes(formats, exchange) / copy_rate * 1e9
    if exchange.levels == 2 and topology.inside and topology.between:
        ranks_per_host, num_hosts = topology.ranks_per_host, topology.num_hosts
        assert ranks_per_host is not None, "a two-level reduction requires the same number of ranks on every host"
        size_bytes = num_elements * element_bytes
        copied_ns = COPIED_PARTS * size_bytes / copy_rate * 1e9
        return (
            widening_ns
            + copied_ns
            + two_level_all_reduce_ns(
                size_bytes,
                ranks_per_host,
                num_hosts,
                topology.inside,
                topology.between,
                sent_part=sent_bytes / size_bytes,
            )
        )
    ranks, link = topology.num_ranks, topology.whole
    match exchange.compression:
        case "int8" | "one_bit":
            # The scales are sent by themselves.
            calls = ((stage, amount) for stage in (ALL_TO_ALL, ALL_GATHER) for amount in (sent_bytes, 0.0))
            return sum(ring_ns(stage, amount, ranks, link) for stage, amount in calls)
        case "dgc":
            return 2 * ring_ns(ALL_GATHER, ranks * sent_bytes / 2, ranks, link)
        case "powersgd":
            return 2 * ring_ns(ALL_REDUCE, sent_bytes / 2, ranks, link)
    return widening_ns + ring_ns(ALL_REDUCE, sent_bytes, ranks, link)


def _compressing_ns(situation: Situation, exchange: Exchange, sizes: list[float]) -> list[float]:
    """Return the time of the compression itself, for each bucket."""
    method, topology = exchange.compression, situation.environment.topology
    assert topology is not None, "communication costs require a measured topology"
    if method is None:
        return [0.0] * len(sizes)
    parts = (topology.ranks_per_host or 1) if exchange.levels == 2 else 1
    cost = own_costs(situation.environment.calibration)[method]
    return [cost.of(num_elements / parts) for num_elements in sizes]


def _sent_bytes(situation: Situation, exchange: Exchange, element_bytes: float) -> float:
    """Return the bytes that one rank sends per element.

    Args:
        element_bytes: Bytes sent per element without compression.
    """
    method = exchange.compression
    if method == "dgc":
        return min(1.0, exchange.ratio) * CHOSEN_BYTES
    if method == "powersgd":  # two thin matrices of FP32 for a square one
        model = situation.workload.model
        side = math.sqrt(model.num_parameters / max(1, model.num_parameter_tensors))
        return min(1.0, 2 * exchange.rank / max(1.0, side)) * FP32_BYTES
    return SENT_BYTES.get(str(method), element_bytes)
