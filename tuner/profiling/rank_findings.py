"""Findings that only several ranks show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steptune.tuner.profiling.evidence import SEVERITIES, Evidence
from steptune.tuner.profiling.gains import LATE_RULE, bound_of, gain_of
from steptune.tuner.profiling.replay.answers import LATE_RANKS
from steptune.tuner.profiling.stalls import listed
from steptune.tuner.records import CollectiveStats, Finding, Replay
from steptune.tuner.trace_records import RankWait

SKEW_THRESHOLDS = (0.02, 0.05, 0.15)
"""Our own, for the longest wait for a late rank as a share of the step."""
ON_TIME = 0.75
"""Share of the median rank's wait below which a rank counts as late, together with the one that waits least."""


def diagnose_ranks(
    evidence: Mapping[int, Evidence],
    waits: Sequence[RankWait],
    collectives: Sequence[CollectiveStats],
    straggler: int | None,
    replay: Replay | None = None,
) -> list[Finding]:
    """Findings that only several ranks show: they wait for one of them.

    Buckets and bandwidth are not to blame for that: see TraceLens' separation of skew and latency. What is found
    here is no part of `exposed_communication`, so that both can be true without counting a wait twice.

    Args:
        evidence: By rank. The longest wait is judged, as a share of that rank's own step.
        straggler: The rank that the others wait for.
        replay: All ranks together: lateness goes on from one collective to the next, and ranks may be late in turn.
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
    beside = f" ({listed(group)} are late)" if len(group) > 1 else ""
    if gain is None or gain.expected is None:
        message = (
            f"for {share:.0%} of the step rank {waiting} waits for rank {late.rank}, which arrives last in "
            f"{late.late_share:.0%} of the collectives{beside}: this is not network time"
        )
    else:
        message = (
            f"without late ranks the step would be {gain.share} shorter: rank {late.rank} arrives last in "
            f"{late.late_share:.0%} of the collectives{beside}, which is no time of the network"
        )
    removable = evidence[waiting].late_removable_share
    return [
        Finding(
            rule=LATE_RULE,
            severity=SEVERITIES[level],
            message=message,
            advice="balance the ranks' work and data, and look at that rank's own findings; buckets would not help",
            strategies=(),
            bound=bound_of(gain, removable, share),
            evidence={
                **(gain.evidence if gain is not None else {}),
                "skew_ms": round(skew_ns / 1e6, 4),
                "latency_ms": round(latency_ns / 1e6, 4),
                "rank": late.rank,
                **({"late_ranks": listed(group)} if len(group) > 1 else {}),
            },
        )
    ]


def _late_group(waits: Sequence[RankWait]) -> tuple[int, ...]:
    """Ranks that wait clearly less than most; none where all wait alike, as when they are late in turn."""
    ordered = sorted(wait.wait_ns for wait in waits)
    usual = ordered[len(ordered) // 2]
    return tuple(sorted(wait.rank for wait in waits if wait.wait_ns < ON_TIME * usual))
