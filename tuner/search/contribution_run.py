"""Contribution of each part of the answer, measured by running the answer beside the answer without that part.

It is measured as the confirmation measures gains: new runs of all, in turns, in blocks that follow one after another,
with the same statistics. Only time that the confirmation did not need is spent on it. Where that is short, the parts
with the smallest gains in the search are not measured, and their contribution is not stated. The answer without a part
is not recommended, so it is neither guarded nor profiled.

A part that others need is left out together with those: a CUDA graph that cannot record the step without a fused kernel
goes with the kernel, and the contribution is that of both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from steptune.tuner.records import Candidate, Gain, Move, Purpose, StudySettings, TrialResult
from steptune.tuner.search.blocks import BlockRunner
from steptune.tuner.search.confirmation import LEAST_BLOCKS, Finalist, all_starts, compare, plan_blocks
from steptune.tuner.search.designer import Designer
from steptune.tuner.search.group_runner import GroupRunner
from steptune.tuner.search.ledger import Ledger
from steptune.tuner.search.specs import measure_settings
from steptune.tuner.search.view import StudyView

MOST_TOGETHER = 3
"""Maximum number of other parts that are left out together with one."""


class ContributionRun:
    """Measurement, in the remaining time, of an answer together with variants that each lack one part.

    Args:
        confirmed: Good results of the confirmation's blocks, for the scatter of the answer's runs.
    """

    def __init__(
        self,
        designer: Designer,
        trials: GroupRunner,
        ledger: Ledger,
        settings: StudySettings,
        view: StudyView,
        *,
        place: Callable[[], str],
        confirmed: Sequence[dict[str, TrialResult]],
    ) -> None:
        self._designer = designer
        self._trials = trials
        self._ledger = ledger
        self._settings = settings
        self._view = view
        self._confirmed = confirmed
        self._runner = BlockRunner(trials, ledger, designer.knowledge, purpose=Purpose.CONTRIBUTION, place=place)
        self._answer = designer.reference
        self._without: dict[str, Candidate] = {}
        """Answer without one part, by the strategy that is left out."""
        self._together: dict[str, tuple[str, ...]] = {}
        self._started: dict[str, Candidate] = {}
        """Configurations for which every run has succeeded so far."""
        self._planned = 0
        self._blocks: list[dict[str, TrialResult]] = []

    def run(self, answer: Candidate) -> None:
        """Run as many blocks as the time allows; none for a part without which nothing of the answer is left, because
        it contributes the whole gain.
        """
        self._answer = answer
        self._started = without_parts(self._designer, answer, self._runner.num_begun)
        self._together = {name: left_out_with(name, answer, c) for name, c in self._started.items()}
        self._started = {name: c for name, c in self._started.items() if not c.is_baseline}
        self._choose()
        self._without = dict(self._started)
        if not self._without:
            return
        begun = self._runner.num_begun(answer)
        left = int(self._left_s() / self._runner.least_s(self._all()))
        self._planned = max(begun, min(self._settings.confirm_blocks, begun + left))
        numbers = list(itertools.islice(self._runner.numbers(self._all()), self._planned))
        longest_s = 0.0  # of the blocks so far
        for block in plan_blocks(answer, self._all()[1:], self._planned, self._settings.seed):
            order, number = [c for c in block.order if c in self._all()], numbers[block.number]
            if not self._runner.is_stored(order, number):
                if self._left_s() < max(longest_s, self._runner.least_s(self._all())):
                    return
                self._set_windows(self._planned - block.number)
            began_s = self._view.elapsed_s
            self._view.say(
                stage="measuring contributions", current=f"block {block.number + 1} of {self._planned}", activity=""
            )
            self._blocks.append(self._runner.run(order, number, lambda: self._view.left_s))
            longest_s = max(longest_s, self._view.elapsed_s - began_s)
            self._view.num_trials = self._ledger.num_trials
            self._started = {name: c for name, c in self._started.items() if c.key in self._blocks[-1]}
            if not self._started or self._is_clear():
                return

    def gains(self) -> dict[str, Gain]:
        """Return the contributions by strategy, each with its simultaneous interval."""
        return {name: finalist.gain for name, finalist in self._judged().items() if finalist.gain is not None}

    def together(self) -> dict[str, tuple[str, ...]]:
        """Return, by strategy, the other strategies that are left out with it because they cannot run without it."""
        return self._together

    def _judged(self) -> dict[str, Finalist]:
        everything = [self._answer, *self._without.values()]
        earlier = {
            c.key: [result for result in self._designer.knowledge.results.get(c.key, []) if result.ok]
            for c in everything
        }
        starts = all_starts(all_starts(earlier, self._confirmed), self._blocks)
        return {
            name: compare(self._answer, candidate, self._blocks, starts, len(self._without), self._planned)
            for name, candidate in self._without.items()
        }

    def _is_clear(self) -> bool:
        """Say whether more blocks are unlikely to prove another contribution."""
        judged = self._judged()
        return all(judged[n].gain is not None and (judged[n].is_proven or judged[n].is_hopeless) for n in self._started)

    # --- how much -----------------------------------------------------------------------------

    def _choose(self) -> None:
        """Exclude parts from the measurement, the smallest estimated contribution first, until the minimum number of
        blocks fits. A study resumed after its first block leaves out the parts without a stored run, because runs hours
        apart do not form a block.
        """
        begun = {name: c for name, c in self._started.items() if self._runner.num_begun(c)}
        if max(self._runner.num_begun(candidate) for candidate in self._all()) > 1:
            self._started = begun
            return
        left_s = self._left_s() + self._runner.begun_s(self._all())
        gains = {n: self._designer.difference(self._answer, c).mean for n, c in self._started.items()}
        ranked = sorted(gains, key=lambda name: gains[name])
        for name in ranked:
            if LEAST_BLOCKS * self._runner.least_s(self._all()) <= left_s:
                return
            if name not in begun:
                del self._started[name]

    def _left_s(self) -> float:
        """Return the seconds left for blocks: the remaining budget less the time of first compilations."""
        knowledge = self._designer.knowledge
        usual_s = knowledge.expected_cost_s(self._answer, self._answer)
        new = [c for c in self._all() if not knowledge.results.get(c.key) and not self._has_begun(c)]
        added_s = [max(0.0, knowledge.expected_cost_s(candidate, self._answer) - usual_s) for candidate in new]
        return self._view.left_s - sum(added_s)

    def _has_begun(self, candidate: Candidate) -> bool:
        return any(candidate.key in block for block in self._blocks)

    def _set_windows(self, num_missing: int) -> None:
        cap_s = self._runner.longest_cap_s(self._all(), self._left_s() / max(1, num_missing))
        self._trials.measure = measure_settings(self._settings.measure, min(cap_s, self._trials.measure.cap_s))

    def _all(self) -> list[Candidate]:
        return list({c.key: c for c in [self._answer, *self._started.values()]}.values())


def without_parts(
    designer: Designer, answer: Candidate, num_begun: Callable[[Candidate], int] = lambda candidate: 0
) -> dict[str, Candidate]:
    """Return the answer without each of its parts, by strategy, where that is legal and not known to fail.

    Args:
        num_begun: Number of blocks that a configuration was in before the study was resumed.
    """
    changed = [name for name, choice in answer.choices.items() if choice != designer.reference.choices.get(name, {})]
    found = {}
    for name in changed:
        legal = _without(designer, answer, name, [n for n in changed if n != name])
        if legal:
            found[name] = max(legal, key=lambda c: (num_begun(c), designer.difference(c, answer).mean))
    return found


def left_out_with(name: str, answer: Candidate, without: Candidate) -> tuple[str, ...]:
    """Return the other strategies whose choices differ between the answer and the answer without one part."""
    return tuple(n for n, choice in answer.choices.items() if n != name and without.choices.get(n) != choice)


def _without(designer: Designer, answer: Candidate, name: str, others: Sequence[str]) -> list[Candidate]:
    """Return the configurations that lack one part and as few others as possible, and can run; empty if there are
    none.
    """
    neutral = {n: Move(strategy=n, choice=designer.reference.choices.get(n, {})) for n in (name, *others)}
    for num_others in range(min(len(others), MOST_TOGETHER) + 1):
        moves = ([neutral[n] for n in (name, *together)] for together in itertools.combinations(others, num_others))
        combined = [without for left_out in moves if (without := designer.space.combine(answer, left_out)) is not None]
        legal = [c for c in combined if c != answer and not designer.knowledge.known_to_fail(c)]
        if legal:
            return legal
    return []
