"""Part of a recommendation's gain that remains in an exported file, from the measured contributions."""

from __future__ import annotations

from collections.abc import Sequence

from steptune.tuner.records import Part, Recommendation
from steptune.tuner.speeds import contribution_of, needed_by, proven_gain, unclear_contribution
from steptune.tuner.wording import ratio

NOT_MEASURED = "not measured"


def carried(
    recommendation: Recommendation,
    lost: Sequence[str],
    otherwise: Sequence[str] = (),
    *,
    way: str = "steptune.apply with the Workload",
) -> str:
    """Return a clause that says how much of the gain remains in an exported file; empty if no gain is claimed.

    Contributions were measured with everything else as recommended: the gain without one part is the whole gain
    over the part's contribution, and without several parts about the whole gain over the product of theirs.

    Args:
        lost: Strategies that the file leaves out.
        otherwise: Strategies that it applies differently from the measured run.
        way: The way that carries the whole gain.
    """
    gain = proven_gain(recommendation)
    if gain is None:
        return ""
    whole = f"carries all of the gain of {ratio(gain)}"
    parts = {part.strategy: part for part in recommendation.parts}
    left_out = [name for name in lost if name in parts]
    differing = [name for name in otherwise if name in parts and name not in left_out]
    apart = f", {', '.join(differing)} applied differently from the measured run" if differing else ""
    if not left_out:
        return f"{whole}{apart}"
    if len(left_out) == len(parts):
        return f"carries none of the gain of {ratio(gain)}; {way} carries all"
    known_product = _product(recommendation, [parts[name] for name in left_out])
    told = {name: contribution_told(recommendation, parts[name]) for name in left_out}
    amount = "at most" if NOT_MEASURED in told.values() else "about"
    amount += f" {ratio(gain / known_product)} of {ratio(gain)}"
    without = ", ".join(f"{name} ({words})" for name, words in told.items())
    return f"carries {amount}: without {without}{apart}; {way} carries all"


def _product(recommendation: Recommendation, parts: Sequence[Part]) -> float:
    """Return the product of the known contributions, each part counted once: a part that needs another one is in the
    contribution of that one.
    """
    known = [(part, speed) for part in parts if (speed := contribution_of(recommendation, part)) is not None]
    product, counted = 1.0, set[str]()
    for part, speed in sorted(known, key=lambda item: -item[1].ratio):
        if part.strategy not in counted:
            product *= speed.ratio
            counted |= {part.strategy, *part.together}
    return product


def contribution_told(recommendation: Recommendation, part: Part) -> str:
    """Return the contribution of a part as text: its ratio, its interval if that interval includes 1, or "not
    measured".
    """
    known, unclear = contribution_of(recommendation, part), unclear_contribution(recommendation, part)
    if known is not None:
        return f"{ratio(known.ratio)}{' ' if known.together else ''}{needed_by(known.together)}"
    return NOT_MEASURED if unclear is None else f"none proven: {ratio(unclear.low)} to {ratio(unclear.high)}"
