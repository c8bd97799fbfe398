"""Claims of findings: each lost share of a step is claimed by one finding, so that claims add up.

Each finding states what it saves alone, and two findings can cover the same lost time: a host that waits for the device
has no lead left for the stall that follows. In their order, each claims what it saves once the earlier ones are
fixed: a replayed cause by simulation without all these causes (`replay.together`), any other cause from the unclaimed
rest of its categories. Claims on waiting never exceed the time that the device waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from steptune.tuner.costs.categories import COMPUTING, Category
from steptune.tuner.profiling.evidence import Evidence
from steptune.tuner.profiling.replay.together import saved_without
from steptune.tuner.records import Finding

AFTER = "after"
"""Key in a finding's evidence, present if the finding claims more or less than its cause alone would save. The value
lists the rules of the earlier findings that share the claim.
"""
SAME = 0.001
"""Difference, as a share of the step, below which two gains count as equal."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Subject of a rule: the categories and the replayed cause that it covers.

    Attributes:
        cause: Name of the cause in the replay; empty if it is not replayed.
    """

    categories: tuple[Category, ...]
    cause: str = ""


@dataclass(kw_only=True)
class _Unclaimed:
    """Shares of a step that no finding has claimed yet.

    Attributes:
        waiting: Unclaimed share in which the device does not compute.
        of: Unclaimed share by category.
    """

    waiting: float
    of: dict[Category, float] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    saved: float = 0.0


def claimed(
    findings: Sequence[Finding], evidence: Sequence[Evidence], subjects: Mapping[str, Subject]
) -> tuple[Finding, ...]:
    """Return the findings with their claims.

    Args:
        evidence: Evidence of the rank that the findings concern, or of several ranks: the one that waits most sets the
            limit.
        subjects: Subject of each rule.
    """
    waiting = max(evidence, key=lambda one: one.idle_share)
    left = _Unclaimed(waiting=waiting.idle_share)
    found: list[Finding] = []
    for finding in findings:
        subject = subjects.get(finding.rule)
        if subject is None or finding.bound <= 0:
            found.append(finding)
            continue
        claim = _simulated(finding, subject, waiting, left)
        if claim is None:
            claim = _counted(finding, subject, evidence, left)
        before = [one.rule for one in found if one.claim]
        alone = finding.evidence.get("expected", finding.bound)
        told = {AFTER: ", ".join(before)} if before and abs(claim - float(alone)) > SAME else {}
        # Of one rank's findings, it may have been another order.
        own = {name: value for name, value in finding.evidence.items() if name != AFTER}
        found.append(structs.replace(finding, claim=claim, evidence={**own, **told}))
    return tuple(found)


def causes_of(findings: Sequence[Finding], subjects: Mapping[str, Subject]) -> list[str]:
    """Return the replayed causes of the findings, in the order of the findings."""
    known = [subjects[finding.rule] for finding in findings if finding.rule in subjects and _is_replayed(finding)]
    return [subject.cause for subject in known if subject.cause]


def _is_replayed(finding: Finding) -> bool:
    return finding.bound > 0 and "expected" in finding.evidence


def _simulated(finding: Finding, subject: Subject, evidence: Evidence, left: _Unclaimed) -> float | None:
    """Return the claim of a replayed cause; None if no simulation covers it."""
    replay = evidence.run or evidence.breakdown.replay
    if replay is None or not subject.cause or not _is_replayed(finding):
        return None
    gone = left.gone | {subject.cause}
    saved = saved_without(replay, gone)
    if saved is None:
        return None
    claim = min(max(0.0, saved - left.saved), left.waiting)
    left.gone, left.saved = gone, max(saved, left.saved)
    left.waiting -= claim
    return claim


def _counted(finding: Finding, subject: Subject, evidence: Sequence[Evidence], left: _Unclaimed) -> float:
    """Return the claim of a finding without a simulation: at most its bound, and at most the unclaimed rest of its
    categories.
    """
    claim = 0.0
    for category in subject.categories:
        share = left.of.setdefault(category, max(one.breakdown.removable_share(category) for one in evidence))
        if category not in COMPUTING:
            share = min(share, left.waiting)
        part = min(share, finding.bound - claim)
        left.of[category] -= part
        left.waiting -= 0.0 if category in COMPUTING else part
        claim += part
    return claim
