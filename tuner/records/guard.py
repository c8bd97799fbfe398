"""Judgement whether a candidate still is the same training."""

from __future__ import annotations

from steptune.tuner.records.base import Record


class GuardCheck(Record):
    """One comparison with the reference.

    Attributes:
        name: What is compared.
        passed: Within the tolerance.
        observed: The largest difference.
        tolerance: What it may be.
        detail: Where it was; empty where there is nothing to say.
    """

    name: str
    kind: str
    """"pointwise", "update", "gradient", "twin", "output", "state", "average", "masks", "mask rate", "curve" or
    "loader"."""
    passed: bool
    observed: float
    tolerance: float
    detail: str = ""


class GuardVerdict(Record):
    """Judgement whether a candidate still is the same training, as far as `num_steps` steps show.

    Attributes:
        passed: All checks did.
        num_steps: Steps that were compared.
        checks: Each comparison.
        losses: Of the candidate, by step.
        reference_losses: Of the reference, by step.
        compared: What was compared, how closely and for how long, part by part.
        notes: Which parts could not be judged, and why.
    """

    passed: bool
    num_steps: int
    checks: tuple[GuardCheck, ...] = ()
    losses: tuple[float, ...] = ()
    reference_losses: tuple[float, ...] = ()
    skipped_steps: int = 0
    """Steps that a loss scaler skipped; they were repeated, so that the curves stay aligned."""

    compared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        failed = [check for check in self.checks if not check.passed]
        if not failed:
            return f"same for {self.num_steps} steps"
        worst = failed[0]
        return worst.detail or f"{worst.name} {worst.observed:.3g} exceeds {worst.tolerance:.3g}"
