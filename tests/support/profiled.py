"""Breakdowns with chosen shares, and the situations around them."""

from typing import Any

from builders import sample_environment, sample_facts

from steptune.tuner.costs.bounds import Situation
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Breakdown, Calibration, CaptureQuality, Choice
from steptune.tuner.strategies.situations import computation_of
from steptune.tuner.strategies.step_facts import step_facts

STEP_NS = 1_000_000


def breakdown_of(
    shares: dict[Category, float], *, device: str = "cpu", problems: tuple[str, ...] = (), rest: Category | None = None
) -> Breakdown:
    """A step of one millisecond with these shares; the rest goes to `rest` (default: an idle queue)."""
    categories = {category.value: round(STEP_NS * share) for category, share in shares.items()}
    filler = (rest or Category.QUEUED).value
    categories[filler] = categories.get(filler, 0) + STEP_NS - sum(categories.values())
    return Breakdown(
        rank=0,
        device=device,
        num_steps=1,
        step_time_ns=STEP_NS,
        categories=categories,
        quality=CaptureQuality(num_events=100, num_steps=1, problems=problems),
    )


def situation(
    breakdown: Breakdown,
    *,
    device_kind: str = "cpu",
    choices: dict[str, Choice] | None = None,
    calibration: Calibration | None = None,
    **facts: Any,
) -> Situation:
    environment = sample_environment(
        device_kind, num_ranks=1, calibration=calibration if calibration is not None else Calibration()
    )
    return Situation(
        breakdown=breakdown,
        workload=sample_facts(**facts),
        environment=environment,
        choices=choices or {},
        facts=step_facts(choices or {}),
        computation=computation_of(choices or {}),
    )
