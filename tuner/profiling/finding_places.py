"""Places that a finding names as evidence: waits, gaps, collectives, operators and kernels."""

from __future__ import annotations

import math

from steptune.tuner.costs.categories import COMPUTING, Category, classify_operator
from steptune.tuner.profiling.evidence import PLACES, Evidence
from steptune.tuner.profiling.process_groups import hosts_of, reach
from steptune.tuner.profiling.rules.rule import Rule
from steptune.tuner.trace_records import RankAnalysis, Synchronisation
from steptune.tuner.wording import counted, milliseconds


def places_of(rule: Rule, evidence: Evidence) -> dict[str, float | str]:
    """Return places as evidence of a finding: its longest gaps, and the longest kernels of its categories."""
    analysis, device = evidence.analysis, evidence.breakdown.device
    if analysis is None:
        return {}
    gaps = analysis.gaps[device].longest if device in analysis.gaps else ()
    stalls = evidence.breakdown.stalls
    limit_ns = stalls.limit_ns if stalls is not None else math.inf
    found = [_waiting(one) for one in analysis.synchronisations if Category.SYNCHRONISATION in rule.categories]
    found += [
        f"{milliseconds(gap.length_ns)} before {gap.operator_after or gap.kernel_after or 'the end'}"
        + (f" ({place})" if (place := ", ".join(filter(None, (gap.source, gap.module)))) else "")
        for gap in gaps
        if gap.category in rule.categories and not (gap.category == Category.HOST and gap.length_ns > limit_ns)
    ]
    if Category.COMMUNICATION in rule.categories:
        found += _exchanges(analysis)
    computing = [c for c in rule.categories if c in COMPUTING]
    found += [
        f"{operator.name}: {operator.device_ns / 1e6:.3g} ms in {operator.count} calls ({where})"
        for operator in analysis.operators
        if (where := ", ".join(filter(None, (operator.source, operator.module))))
        and classify_operator(operator.name) in computing
    ][:1]
    found += [
        f"{kernel.name}: {kernel.total_ns / 1e6:.3g} ms in {kernel.count} runs"
        for kernel in analysis.kernels
        if kernel.category in computing
    ]
    return {f"at_{number}": place for number, place in enumerate(found[:PLACES], 1)}


def _waiting(one: Synchronisation) -> str:
    """Describe a place where the host waits, with its cost."""
    where = ", ".join(filter(None, (one.source, one.module)))
    costs = "" if one.saved_share is None else f", costs {one.saved_share:.1%} of the step"
    return f"{one.call}{costs}" + (f" ({where})" if where else "")


def _exchanges(analysis: RankAnalysis) -> list[str]:
    """Describe the collectives with the most exposed time, and how many hosts their groups span."""
    exposed = sorted((one for one in analysis.collectives if one.exposed_ns > 0), key=lambda one: -one.exposed_ns)
    return [
        f"{one.name} of {counted(one.group_size, 'rank')}"
        + (f" {where}" if (where := reach(hosts_of(analysis.groups, one.group))) else "")
        + f": {milliseconds(one.exposed_ns)} exposed in {counted(one.count, 'call')}"
        for one in exposed
    ]
