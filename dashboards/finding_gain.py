"""Text about the potential gain of a finding: an upper limit or, where the gain was not replayed, a range and the
reason.
"""

from __future__ import annotations

import math
from collections.abc import Container

from steptune.dashboards import units
from steptune.tuner.profiling.claims import AFTER
from steptune.tuner.profiling.gains import BESIDE
from steptune.tuner.records import Finding

REPLAYED = "replayed"
NAMED = 2
"""Maximum number of earlier findings that are named in the text about one finding."""
SMALL = 0.001
"""Minimum share of the step that counts as a gain."""


def refusal_of(finding: Finding) -> str:
    """Return the reason why a finding's gain was not replayed; empty if it was replayed, or if gains of its kind are
    never replayed.
    """
    saves = str(finding.evidence.get("saves", ""))
    return "" if saves.endswith(REPLAYED) else saves.partition(": ")[2]


def finding_gain(finding: Finding, said: Container[str] = ()) -> str:
    """Return the text that follows the label "gain:" of a finding; empty where the finding alone promises no gain.

    Args:
        said: Reasons for not replaying that the page has already stated.
    """
    if finding.bound <= 0:
        return ""
    limit = units.gain_limit(finding.bound)
    large = math.isinf(limit)
    most = f"{units.NO_LIMIT}× and more" if large else units.ratio(limit)
    at_most = f"up to {most}" if large else f"at most {most}"
    saves, claim = str(finding.evidence.get("saves", "")), _claim(finding)
    if not saves:
        return f"{at_most}{claim}"
    if why := refusal_of(finding):
        least = finding.evidence.get("least")
        low = units.ratio(units.gain_limit(float(least))) if least else "none"
        reason = ", as above" if why in said else f": {why}"
        how = "not exact" if "expected" in finding.evidence else "not replayed"
        return f"between {low} and {most}, {how}{reason}{claim}"
    more = finding.evidence.get(BESIDE, "")
    beside = f"; {more} with a CUDA graph, if the other waits remain" if more else ""
    return f"{at_most} ({saves}{beside}){claim}"


def _claim(finding: Finding) -> str:
    """State what a finding saves in addition to the earlier findings, if that differs from what it saves alone."""
    before = str(finding.evidence.get(AFTER, "")).split(", ")
    if finding.claim is None or before == [""]:
        return ""
    others = (
        " and ".join(before) if len(before) <= NAMED else f"{', '.join(before[:NAMED])} and {len(before) - NAMED} more"
    )
    most = "" if "expected" in finding.evidence or finding.claim < SMALL else "at most "
    share = "nothing" if finding.claim < SMALL else f"{finding.claim:.1%} of the step"
    return f"; once {others} {'is' if len(before) == 1 else 'are'} mended, {most}{share}"
