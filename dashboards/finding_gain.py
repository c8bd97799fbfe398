"""The possible gain of a finding, in words: at most, or between none and so much where it was not replayed, and why."""

from __future__ import annotations

from collections.abc import Container

from steptune.dashboards import units
from steptune.tuner.profiling.gains import BESIDE
from steptune.tuner.records import Finding

LARGEST = 100
"""A larger ratio is no number: a step that would all but vanish only waited."""
REPLAYED = "replayed"


def refusal_of(finding: Finding) -> str:
    """Return why a finding's gain was not replayed; empty where it was, and where it never is."""
    saves = str(finding.evidence.get("saves", ""))
    return "" if saves.endswith(REPLAYED) else saves.partition(": ")[2]


def finding_gain(finding: Finding, said: Container[str] = ()) -> str:
    """Return the words after "could gain"; empty where the finding gains nothing by itself.

    Args:
        said: Reasons not to replay that stand above it already.
    """
    if finding.bound <= 0:
        return ""
    limit = units.gain_limit(finding.bound)
    large = limit >= LARGEST
    most = f"{LARGEST}× and more" if large else units.ratio(limit)
    at_most = f"up to {most}" if large else f"at most {most}"
    saves = str(finding.evidence.get("saves", ""))
    if not saves:
        return at_most
    if why := refusal_of(finding):
        least = finding.evidence.get("least")
        low = units.ratio(units.gain_limit(float(least))) if least else "none"
        reason = ", as above" if why in said else f": {why}"
        how = "not exact" if "expected" in finding.evidence else "not replayed"
        return f"between {low} and {most}, {how}{reason}"
    others = finding.evidence.get("overlaps", "")
    overlap = f"; gains may overlap, do not add that of {others}" if others else ""
    more = finding.evidence.get(BESIDE, "")
    beside = f"; as a CUDA graph beside the other waits {more}" if more else ""
    return f"{at_most} ({saves}{beside}{overlap})"
