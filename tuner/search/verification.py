"""Side-by-side training of baseline and recommendation, to verify that both still train alike after N steps.

The guard of a trial looks at a few steps. Here both configurations train for longer, from one initial
state on one order of samples; the baseline also under other seeds, whose spread says how far two runs
of the *same* training differ. The recommendation may differ by a few times that, and by a twentieth of
the fall in loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from steptune.tuner.guard.curves import last_quarter
from steptune.tuner.records import Choice, Record
from steptune.tuner.trials.training_run import LossCurve, TrainRequest

NUM_SEEDS = 3
SPREADS = 3.0
FALL_SHARE = 0.05


class Verification(Record):
    """Result of a side-by-side training of baseline and recommendation."""

    num_steps: int
    same: bool
    reason: str
    baseline: tuple[LossCurve, ...]
    """Loss curves of the baseline, one for each seed."""
    recommended: LossCurve
    difference: float
    """Difference of the mean losses over the last quarter of the steps."""
    tolerance: float
    baseline_units_per_s: float
    recommended_units_per_s: float
    """Rates of recommended and current settings after the first steps. Both include the time to read every loss, which
    ordinary training does not need.
    """


class TaskRunner(Protocol):
    """Interface of a runner that trains on as many ranks as the study has."""

    def task(self, entry: str, request: object) -> bytes: ...


def verify(
    runner: TaskRunner,
    *,
    workload: str,
    study_directory: str,
    device: str,
    baseline: dict[str, Choice],
    recommended: dict[str, Choice],
    num_steps: int,
    seed: int,
    say: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Train the baseline with several seeds, and the recommendation with the first of them."""

    def train(choices: dict[str, Choice], training_seed: int) -> LossCurve:
        request = TrainRequest(
            workload=workload,
            study_directory=study_directory,
            choices=choices,
            device=device,
            num_steps=num_steps,
            seed=training_seed,
        )
        return msgspec.msgpack.decode(runner.task("train", request), type=LossCurve)

    curves = []
    for number in range(NUM_SEEDS):
        say(f"training the baseline, seed {number + 1} of {NUM_SEEDS}")
        curves.append(train(baseline, seed + number))
    say("training the recommendation")
    return compare_curves(tuple(curves), train(recommended, seed), num_steps)


def compare_curves(baseline: tuple[LossCurve, ...], recommended: LossCurve, num_steps: int) -> Verification:
    """Judge finished loss curves."""
    ends = [last_quarter(curve.losses) for curve in baseline]
    fall = max(0.0, baseline[0].losses[0] - ends[0])
    tolerance = SPREADS * (max(ends) - min(ends)) + FALL_SHARE * fall
    difference = last_quarter(recommended.losses) - ends[0]
    if not recommended.finite:
        same, reason = False, "the loss of the recommendation is not finite"
    elif abs(difference) <= tolerance:
        same, reason = True, f"same for {num_steps} steps"
    else:
        side = "higher" if difference > 0 else "lower"
        same = difference < 0
        reason = f"the loss is {side} by {abs(difference):.3g}, more than the tolerance of {tolerance:.3g}"
    return Verification(
        num_steps=num_steps,
        same=same,
        reason=reason,
        baseline=baseline,
        recommended=recommended,
        difference=difference,
        tolerance=tolerance,
        baseline_units_per_s=sum(c.num_units for c in baseline) / sum(c.duration_s for c in baseline),
        recommended_units_per_s=recommended.num_units / recommended.duration_s,
    )
