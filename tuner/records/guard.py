"""Verdict of the guard on whether a candidate is still the same training."""

from __future__ import annotations

from steptune.tuner.records.base import Record


class GuardCheck(Record):
    """One comparison with the reference.

    Attributes:
        name: Quantity that is compared.
        passed: Whether the difference is within the tolerance.
        observed: The largest difference that was found.
        tolerance: The largest difference that is allowed.
        detail: Where it was found; empty where there is nothing to add.
    """

    name: str
    kind: str
    """Kind of check: "pointwise", "update", "gradient", "twin", "output", "state", "average", "masks", "mask rate",
    "curve" or "loader"."""
    passed: bool
    observed: float
    tolerance: float
    detail: str = ""


class GuardVerdict(Record):
    """Verdict on whether a candidate is still the same training, as far as `num_steps` steps can show.

    Attributes:
        passed: Whether all checks passed.
        num_steps: Steps that were compared.
        checks: The comparisons.
        losses: Losses of the candidate, by step.
        reference_losses: Losses of the reference, by step.
        compared: What was compared, how closely and for how long, part by part.
        notes: Which parts could not be judged, and why.
    """

    passed: bool
    num_steps: int
    checks: tuple[GuardCheck, ...] = ()
    losses: tuple[float, ...] = ()
    reference_losses: tuple[float, ...] = ()
    skipped_steps: int = 0
    """Number of steps that a loss scaler skipped; they were repeated to keep the curves aligned."""

    compared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        failed = [check for check in self.checks if not check.passed]
        if not failed:
            return f"same for {self.num_steps} steps"
        worst = failed[0]
        return worst.detail or f"{worst.name} {worst.observed:.3g} exceeds {worst.tolerance:.3g}"
