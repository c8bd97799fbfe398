"""Comparison of the changed script with the unchanged one, in speed and in loss.

Each block has one run of each script, in random order. A run is a start of the command, as a user starts it, or, where
the device is a GPU, a fork of a frozen copy that such a start has left. The intervals are those of the confirmation.
The changes come from `steptune.enable`, from a diff, or from a file that the user has edited: not from the hooks that
measure.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from steptune.tuner.errors import BaselineError, RecommendationError, SteptuneError
from steptune.tuner.estimates import student_quantile
from steptune.tuner.guard.curves import last_quarter
from steptune.tuner.records import Candidate, Choice, Gain, MeasureSettings, TrialResult, TrialSpec, new_id
from steptune.tuner.records.base import Record
from steptune.tuner.scripts.agent import OUTSIDE
from steptune.tuner.scripts.copies import CopyError
from steptune.tuner.scripts.look import Look
from steptune.tuner.scripts.runner import ScriptRunner
from steptune.tuner.scripts.starts import Start
from steptune.tuner.search.confirmation import LEAST_BLOCKS, judge, plan_blocks
from steptune.tuner.search.specs import measure_settings
from steptune.tuner.search.verification import FALL_SHARE, SPREADS
from steptune.tuner.speeds import Speed

LOSS_SHARE = 0.01
"""Tolerance for a difference of the losses, as a share of the loss: rounding errors grow over the steps, even where the
loss does not fall.
"""
LEAST_FOR_CHANCE = 4
"""Minimum number of steps from which the scatter of a difference is estimated."""
MEDIAN_OF_NORMAL = 0.6745
"""Median distance of a normal variable from its mean, in standard deviations."""
STARTS_ON_CPU = "the host's memory layout differs between new processes, but not between forks of one copy"
WINDOWS_SHARE = 0.1
"""Maximum time of a run's windows, as a share of the inspection's time. Runs
differ by more than their windows do, and starting one takes a large part of an inspection: an interval narrows more by
further runs than by longer windows (Cochran, "Sampling Techniques" (1977), chapter 10, for samples in two stages).
"""
UNCHANGED = {OUTSIDE: ""}
"""Environment variables for the unchanged script, so that a call of `steptune.enable()` in it does nothing."""


class ScriptVerification(Record):
    """Result of a verification.

    Attributes:
        gain: Speed of the changed script over the unchanged one.
        same: Whether the losses agree; False where none could be compared.
        reason: Readable reason why the losses agree or differ.
        num_losses: Number of first backward passes in each run whose losses were compared.
        difference: Difference of the mean losses over the last quarter of these passes.
        tolerance: Maximum difference that is allowed.
        missing: Changes that the changed script never made.
        runs: Readable description of how each run began.
        claimed: Speed that the study's answer claims; None if it claims none, or if a file was compared.
    """

    gain: Gain
    same: bool
    reason: str
    num_losses: int
    difference: float
    tolerance: float
    missing: tuple[str, ...] = ()
    runs: str = "each run starts the command"
    claimed: Speed | None = None


@dataclass(frozen=True, kw_only=True)
class Changed:
    """The changed script to compare with the unchanged one.

    Attributes:
        candidate: Candidate that it represents.
        choices: Complete choices of strategies, where they are known.
    """

    start: Start
    candidate: Candidate
    choices: dict[str, Choice]


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One of the two scripts, with the runner that runs it."""

    name: str
    shown: Changed
    runner: ScriptRunner
    error: type[SteptuneError]


def verify_script(
    look: Look,
    changed: Changed,
    directory: Path,
    *,
    num_blocks: int,
    settings: MeasureSettings,
    seed: int = 0,
    longest_s: float = math.inf,
    earlier: Mapping[str, Sequence[TrialResult]] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> ScriptVerification:
    """Time both scripts in blocks, and compare their losses.

    Args:
        look: Inspection of the unchanged script, whose frozen copy is used if there is one.
        directory: Directory for logs.
        longest_s: Seconds after which no further block begins, once there are enough for an interval.
        earlier: Good results of a study that has just ended, by candidate key: their scatter counts with that of the
            blocks, their speeds do not.

    Raises:
        BaselineError: The unchanged script could not be timed.
        RecommendationError: The changed script could not be timed.
    """
    settings = measure_settings(settings, WINDOWS_SHARE * look.seconds)
    end_s = time.monotonic() + longest_s
    begun = _Blocks(look, changed, directory, num_blocks, settings, seed, end_s, earlier or {}, say)
    reason = STARTS_ON_CPU if shares_layout(look) else look.why_no_copy or ("" if look.copy else "none was requested")
    if not reason:
        try:
            say("starting the changed script")
            runner = ScriptRunner(look, directory, seed=seed)
            with contextlib.closing(runner.starts.frozen(changed.start, directory / "logs" / "changed.log")) as frozen:
                found = begun.compared(runner, ScriptRunner(frozen, directory, seed=seed), forked=True)
            return msgspec.structs.replace(found, runs="each run is a fork of a frozen copy of its script")
        except CopyError as error:
            reason = str(error)
    runner = ScriptRunner(look, directory, seed=seed)
    found = begun.compared(runner, runner, forked=False)
    return msgspec.structs.replace(found, runs=f"each run starts the command, without a frozen copy: {reason}")


def shares_layout(look: Look) -> bool:
    """Say whether the memory layout differs between new processes but not between forks of one process, as on a CPU."""
    return look.record.device != "cuda"


@dataclass(frozen=True)
class _Blocks:
    """Blocks of runs of both scripts."""

    look: Look
    changed: Changed
    directory: Path
    num_blocks: int
    settings: MeasureSettings
    seed: int
    end_s: float
    earlier: Mapping[str, Sequence[TrialResult]]
    say: Callable[[str], None]

    def compared(self, today: ScriptRunner, changed: ScriptRunner, *, forked: bool) -> ScriptVerification:
        """Run the blocks, and return the verification.

        Raises:
            CopyError: A run did not start from the frozen copy, or failed after it did.
        """
        start = Start(command=self.look.command, variables=UNCHANGED)
        unchanged = Changed(start=start, candidate=Candidate(), choices={})
        sides = {
            unchanged.candidate.key: _Side(name="unchanged", shown=unchanged, runner=today, error=BaselineError),
            self.changed.candidate.key: _Side(
                name="changed", shown=self.changed, runner=changed, error=RecommendationError
            ),
        }
        blocks: list[dict[str, TrialResult]] = []
        losses: dict[str, list[list[float]]] = {key: [] for key in sides}
        missing: tuple[str, ...] = ()
        longest_s = 0.0
        for block in plan_blocks(unchanged.candidate, [self.changed.candidate], self.num_blocks, self.seed):
            began_s = time.monotonic()
            if len(blocks) >= LEAST_BLOCKS and began_s + longest_s > self.end_s:
                break
            blocks.append({})
            for candidate in block.order:
                side = sides[candidate.key]
                self.say(f"block {block.number + 1} of {self.num_blocks}: the {side.name} script")
                result, seen = self._run(side, self.seed + block.number, forked=forked)
                blocks[-1][candidate.key] = result
                losses[candidate.key].append([math.nan if loss is None else loss for loss in seen["losses"]])
                missing = tuple(seen["missing"]) or missing
            longest_s = max(longest_s, time.monotonic() - began_s)
        (finalist,) = judge(unchanged.candidate, [self.changed.candidate], blocks, self.earlier)
        assert finalist.gain is not None, "a verification must have at least two blocks, all of them complete"
        found = compare_losses(losses[unchanged.candidate.key], losses[self.changed.candidate.key], finalist.gain)
        return msgspec.structs.replace(found, missing=missing)

    def _run(self, side: _Side, seed: int, *, forked: bool) -> tuple[TrialResult, Mapping[str, Any]]:
        spec = _spec(side.shown, self.look, self.directory, seed)
        start = replace(side.shown.start, anew=not forked)
        result, seen = side.runner.run_start(start, spec, self.settings)
        message = "" if result.failure is None else result.failure.message
        if forked and (message or result.interpreter != "forked"):
            raise CopyError(message or side.runner.why_no_copy)
        if message:
            raise side.error(f"the {side.name} script could not be timed: {message}")
        return result, seen


def compare_losses(today: Sequence[list[float]], changed: Sequence[list[float]], gain: Gain) -> ScriptVerification:
    """Compare the losses of both scripts' runs, the same number of losses from each run, and return the verdict."""
    num = min(len(losses) for losses in (*today, *changed))
    if not num:
        reason = "no backward pass was observed, so the losses were not compared"
        return ScriptVerification(gain=gain, same=False, reason=reason, num_losses=0, difference=0.0, tolerance=0.0)
    ends, ends_changed = ([last_quarter(losses[:num]) for losses in side] for side in (today, changed))
    fall = max(0.0, statistics.fmean(losses[0] for losses in today) - statistics.fmean(ends))
    size = abs(statistics.fmean(ends))
    chance = _chance([[statistics.fmean(at) for at in zip(*losses, strict=False)][:num] for losses in (today, changed)])
    tolerance = max(SPREADS * (max(ends) - min(ends)) + FALL_SHARE * fall, LOSS_SHARE * size, chance)
    difference = statistics.fmean(ends_changed) - statistics.fmean(ends)
    same = math.isfinite(difference) and abs(difference) <= tolerance
    side = "higher" if difference > 0 else "lower"
    reason = f"same loss over the first {num} backward passes"
    if not all(map(math.isfinite, ends)):
        reason = "the loss of the unchanged script is not finite, so the losses cannot be compared"
    elif not math.isfinite(difference):
        reason = "the loss of the changed script is not finite"
    elif not same:
        reason = (
            f"the changed script's loss is {side} by {abs(difference):.3g}, more than the tolerance of {tolerance:.3g}"
        )
    return ScriptVerification(
        gain=gain, same=same, reason=reason, num_losses=num, difference=difference, tolerance=tolerance
    )


def _chance(curves: Sequence[list[float]]) -> float:
    """Return the difference of two curves' ends that chance alone makes: the half-width of a 95 % interval of their
    mean difference, from its scatter over the steps.

    Curves over the same batches differ smoothly, by next to no scatter. They differ from step to step where the changed
    script draws other random numbers: each worker of a loader augments with its own generator, so another number of
    workers augments every sample differently. The scatter comes from the median distance between successive
    differences, to which neither a trend nor a few steps of another training add (von Neumann and others, "The Mean
    Square Successive Difference", 1941, with a median in place of the mean).

    Args:
        curves: Mean losses of the runs of each script, by step; equally long.
    """
    today, changed = curves
    differences = [theirs - ours for ours, theirs in zip(today, changed, strict=True)][len(today) // 2 :]
    if len(differences) < LEAST_FOR_CHANCE or not all(map(math.isfinite, differences)):
        return 0.0
    num_last = max(1, len(today) // 4)
    distances = [abs(after - before) for before, after in itertools.pairwise(differences)]
    scatter = statistics.median(distances) / (MEDIAN_OF_NORMAL * math.sqrt(2))
    return student_quantile(0.975, len(distances) / 2) * scatter / math.sqrt(num_last)


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
