"""Blocks of runs: one run of each candidate, in turns if all fit into memory together, all on the same machine and
devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from steptune.tuner.records import Candidate, Purpose, TrialResult
from steptune.tuner.search.group_runner import GroupRunner
from steptune.tuner.search.knowledge import Knowledge
from steptune.tuner.search.ledger import Ledger
from steptune.tuner.search.preparation import MIN_CAP_S


class BlockRunner:
    """Runner of blocks for one purpose; stored blocks are not run again.

    Args:
        knowledge: Knowledge of the search, for the duration of the runs so far.
        place: Returns the current place: the machine, and its devices in use.
    """

    def __init__(
        self, trials: GroupRunner, ledger: Ledger, knowledge: Knowledge, *, purpose: Purpose, place: Callable[[], str]
    ) -> None:
        self._trials = trials
        self._ledger = ledger
        self._knowledge = knowledge
        self._purpose = purpose
        self._place = place

    def run(
        self, order: Sequence[Candidate], number: int, left_s: Callable[[], float] | None = None
    ) -> dict[str, TrialResult]:
        """Run each candidate once, and return the successful results by candidate key, converted to the objective.

        Args:
            left_s: Seconds that are left: no phase of a trial may exceed them until its first window, and nothing is
                started once they are spent.
        """
        found = {c.key: self._ledger.find(c, self._purpose, number) for c in order}
        if not _is_whole(found.values()):  # a block is of one place
            found = {key: result if result and result.place == self._place() else None for key, result in found.items()}
        for group in self._trials.together([c for c in order if found[c.key] is None]):
            longest_s = None if left_s is None else left_s()
            if longest_s is not None and longest_s <= 0:
                break
            for result in self._trials.run(group, [self._purpose] * len(group), number, longest_s):
                found[result.candidate.key] = result
        counted = {key: self._ledger.counted(result) for key, result in found.items() if result is not None}
        return {key: result for key, result in counted.items() if result.ok}

    def numbers(self, candidates: Sequence[Candidate]) -> Iterator[int]:
        """Yield block numbers in order. A block begun before the budget was changed counts only if it is complete,
        because runs hours apart do not form a block.
        """
        first = self._ledger.first_block(self._purpose)
        stored = (number for number in range(first) if self.is_stored(candidates, number))
        return itertools.chain(stored, itertools.count(first))

    def num_stored(self, candidates: Sequence[Candidate]) -> int:
        """Return the number of blocks of these candidates that were complete before a restart."""
        stored = (self.is_stored(candidates, number) for number in self.numbers(candidates))
        return sum(1 for _ in itertools.takewhile(bool, stored))

    def num_begun(self, candidate: Candidate) -> int:
        """Return how many blocks since the last change of the budget have a stored run of this candidate, even a failed
        one.
        """
        first = self._ledger.first_block(self._purpose)
        found = (self._ledger.find(candidate, self._purpose, number) for number in itertools.count(first))
        return sum(1 for _ in itertools.takewhile(lambda result: result is not None, found))

    def begun_s(self, candidates: Sequence[Candidate]) -> float:
        """Return the seconds that the stored runs of the first block took."""
        first = self._ledger.first_block(self._purpose)
        found = (self._ledger.find(candidate, self._purpose, first) for candidate in candidates)
        return sum(result.duration_ns for result in found if result is not None) / 1e9

    def is_stored(self, candidates: Sequence[Candidate], number: int) -> bool:
        """Say whether all runs of a block are stored and were measured on the same machine and devices."""
        return _is_whole(self._ledger.find(c, self._purpose, number) for c in candidates)

    # --- what a block takes -------------------------------------------------------------------

    def least_s(self, candidates: Sequence[Candidate]) -> float:
        """Return the expected seconds of a block with the shortest windows."""
        return self._starts_s(candidates) + MIN_CAP_S * len(self._trials.together(candidates))

    def longest_cap_s(self, candidates: Sequence[Candidate], block_s: float) -> float:
        """Return the window cap with which a block takes `block_s` seconds; at least `MIN_CAP_S`."""
        return max(MIN_CAP_S, (block_s - self._starts_s(candidates)) / len(self._trials.together(candidates)))

    def _starts_s(self, candidates: Sequence[Candidate]) -> float:
        """Return the seconds until all candidates have their first windows; a candidate that was never run is assumed
        to be as slow as the slowest other one.
        """
        known = [self._knowledge.start_s(candidate) for candidate in candidates]
        return sum(seconds or max(known) for seconds in known)


def _is_whole(found: Iterable[TrialResult | None]) -> bool:
    """Say whether all runs of a block were measured, on the same machine and devices."""
    places = {None if result is None else result.place for result in found}
    return len(places) == 1 and None not in places
