"""Gain of a finding, and the order of findings.

A gain is replayed, or a range: from 0 to the share of the categories if nothing was replayed, or the replayed
gain plus or minus the replay's error if the replay misses the unprofiled step time.

Findings with an expected (replayed) gain come before those that only bound one: it is unknown how
much of a share of element-wise work a compiler saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steptune.tuner.profiling.replay.answers import not_replayed, saved_range
from steptune.tuner.records import Finding, Replay

REPLAY_MARGIN = 0.02
"""Margin for the error of a replayed gain, as a share of the step. Nine in ten replays of simulated pairs have a
smaller error (benchmarks/replay.py).
"""
AS_LARGE = 1.05
"""Minimum ratio of the speed-up from removing launches to the speed-up from removing another cause, for launches to be
listed first.

The cost of launches is spread over the step; other causes act at a single place.
"""
SPREAD_OUT = ("launch_bound",)
LATE_RULE = "rank_skew"
ASIDE = "aside"
"""Evidence key of a finding that is to be addressed after another finding, even if its own gain is larger."""
REMOVED_FIRST = ("host_stall", "input_bound")
"""Rules whose causes are removed before the cost of launches is addressed."""
BESIDE = "beside_others"
"""Evidence key for the share of the step that a finding's advice could save while the other causes remain; set only if
that exceeds the finding's gain after those causes are removed.
"""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Gain of removing a cause, as a share of the step.

    Attributes:
        low, high: Range of the share; equal if it was replayed.
        expected: Replayed share, between them; None if the categories only bound the gain.
        why_range: Reason why it is only a range; empty if it was replayed.
        uncertain: Half-width of the replayed share over plausible costs of the profiler.
    """

    low: float
    high: float
    expected: float | None
    why_range: str
    uncertain: float = 0.0

    @property
    def bound(self) -> float:
        """Return the maximum share of the step that removing the cause could save."""
        return min(1.0, self.high + REPLAY_MARGIN + self.uncertain) if self.high > 0 else 0.0

    @property
    def share(self) -> str:
        """Return the saved share of the step, or its range, as text."""
        return f"{self.low:.0%}" if self.low == self.high else f"{self.low:.0%} to {self.high:.0%}"

    @property
    def evidence(self) -> dict[str, float | str]:
        """Return the figures of the gain as evidence for a finding."""
        low = f"{self.low:.0%}" if self.low > 0 else "0"
        exact, between = f"{self.low:.1%} of the step, replayed", f"between {low} and {self.high:.0%} of the step"
        return {
            "saves": f"{between}: {self.why_range}" if self.why_range else exact,
            **({"least": round(self.low, 4)} if self.why_range and self.low > 0 else {}),
            **({"expected": round(self.expected, 4)} if self.expected is not None else {}),
        }


def gain_of(replay: Replay | None, cause: str, share: float, idle: float = 1.0) -> Gain | None:
    """Return the gain of removing a cause; None if steps are not replayed at all, as on a CPU.

    Args:
        share: Largest gain that the categories allow.
        idle: Share of the step in which the device does not compute: upper limit of a range.
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
    """Return the maximum saving of a finding, as a share of the step: from the replayed gain, or else from the time of
    its categories.
    """
    return gain.bound if gain is not None and gain.expected is not None else _bounded(most, share)


def _bounded(bound: float, share: float) -> float:
    """Limit the maximum saving of a finding to the share of the step that the finding covers."""
    assert bound <= share + 1e-9, f"a bound of {bound:.3f} exceeds the share of its categories, {share:.3f}"
    return min(bound, share)


def by_worth(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings: those with an expected gain first, the largest gain leading; then the others by their maximum
    saving.

    A finding that is set aside follows the cause that has to be removed first, and counts at most as much.
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
    """Move the finding of a late rank before the findings on other ranks' compute and waits, regardless of their gains.

    Only launches that cost all ranks more than the wait for the late rank stay before it: they concern no single rank.
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
    """Return the share of the step that a finding is expected to save; None if it is unknown or zero."""
    expected = finding.evidence.get("expected")
    return expected if isinstance(expected, float) and finding.bound > 0 else None
