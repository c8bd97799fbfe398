"""The gain of a finding, and the order of findings.

A gain is replayed, or a range: from none to the share of the categories where nothing was replayed, and the replayed
gain give or take the replay's error where that misses the unprofiled step.

Findings of which a gain is expected, because it was replayed, come before those that only bound one: nothing says how
much of a share of element-wise work a compiler saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steptune.tuner.profiling.replay.answers import not_replayed, saved_range
from steptune.tuner.records import Finding, Replay

REPLAY_MARGIN = 0.02
"""Share of the step by which the true gain may exceed the replayed one: nine in ten replays of simulated pairs err by
less (benchmarks/replay.py).
"""
AS_LARGE = 1.05
"""Factor by which the gain of launches must exceed that of a cause at one place to come first, because launches cost
time throughout the step.
"""
SPREAD_OUT = ("launch_bound",)
LATE_RULE = "rank_skew"
ASIDE = "aside"
"""Evidence of a finding that another one precedes whatever their gains: the cause that is removed first."""
REMOVED_FIRST = ("host_stall", "input_bound")
"""Findings for which launches are set aside."""
BESIDE = "beside_others"
"""Evidence of a finding whose advice could save more while other causes remain: the share."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Share of the step saved without a cause.

    Attributes:
        low, high: The same where it was replayed.
        expected: Of a replay, between them; None where the categories only bound the gain.
        why_range: Why it is no more than a range; empty where it was replayed.
        uncertain: By how much the replay depends on what the profiler cost.
    """

    low: float
    high: float
    expected: float | None
    why_range: str
    uncertain: float = 0.0

    @property
    def bound(self) -> float:
        """The most that removing the cause could save."""
        return min(1.0, self.high + REPLAY_MARGIN + self.uncertain) if self.high > 0 else 0.0

    @property
    def share(self) -> str:
        """Say the saved share."""
        return f"{self.low:.0%}" if self.low == self.high else f"{self.low:.0%} to {self.high:.0%}"

    @property
    def evidence(self) -> dict[str, float | str]:
        """Figures for a finding."""
        low = f"{self.low:.0%}" if self.low > 0 else "0"
        exact, between = f"{self.low:.1%} of the step, replayed", f"between {low} and {self.high:.0%} of the step"
        return {
            "saves": f"{between}: {self.why_range}" if self.why_range else exact,
            **({"least": round(self.low, 4)} if self.why_range and self.low > 0 else {}),
            **({"expected": round(self.expected, 4)} if self.expected is not None else {}),
        }


def gain_of(replay: Replay | None, cause: str, share: float, idle: float = 1.0) -> Gain | None:
    """Gain of removing a cause; None where steps are not replayed at all, as on a CPU.

    Args:
        share: The most that the categories allow.
        idle: Share of the step in which the device does not compute: no range promises more.
    """
    if replay is None:
        return None
    simulated, why_range = saved_range(replay, cause), not_replayed(replay, cause)
    if simulated is None:
        return Gain(low=0.0, high=share, expected=None, why_range=why_range)
    low, high = simulated
    expected = replay.saved[cause]
    return Gain(
        low=low,
        high=max(expected, min(high, idle)),
        expected=expected,
        why_range=why_range,
        uncertain=replay.uncertain.get(cause, 0.0),
    )


def bound_of(gain: Gain | None, most: float, share: float) -> float:
    """The bound of a finding: of its gain where that was simulated, else what its categories allow."""
    return gain.bound if gain is not None and gain.expected is not None else _bounded(most, share)


def _bounded(bound: float, share: float) -> float:
    """Bound of a finding, at most the share of the step that it covers."""
    assert bound <= share + 1e-9, f"a bound of {bound:.3f} exceeds the share of its categories, {share:.3f}"
    return min(bound, share)


def by_worth(findings: Iterable[Finding]) -> list[Finding]:
    """Findings in order: those of an expected gain, the largest first; then the others by their bound.

    One that is set aside follows what has to be removed before it, and counts as at most so much.
    """
    findings = list(findings)
    most = max((_expected(finding) or 0.0 for finding in findings if finding.rule in REMOVED_FIRST), default=0.0)

    def key(finding: Finding) -> tuple[bool, float, float]:
        expected = _expected(finding)
        if expected is None:
            return True, 0.0, -finding.bound
        worth = min(expected, most) if most and ASIDE in finding.evidence else expected
        factor = AS_LARGE if finding.rule in SPREAD_OUT else 1.0
        return False, factor * (1 - worth), -finding.bound

    return sorted(findings, key=key)


def late_first(findings: Sequence[Finding]) -> list[Finding]:
    """Findings in order, a late rank before the compute and waits of its peers, whatever their size.

    Only launches that cost all ranks more, beside the wait for it, come before it: they are on no single rank.
    """
    late = next((one for one in findings if one.rule == LATE_RULE and one.severity != "note"), None)
    if late is None:
        return list(findings)
    worth = _expected(late) or late.bound

    def follows(finding: Finding) -> bool:
        leads = finding.rule in SPREAD_OUT and ASIDE not in finding.evidence and (_expected(finding) or 0.0) > worth
        return finding is not late and not leads

    return sorted(findings, key=follows)


def _expected(finding: Finding) -> float | None:
    """Share of the step that a finding is expected to save; None where it is unknown or zero."""
    expected = finding.evidence.get("expected")
    return expected if isinstance(expected, float) and finding.bound > 0 else None
