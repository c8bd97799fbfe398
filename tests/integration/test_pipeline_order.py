"""The order in which stages really act, replayed on a clock that counts: its idle share is the textbooks' bubble."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import pytest
from ranks import Ranks

from steptune.tuner.training.mesh.pipeline import CHUNKS, num_stages

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # for the processes of the ranks, too

from pipeline_bubble import make_step

pytestmark = pytest.mark.xdist_group("ranks")

Action = tuple[str, int, int]
"""Forward or backward, of a stage, of a micro-batch."""


def acted(rank: int, schedule: str, num_micro_batches: int) -> list[Action]:
    actions: list[Action] = []
    make_step(schedule, num_micro_batches, lambda *action: actions.append(action))()
    return actions


def idle_share(orders: list[list[Action]], num_stages: int) -> Fraction:
    """Idle part of all ranks' time until the last one ends; a backward pass takes twice as long as a forward pass."""
    ended: dict[Action, int] = {}
    free, done = [0] * len(orders), [0] * len(orders)
    while any(place < len(order) for place, order in zip(done, orders, strict=True)):
        before = len(ended)
        for rank, order in enumerate(orders):
            while done[rank] < len(order):
                kind, stage, number = order[done[rank]]
                needs = [("F", stage - 1, number)] if kind == "F" and stage else []
                if kind == "B":
                    needs = [("F", stage, number), *([("B", stage + 1, number)] if stage < num_stages - 1 else [])]
                if not all(need in ended for need in needs):
                    break
                free[rank] = max([free[rank], *(ended[need] for need in needs)]) + (1 if kind == "F" else 2)
                ended[(kind, stage, number)] = free[rank]
                done[rank] += 1
        assert len(ended) > before, "the order waits for itself"
    return 1 - Fraction(3 * sum(len(order) for order in orders) // 2, max(free) * len(orders))


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 8)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_is_that_of_the_textbooks(
    ranks: Ranks, schedule: str, num_ranks: int, num_micro_batches: int
) -> None:
    orders = ranks.run(num_ranks, acted, schedule, num_micro_batches)
    assert idle_share(orders, num_ranks) == Fraction(num_ranks - 1, num_micro_batches + num_ranks - 1)


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 2), (2, 8), (4, 8)])
def test_interleaved_stages_make_it_smaller(ranks: Ranks, num_ranks: int, num_micro_batches: int) -> None:
    orders = ranks.run(num_ranks, acted, "interleaved", num_micro_batches)
    expected = Fraction(num_ranks - 1, CHUNKS * num_micro_batches + num_ranks - 1)
    assert idle_share(orders, num_stages("interleaved", num_ranks)) == expected


@pytest.mark.parametrize(("schedule", "kept"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])])
def test_stages_keep_as_many_micro_batches_as_the_memory_argument_says(
    ranks: Ranks, schedule: str, kept: list[int]
) -> None:
    from steptune.tuner.training.mesh.stages import in_flight

    orders = ranks.run(4, acted, schedule, 8)
    most = [max(_begun(order)) for order in orders]
    assert most == kept == [in_flight(schedule, stage, 4, 4, 8) for stage in range(4)]


def test_interleaved_stages_keep_no_more_than_is_counted_on(ranks: Ranks) -> None:
    from steptune.tuner.training.mesh.stages import in_flight

    orders = ranks.run(4, acted, "interleaved", 8)
    for rank, order in enumerate(orders):
        assert max(_begun(order)) <= CHUNKS * in_flight("interleaved", rank, 8, 4, 8)


def _begun(order: list[Action]) -> list[int]:
    """Micro-batches of all of a rank's stages that are begun and not finished, after every action."""
    count, found = 0, []
    for kind, _, _ in order:
        count += 1 if kind == "F" else -1
        found.append(count)
    return found
