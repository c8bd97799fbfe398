"""Part of a recommendation's gain that a file carries, by the contributions that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steptune.tuner.records import Recommendation
from steptune.tuner.speeds import contribution_of, proven_gain
from steptune.tuner.wording import ratio


def carried(
    recommendation: Recommendation,
    lost: Sequence[str],
    otherwise: Sequence[str] = (),
    *,
    way: str = "steptune.apply with the Workload",
) -> str:
    """Half a sentence on the part; empty where the answer claims no gain.

    Contributions were measured with everything else as recommended: the gain without one part is the whole one over
    its contribution, and without several of them about the whole one over their product.

    Args:
        lost: Strategies that the file leaves out.
        otherwise: Strategies that it follows otherwise than it was measured.
        way: The way that carries all of the gain.
    """
    gain = proven_gain(recommendation)
    if gain is None:
        return ""
    whole = f"carries all of the gain of {ratio(gain)}"
    parts = {part.strategy: part for part in recommendation.parts}
    left_out = [name for name in lost if name in parts]
    differing = [name for name in otherwise if name in parts and name not in left_out]
    apart = f", {', '.join(differing)} otherwise than measured" if differing else ""
    if not left_out:
        return f"{whole}{apart}"
    if len(left_out) == len(parts):
        return f"carries nothing of the gain of {ratio(gain)}; {way} carries all"
    contributions = {name: contribution_of(recommendation, parts[name]) for name in left_out}
    told = [
        f"{name} ({'not measured' if known is None else ratio(known.ratio)})" for name, known in contributions.items()
    ]
    known_product = math.prod(known.ratio for known in contributions.values() if known is not None)
    amount = "at most" if None in contributions.values() else "about"
    amount += f" {ratio(gain / known_product)} of {ratio(gain)}"
    return f"carries {amount}: without {', '.join(told)}{apart}; {way} carries all"
