"""Findings that only the traces of several ranks show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steptune.tuner.profiling.evidence import SEVERITIES, Evidence
from steptune.tuner.profiling.gains import LATE_RULE, bound_of, gain_of
from steptune.tuner.profiling.process_groups import reach, whole_groups
from steptune.tuner.profiling.replay.answers import LATE_RANKS
from steptune.tuner.profiling.stalls import listed
from steptune.tuner.records import CollectiveStats, Finding, Replay
from steptune.tuner.trace_records import RankWait

SKEW_THRESHOLDS = (0.02, 0.05, 0.15)
"""Minimum share of the step that the longest wait for a late rank takes, for each severity; the values are our choice.
"""
MOST_NAMED = 3
"""Maximum number of process groups whose names are listed."""
ON_TIME = 0.75
"""Maximum wait of a late rank, as a share of the median rank's wait. The rank that waits least counts as late
regardless of this limit.
"""


def diagnose_ranks(
    evidence: Mapping[int, Evidence],
    waits: Sequence[RankWait],
    collectives: Sequence[CollectiveStats],
    straggler: int | None,
    replay: Replay | None = None,
) -> list[Finding]:
    """Return the findings that only the traces of several ranks show: ranks wait for a late one.

    Buckets and bandwidth do not cause such waits: see TraceLens' separation of skew and latency. Waits found
    here are no part of `exposed_communication`, so that no wait counts twice.

    Args:
        evidence: Evidence of each rank. The longest wait is judged, as a share of that rank's step.
        straggler: The rank that the others wait for.
        replay: Replay of all ranks together: lateness carries over from one collective to the next, and ranks may be
            late in turn.
    """
    late = next((wait for wait in waits if wait.rank == straggler), None)
    others = [rank for rank in evidence if rank != straggler]
    waiting = max(others, key=lambda rank: evidence[rank].late_share, default=None)
    if late is None or waiting is None:
        return []
    share = evidence[waiting].late_share
    gain = gain_of(replay, LATE_RANKS, share, evidence[waiting].idle_share)
    if gain is not None and gain.expected is not None:
        share = gain.expected
    if share < SKEW_THRESHOLDS[0]:
        return []
    known = [c for c in collectives if c.skew_ns is not None and c.latency_ns is not None]
    skew_ns = sum((c.skew_ns or 0) * c.count for c in known)
    latency_ns = sum((c.latency_ns or 0) * c.count for c in known)
    level = sum(share >= threshold for threshold in SKEW_THRESHOLDS) - 1
    group = _late_group(waits)
    whole = _named(evidence, group)
    beside = f" ({listed(group)} are late{f': {whole}' if whole else ''})" if len(group) > 1 else ""
    if gain is None or gain.expected is None:
        message = (
            f"for {share:.0%} of the step rank {waiting} waits for rank {late.rank}, which arrives last in "
            f"{late.late_share:.0%} of the collectives{beside}: this wait is not network time"
        )
    else:
        message = (
            f"without late ranks the step would be {gain.share} shorter: rank {late.rank} arrives last in "
            f"{late.late_share:.0%} of the collectives{beside}; waiting for it is not network time"
        )
    removable = evidence[waiting].late_removable_share
    return [
        Finding(
            rule=LATE_RULE,
            severity=SEVERITIES[level],
            message=message,
            advice=(
                "balance the ranks' work and data, and check the late rank's own findings; changing the "
                "gradient buckets would not help"
            ),
            strategies=(),
            bound=bound_of(gain, removable, share),
            evidence={
                **(gain.evidence if gain is not None else {}),
                "skew_ms": round(skew_ns / 1e6, 4),
                "latency_ms": round(latency_ns / 1e6, 4),
                "rank": late.rank,
                **({"late_ranks": listed(group)} if len(group) > 1 else {}),
                **({"late_groups": whole} if whole else {}),
            },
        )
    ]


def _named(evidence: Mapping[int, Evidence], late: Sequence[int]) -> str:
    """Describe the process groups that are late as a whole, with the hosts that they span; empty if none are."""
    described = {
        (group.name, group.ranks): group
        for one in evidence.values()
        if one.analysis is not None
        for group in one.analysis.groups
    }
    whole = whole_groups(described.values(), late, evidence)
    if len(whole) > MOST_NAMED:
        return f"all of {len(whole)} process groups"
    return " and ".join(
        f"all of process group {group.name}" + (f" {where}" if (where := reach(group.num_hosts)) else "")
        for group in whole
    )


def _late_group(waits: Sequence[RankWait]) -> tuple[int, ...]:
    """Return the ranks that wait clearly less than the median rank; none if all wait alike, for instance when they are
    late in turn.
    """
    ordered = sorted(wait.wait_ns for wait in waits)
    usual = ordered[len(ordered) // 2]
    return tuple(sorted(wait.rank for wait in waits if wait.wait_ns < ON_TIME * usual))
