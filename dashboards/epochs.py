"""Time of an epoch before and after tuning, and the time after which the search has paid for itself."""

from __future__ import annotations

from typing import NamedTuple

from steptune.tuner.records import Recommendation, Study, Verdict


class EpochInfo(NamedTuple):
    """Hours of an epoch on the whole machine; None where a figure that the computation needs is unknown."""

    steps: int | None
    before_h: float | None
    after_h: float | None
    tuning_h: float
    payback_steps: float | None
    num_devices: int

    @property
    def payback_epochs(self) -> float | None:
        if not self.steps or self.payback_steps is None:
            return None
        return self.payback_steps / self.steps


def get_epoch_info(study: Study, recommendation: Recommendation) -> EpochInfo:
    """Compute the hours of an epoch before and after tuning, for a study with a recommendation.

    Times are None for today's settings where they do not fit, for the recommended ones where their speed is
    inconclusive, and for the payback where no gain is proven.
    """
    fits = recommendation.verdict is not Verdict.ENABLES_TRAINING
    is_known = recommendation.verdict is not Verdict.INCONCLUSIVE or recommendation.candidate.is_baseline
    is_proven = recommendation.verdict is Verdict.FASTER
    facts = study.facts
    steps = facts.steps_per_epoch if facts else None
    per_epoch = steps * facts.units_per_batch if facts and steps and facts.units_per_batch else None

    def hours(units_per_s: float) -> float | None:
        return per_epoch / units_per_s / 3600 if per_epoch and units_per_s > 0 else None

    return EpochInfo(
        steps=steps,
        before_h=hours(recommendation.baseline_units_per_s) if fits else None,
        after_h=hours(recommendation.units_per_s) if is_known else None,
        tuning_h=recommendation.cost.tuning_s / 3600,
        payback_steps=recommendation.cost.payback_tuning_steps if is_proven else None,
        num_devices=len(recommendation.hardware.devices),
    )
