"""Evidence, from step breakdowns, of the speed difference between two candidates.

A choice acts on known categories of a step: an optimizer's implementation on the optimizer's time,
loader workers on the wait for data. What the machine does to all categories alike (another tenant, a
lower clock) is seen in the others. So the change of the categories that a choice touches, measured
against the rest, shows its effect with far less noise than the length of the step does. It does not
show side effects on other categories (workers that take cores from the model); those are allowed for
in its error, and only the measured step decides in the confirmation.

Where a device waits for its host, its categories are not independent parts of a sum: time that kernels save goes to the
gaps between them, and the profiler slows the host. Such profiles are not used.
"""

from __future__ import annotations

import math

from steptune.tuner.costs.bounds import Situation
from steptune.tuner.search.calm import has_device, is_calm
from steptune.tuner.search.space import Space

SIDE_EFFECT_SD = 0.025
CATEGORY_NOISE = 0.06
"""Relative noise of a category's time over the few steps of a profile."""
MIN_REST = 0.25
"""Minimum share of the step in categories that a change does not affect: from these categories, effects common to all
are estimated.
"""


def profile_log_ratio(space: Space, candidate: Situation, reference: Situation) -> tuple[float, float] | None:
    """Return the logarithm of the ratio of a candidate's rate to the reference's, and its standard error, both from
    profiles; None where the profiles cannot tell.
    """
    if any(has_device(situation) and not is_calm(situation) for situation in (candidate, reference)):
        return None
    touched: set[str] = set()
    for name, choice in candidate.choices.items():
        if reference.choices.get(name) != choice:
            touches = space.strategy(name).touches
            if touches is None:
                return None
            touched.update(category.value for category in touches)
    if not touched or candidate.breakdown.quality.problems or reference.breakdown.quality.problems:
        return None
    before, after = reference.breakdown.per_step_ns, candidate.breakdown.per_step_ns
    rest_before = sum(value for name, value in before.items() if name not in touched)
    rest_after = sum(value for name, value in after.items() if name not in touched)
    total = sum(before.values())
    if rest_before < MIN_REST * total or rest_after <= 0:
        return None
    common = rest_after / rest_before
    touched_after = sum(after.get(name, 0.0) for name in touched) / common
    value = math.log(total / (rest_before + touched_after))
    share = max(total - rest_before, touched_after) / total
    # Both the touched categories and the rest that they are measured against are noisy.
    error = math.hypot(SIDE_EFFECT_SD, CATEGORY_NOISE * share, CATEGORY_NOISE * share)
    return value, error
