"""Run of the confirmation: as many finalists and blocks as the remaining time allows, block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from steptune.tuner.records import Candidate, Decision, Purpose, StudySettings, TrialResult
from steptune.tuner.search.blocks import BlockRunner
from steptune.tuner.search.confirmation import (
    LEAST_BLOCKS,
    LONGEST_OVERRUN,
    MAX_BLOCKS,
    Block,
    Finalist,
    early_end,
    has_wide_interval,
    judge,
    num_blocks,
    plan_blocks,
)
from steptune.tuner.search.designer import Designer
from steptune.tuner.search.group_runner import GroupRunner
from steptune.tuner.search.ledger import Ledger
from steptune.tuner.search.specs import measure_settings
from steptune.tuner.search.view import StudyView

CONFIRM_CAPS = 1.5
"""Maximum length of the confirmation's windows, as a multiple of the length in the search."""


class ConfirmationRun:
    """Confirmation of a search's finalists: they are measured again together with the reference until the answer is
    clear or the planned blocks are done. An interrupted confirmation can be judged by its completed blocks.
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
    ) -> None:
        self.designer = designer
        self._trials = trials
        self._ledger = ledger
        self._block_runner = BlockRunner(trials, ledger, designer.knowledge, purpose=Purpose.CONFIRM, place=place)
        self._settings = settings
        self._view = view
        self._finalists: list[Candidate] = []
        self._short_of_time = False
        """True if the time sufficed only for fewer blocks than requested."""
        self._planned = 0
        """Planned number of blocks; it grows by one block at a time only while the interval is still wide."""
        self._longest_s = 0.0
        """Seconds of the longest block so far."""
        self._ended_early = ""
        """Reason why no further block was needed; empty while further blocks are needed."""
        self.blocks: list[dict[str, TrialResult]] = []
        """Results of each block's successful trials, by candidate key, adjusted for the study's objective."""

    def run(self) -> None:
        """Run the missing blocks."""
        self._choose_finalists()
        if not self._finalists:
            return
        stored = self._block_runner.num_stored(self._all())
        # Slow starts leave fewer blocks than asked for; fewer than the least say nothing.
        least = min(LEAST_BLOCKS, self._settings.confirm_blocks)
        affordable = stored + int(self._view.left_s / self._least_block_s() + 1e-6)
        if affordable < least and self._too_late(least - stored):
            self._short_of_time = True
            return
        count = max(least, stored, min(self._num_wanted(), affordable))
        self._short_of_time = count < self._settings.confirm_blocks
        self._set_windows(count - stored)
        numbers = self._block_runner.numbers(self._all())
        for block in plan_blocks(self.designer.reference, self._finalists, max(count, MAX_BLOCKS), self._settings.seed):
            if block.number >= max(least, stored) and not self._has_time(is_planned=block.number < count):
                self._short_of_time = block.number < self._settings.confirm_blocks
                break  # starts took longer than in the search
            self._planned = max(count, block.number + 1)
            self._run_block(block, next(numbers))
            done = block.number + 1
            if done >= count and not has_wide_interval(self.judged()):
                self._short_of_time = done < self._settings.confirm_blocks
                break
            if max(least, stored) <= done < count:
                self._ended_early = early_end(self.judged())
                if self._ended_early:
                    self._short_of_time = False
                    break

    def _run_block(self, block: Block, number: int) -> None:
        began_s = self._view.elapsed_s
        current = f"block {block.number + 1} of {self._planned}"
        self._view.say(stage="confirming", current=current, activity="")
        self.blocks.append(self._block_runner.run(block.order, number))
        self._view.num_trials = self._ledger.num_trials
        self._longest_s = max(self._longest_s, self._view.elapsed_s - began_s)

    def _has_time(self, *, is_planned: bool) -> bool:
        """Say whether the remaining time suffices for another block. Only blocks run now show how long one takes;
        stored blocks do not.
        """
        needed_s = self._longest_s if is_planned else max(self._longest_s, self._least_block_s())
        return self._view.left_s >= needed_s

    def judged(self) -> list[Finalist]:
        """Return the finalists, the best first; none before the first block."""
        if not self.blocks:
            return []
        results = self.designer.knowledge.results
        earlier = {c.key: [result for result in results.get(c.key, []) if result.ok] for c in self._all()}
        return judge(self.designer.reference, self._finalists, self.blocks, earlier, self._planned)

    def decisions(self, judged: Sequence[Finalist]) -> list[Decision]:
        """Return one decision for each finalist, numbered after the decisions of the search."""
        first = len(self.designer.decisions) + 1
        return [
            Decision(
                sequence=first + number,
                stage="confirm",
                verdict="confirmed" if finalist.is_faster else "not_confirmed",
                reason=self._how_confirmed(len(finalist.log_ratios)),
                candidate=finalist.candidate,
                measured_gain=finalist.gain.ratio - 1 if finalist.gain else None,
            )
            for number, finalist in enumerate(judged)
        ]

    def _how_confirmed(self, num_starts: int) -> str:
        wanted = self._settings.confirm_blocks
        short = f": fewer than the {wanted} requested, because the budget was spent" if self._short_of_time else ""
        short = f": ended early, because {self._ended_early}" if self._ended_early else short
        return f"{num_starts} runs against the baseline, in random order{short}"

    def no_time_for(self) -> list[str]:
        """Describe the requested blocks that were not run; empty if there are none."""
        missing = self._settings.confirm_blocks - len(self.blocks)
        if not self._finalists or missing <= 0 or self._ended_early:
            return []
        return [f"{missing} of the {self._settings.confirm_blocks} confirmation blocks"]

    def _too_late(self, num_missing: int) -> bool:
        """Say whether the missing blocks would overrun the budget by more than `LONGEST_OVERRUN`."""
        return num_missing * self._least_block_s() > self._view.left_s + LONGEST_OVERRUN * self._view.budget_s

    # --- how much -----------------------------------------------------------------------------

    def _choose_finalists(self) -> None:
        """Choose the finalists: fewer of them rather than fewer blocks, because an interval needs replicates."""
        self._finalists = self.designer.finalists(self._settings.num_finalists)
        while len(self._finalists) > 1:
            missing = self._settings.confirm_blocks - self._block_runner.num_stored(self._all())
            if missing * self._least_block_s() <= self._view.left_s:
                break
            self._finalists.pop()

    def _num_wanted(self) -> int:
        """Return the number of blocks needed, at the measured noise, to prove the gain that the search estimated."""
        knowledge, reference = self.designer.knowledge, self.designer.reference
        return num_blocks(
            at_least=self._settings.confirm_blocks,
            noise_sd=knowledge.noise_sd(reference, self._finalists[0]),
            expected_gain=self.designer.difference(self._finalists[0], reference).ratio - 1,
            num_finalists=len(self._finalists),
        )

    def _set_windows(self, num_missing: int) -> None:
        """Set windows as long as the remaining time allows, up to a cap, because runs differ more than windows of one
        run.
        """
        cap_s = self._block_runner.longest_cap_s(self._all(), self._view.left_s / max(1, num_missing))
        cap_s = min(cap_s, CONFIRM_CAPS * self._trials.measure.cap_s)
        self._trials.measure = measure_settings(self._settings.measure, cap_s)

    def _all(self) -> list[Candidate]:
        return [self.designer.reference, *self._finalists]

    def _least_block_s(self) -> float:
        """Return the expected seconds of a block with the shortest windows."""
        return self._block_runner.least_s(self._all())
