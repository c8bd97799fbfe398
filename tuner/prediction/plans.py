"""The communication methods that a prediction compares, and which of them can be run on a cluster.

A method can be run if its strategies, and the table of their combinations, allow it on that many ranks and hosts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from msgspec import structs

from steptune.tuner.records import Candidate, Choice, Environment, WorkloadFacts
from steptune.tuner.strategies import Unsupported, strategy_named
from steptune.tuner.strategies.combine import complete_choices, conflict, normalise
from steptune.tuner.strategies.ddp_buckets.choice import DdpBucketsSetting
from steptune.tuner.strategies.gradient_compression.choice import GradientCompressionSetting
from steptune.tuner.strategies.hierarchical_allreduce.choice import HierarchicalAllreduceSetting
from steptune.tuner.strategies.sharding.choice import ShardingSetting

COMMUNICATION = (
    ShardingSetting.strategy,
    DdpBucketsSetting.strategy,
    GradientCompressionSetting.strategy,
    HierarchicalAllreduceSetting.strategy,
)
"""Strategies that determine how ranks communicate, and that the prediction covers."""


class Family(StrEnum):
    """Group of communication methods, shown as one curve."""

    FLAT = "flat"
    HIERARCHICAL = "hierarchical"
    COMPRESSED = "compressed"
    SHARDED = "sharded"


@dataclass(frozen=True, kw_only=True)
class WayToCommunicate:
    """One communication method, as a set of choices.

    Attributes:
        label: Readable name.
        changes: Choices by strategy; all other strategies of `COMMUNICATION` have the choices of plain DDP.
    """

    family: Family
    label: str
    changes: dict[str, Choice]


def _ddp(cap_mb: int) -> dict[str, Choice]:
    return {DdpBucketsSetting.strategy: {"bucket_cap_mb": cap_mb}}


def _compressed(method: str, **more: int | float) -> dict[str, Choice]:
    return {GradientCompressionSetting.strategy: {"method": method, **more}}


def _sharded(mode: str, **more: str | bool) -> dict[str, Choice]:
    return {ShardingSetting.strategy: {"mode": mode, **more}}


TWO_LEVELS: dict[str, Choice] = {HierarchicalAllreduceSetting.strategy: {"levels": 2}}
WAYS: tuple[WayToCommunicate, ...] = (
    WayToCommunicate(family=Family.FLAT, label="DDP, buckets of 25 MiB", changes={}),
    WayToCommunicate(family=Family.FLAT, label="DDP, buckets of 5 MiB", changes=_ddp(5)),
    WayToCommunicate(family=Family.FLAT, label="DDP, buckets of 100 MiB", changes=_ddp(100)),
    WayToCommunicate(family=Family.HIERARCHICAL, label="two levels", changes=TWO_LEVELS),
    WayToCommunicate(
        family=Family.HIERARCHICAL, label="two levels, buckets of 100 MiB", changes={**TWO_LEVELS, **_ddp(100)}
    ),
    WayToCommunicate(family=Family.COMPRESSED, label="bf16", changes=_compressed("bf16")),
    WayToCommunicate(family=Family.COMPRESSED, label="int8", changes=_compressed("int8")),
    WayToCommunicate(family=Family.COMPRESSED, label="1 bit", changes=_compressed("one_bit")),
    WayToCommunicate(family=Family.COMPRESSED, label="PowerSGD of rank 4", changes=_compressed("powersgd", rank=4)),
    WayToCommunicate(family=Family.COMPRESSED, label="DGC, 1 %", changes=_compressed("dgc", ratio=0.01)),
    WayToCommunicate(
        family=Family.COMPRESSED, label="two levels, bf16 between hosts", changes={**TWO_LEVELS, **_compressed("bf16")}
    ),
    WayToCommunicate(
        family=Family.COMPRESSED, label="two levels, int8 between hosts", changes={**TWO_LEVELS, **_compressed("int8")}
    ),
    WayToCommunicate(family=Family.SHARDED, label="ZeRO-1", changes=_sharded("zero1")),
    WayToCommunicate(family=Family.SHARDED, label="FSDP grad_op, by block", changes=_sharded("grad_op", wrap="block")),
    WayToCommunicate(family=Family.SHARDED, label="FSDP full, by block", changes=_sharded("full", wrap="block")),
    WayToCommunicate(family=Family.SHARDED, label="FSDP full, one unit", changes=_sharded("full", wrap="root")),
    WayToCommunicate(
        family=Family.SHARDED,
        label="FSDP hybrid, by block",
        changes=_sharded("hybrid", wrap="block", reshard=True),
    ),
    WayToCommunicate(
        family=Family.SHARDED,
        label="FSDP hybrid, by block, no reshard after forward",
        changes=_sharded("hybrid", wrap="block", reshard=False),
    ),
)


def candidate_of(way: WayToCommunicate, base: Candidate, facts: WorkloadFacts) -> Candidate:
    """Return the base candidate with its communication replaced."""
    complete = complete_choices(base, facts)
    for name in COMMUNICATION:
        complete[name] = {**strategy_named(name).defaults, **way.changes.get(name, {})}
    if facts.model.num_unused_parameters:  # DDP would refuse to run without
        complete[DdpBucketsSetting.strategy] = {**complete[DdpBucketsSetting.strategy], "find_unused": True}
    return normalise(Candidate(choices=complete), facts)


def refusal(candidate: Candidate, environment: Environment, facts: WorkloadFacts) -> str | None:
    """Return the reason why a candidate cannot be run in an environment, or None."""
    complete = complete_choices(candidate, facts)
    for name in candidate.choices:
        support = strategy_named(name).supports(complete[name], environment, facts)
        if isinstance(support, Unsupported):
            return f"{name}: {support.reason}"
    return conflict(candidate, environment, facts)


def on_cluster(environment: Environment, num_ranks: int, num_hosts: int) -> Environment:
    """Return an environment with more devices of the same kind and the same software."""
    return structs.replace(environment, num_ranks=num_ranks, num_hosts=num_hosts, topology=None)
