"""Groups of choices in which every pair meets, with few groups.

Choices that bring nothing alone may pay together. Trying all pairs takes too many trials; a group that
sets one choice of every strategy lets many pairs meet in one trial, and a group that pays is halved
until the pair is found. Each group is built greedily to let as many pairs meet for the first time as
possible, as in covering arrays (Cohen et al., "The AETG system", IEEE TSE 1997).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, product

from steptune.tuner.records import Candidate, Move

TRIES = 20


def covering_group(options: Sequence[Move], run: Sequence[Candidate], generator: random.Random) -> list[Move]:
    """One choice for each strategy, such that many pairs meet that never did.

    Args:
        options: The choices that may be combined.
        run: Candidates that were run: pairs in them have met.

    Returns:
        The group; empty where every pair has met.
    """
    by_strategy: dict[str, list[Move]] = {}
    for move in options:
        by_strategy.setdefault(move.strategy, []).append(move)
    best: list[Move] = []
    most = 0
    for _ in range(TRIES):
        names = list(by_strategy)
        generator.shuffle(names)
        group: list[Move] = []
        count = 0
        for name in names:
            scored = [
                (sum(not _met(move, other, run) for other in group), generator.random(), move)
                for move in by_strategy[name]
            ]
            new, _, move = max(scored, key=lambda item: item[:2])
            group.append(move)
            count += new
        if count > most:
            best, most = group, count
    return best or _with_unmet_pair(by_strategy, run)


def _with_unmet_pair(by_strategy: dict[str, list[Move]], run: Sequence[Candidate]) -> list[Move]:
    """A group around the first pair that never met; empty where every pair has."""
    for first, second in combinations(by_strategy, 2):
        for pair in product(by_strategy[first], by_strategy[second]):
            if not _met(*pair, run):
                others = [moves[0] for name, moves in by_strategy.items() if name not in (first, second)]
                return [*pair, *others]
    return []


def _met(first: Move, second: Move, run: Sequence[Candidate]) -> bool:
    return any(
        candidate.choices.get(first.strategy) == first.choice
        and candidate.choices.get(second.strategy) == second.choice
        for candidate in run
    )
