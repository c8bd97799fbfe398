"""The changed script beside the unchanged one: its own speed, and its own loss.

Both are started as a user starts them, in blocks of one start each, in random order. The intervals are those of the
confirmation. The changes come from `steptune.enable`, from a diff, or from a file that the user has edited: not from
the hooks that measure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from steptune.tuner.errors import BaselineError, RecommendationError
from steptune.tuner.guard.curves import last_quarter
from steptune.tuner.records import Candidate, Choice, Gain, MeasureSettings, TrialResult, TrialSpec, new_id
from steptune.tuner.records.base import Record
from steptune.tuner.scripts.agent import OUTSIDE
from steptune.tuner.scripts.look import Look
from steptune.tuner.scripts.runner import ScriptRunner, Start
from steptune.tuner.search.confirmation import judge, plan_blocks
from steptune.tuner.search.verification import FALL_SHARE, SPREADS

LOSS_SHARE = 0.01
"""Tolerance as a share of the loss itself: rounding grows over the steps, also where the loss does not fall."""
UNCHANGED = {OUTSIDE: ""}
"""A line `steptune.enable()` that stands in the script already does nothing."""


class ScriptVerification(Record):
    """Result of a verification.

    Attributes:
        gain: Speed of the changed script over the unchanged one.
        same: Whether the losses agree; False where none could be compared.
        reason: Of that, for people.
        num_losses: First backward passes of each start, whose losses were compared.
        difference: Of the mean losses over their last quarter.
        tolerance: For it.
        missing: Changes to which the changed script never came.
    """

    gain: Gain
    same: bool
    reason: str
    num_losses: int
    difference: float
    tolerance: float
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Changed:
    """The changed script.

    Attributes:
        candidate: That it stands for.
        choices: Complete choices of strategies, where they are known.
    """

    start: Start
    candidate: Candidate
    choices: dict[str, Choice]


def verify_script(
    look: Look,
    changed: Changed,
    directory: Path,
    *,
    num_blocks: int,
    settings: MeasureSettings,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> ScriptVerification:
    """Time both scripts in blocks, and compare their losses.

    Args:
        look: At the unchanged one.
        directory: For logs.

    Raises:
        BaselineError: The unchanged script could not be timed.
        RecommendationError: The changed one could not.
    """
    today = Changed(start=Start(command=look.command, variables=UNCHANGED), candidate=Candidate(), choices={})
    sides = {side.candidate.key: side for side in (today, changed)}
    runner = ScriptRunner(look, directory, seed=seed)
    blocks: list[dict[str, TrialResult]] = []
    losses: dict[str, list[list[float]]] = {key: [] for key in sides}
    missing: tuple[str, ...] = ()
    for block in plan_blocks(today.candidate, [changed.candidate], num_blocks, seed):
        blocks.append({})
        for candidate in block.order:
            side = sides[candidate.key]
            say(f"block {block.number + 1} of {num_blocks}: the {'unchanged' if side is today else 'changed'} script")
            spec = _spec(side, look, directory, seed + block.number)
            result, seen = runner.run_start(side.start, spec, settings)
            if result.failure is not None:
                error = BaselineError if side is today else RecommendationError
                name = "unchanged" if side is today else "changed"
                raise error(f"the {name} script could not be timed: {result.failure.message}")
            blocks[-1][candidate.key] = result
            losses[candidate.key].append([math.nan if loss is None else loss for loss in seen["losses"]])
            missing = tuple(seen["missing"]) or missing
    (finalist,) = judge(today.candidate, [changed.candidate], blocks)
    assert finalist.gain is not None, "every block is complete, and there are two at least"
    found = compare_losses(losses[today.candidate.key], losses[changed.candidate.key], finalist.gain)
    return msgspec.structs.replace(found, missing=missing)


def compare_losses(today: Sequence[list[float]], changed: Sequence[list[float]], gain: Gain) -> ScriptVerification:
    """The verdict over the losses of the starts of both scripts, the same number of each."""
    num = min(len(losses) for losses in (*today, *changed))
    if not num:
        reason = "no backward pass was seen: the losses were not compared"
        return ScriptVerification(gain=gain, same=False, reason=reason, num_losses=0, difference=0.0, tolerance=0.0)
    ends, ends_changed = ([last_quarter(losses[:num]) for losses in side] for side in (today, changed))
    fall = max(0.0, statistics.fmean(losses[0] for losses in today) - statistics.fmean(ends))
    size = abs(statistics.fmean(ends))
    tolerance = max(SPREADS * (max(ends) - min(ends)) + FALL_SHARE * fall, LOSS_SHARE * size)
    difference = statistics.fmean(ends_changed) - statistics.fmean(ends)
    same = math.isfinite(difference) and abs(difference) <= tolerance
    side = "higher" if difference > 0 else "lower"
    reason = f"same loss over the first {num} backward passes"
    if not all(map(math.isfinite, ends)):
        reason = "the loss of the unchanged script is not finite: no other can be compared with it"
    elif not math.isfinite(difference):
        reason = "the loss of the changed script is not finite"
    elif not same:
        reason = f"the changed script's loss is {side} by {abs(difference):.3g}, beyond {tolerance:.3g}"
    return ScriptVerification(
        gain=gain, same=same, reason=reason, num_losses=num, difference=difference, tolerance=tolerance
    )


def _spec(side: Changed, look: Look, directory: Path, seed: int) -> TrialSpec:
    return TrialSpec(
        trial_id=new_id(),
        workload=look.facts.reference,
        candidate=side.candidate,
        choices=side.choices,
        study_directory=str(directory),
        num_ranks=look.record.num_ranks,
        device=look.record.device,
        seed=seed,
        guard=False,
        profile=False,
    )
