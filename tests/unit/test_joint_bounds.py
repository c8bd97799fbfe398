"""Savings that several changes could bring together: disjoint categories add up, a shared one counts once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from builders import sample_environment, sample_facts
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.costs.bounds import Situation, above_roofline, at_roofline, jointly
from steptune.tuner.costs.categories import COMPUTE, Category
from steptune.tuner.records import Breakdown, CaptureQuality, Move, Numerics, StudySettings
from steptune.tuner.search.space import Space
from steptune.tuner.strategies import STRATEGIES

C = Category
SPACES = {
    kind: Space(sample_environment(kind), sample_facts(), StudySettings(allow=tuple(Numerics)))
    for kind in ("cpu", "cuda")
}
DEFAULTS = {strategy.name: dict(strategy.defaults) for strategy in STRATEGIES}
TOLERANCE = 1e-9


def situation(kind: str, parts: Mapping[Category, float]) -> Situation:
    """A step whose time is shared out in these parts."""
    space = SPACES[kind]
    times = {category.value: round(1000 * part) for category, part in parts.items()}
    breakdown = Breakdown(
        rank=0,
        device=kind,
        num_steps=1,
        step_time_ns=sum(times.values()),
        categories=times,
        quality=CaptureQuality(num_events=1, num_steps=1),
    )
    return Situation(breakdown=breakdown, workload=space.workload, environment=space.environment, choices=DEFAULTS)


@st.composite
def cases(draw: Any) -> tuple[Space, Situation, list[Move]]:
    kind = draw(st.sampled_from(sorted(SPACES)))
    weights = {c: draw(st.integers(0, 100)) for c in Category}
    moves = draw(st.lists(st.sampled_from(SPACES[kind].moves), min_size=1, max_size=5, unique_by=lambda m: m.strategy))
    return SPACES[kind], situation(kind, weights), moves


@given(case=cases())
def test_a_joint_bound_lies_between_the_largest_and_the_sum(case: tuple[Space, Situation, list[Move]]) -> None:
    space, found, moves = case
    alone = [space.bound(move, found) for move in moves]
    joint = space.joint_bound(moves, found)
    assert max(alone) - TOLERANCE <= joint <= min(1.0, sum(alone)) + TOLERANCE


@given(case=cases(), data=st.data())
def test_it_grows_with_the_set_depends_on_no_order_and_no_cut(
    case: tuple[Space, Situation, list[Move]], data: st.DataObject
) -> None:
    """Two parts of the set may each be bounded jointly, and both bounds added."""
    space, found, moves = case
    joint = space.joint_bound(moves, found)
    assert space.joint_bound(data.draw(st.permutations(moves)), found) == pytest.approx(joint)
    assert space.joint_bound([*moves, *moves], found) == pytest.approx(joint)
    cut = data.draw(st.integers(0, len(moves)))
    parts = [space.joint_bound(part, found) for part in (moves[:cut], moves[cut:])]
    assert max(parts) - TOLERANCE <= joint <= sum(parts) + TOLERANCE


@given(case=cases())
def test_a_step_is_never_saved_in_a_category_beyond_its_time(case: tuple[Space, Situation, list[Move]]) -> None:
    space, found, moves = case
    for move in moves:
        strategy = space.strategy(move.strategy)
        saved = strategy.savings(found, strategy.complete(move.choice, space.workload))
        assert set(saved) <= set(Category)
        for category, share in saved.items():
            assert -TOLERANCE <= share <= found.breakdown.share(category) + TOLERANCE, (move.label, category)


def test_two_ways_to_shrink_one_category_save_it_once_and_another_adds_up() -> None:
    space = SPACES["cpu"]
    found = situation("cpu", {C.MATMUL: 0.5, C.OPTIMIZER: 0.3, C.DATA_WAIT: 0.2})
    by_name = {move.strategy: move for move in reversed(space.moves)}
    update, other, loader = (by_name[n] for n in ("optimizer_implementation", "optimizer_algorithm", "dataset_cache"))
    assert space.joint_bound([update, other], found) == pytest.approx(0.3)
    assert space.joint_bound([update, other, loader], found) == pytest.approx(0.5)
    assert space.joint_bound([], found) == 0.0


def test_of_two_floors_the_smaller_counts() -> None:
    assert jointly({C.MATMUL: 0.2, C.HOST: 0.1}, {C.MATMUL: 0.3}) == {C.MATMUL: 0.3, C.HOST: 0.1}


@pytest.mark.parametrize(
    "categories", [(), (C.MATMUL,), (C.MATMUL, C.ATTENTION), (C.ELEMENTWISE,), (C.ATTENTION, C.REDUCTION)], ids=str
)
def test_what_is_left_at_the_roofline_is_shared_out_without_a_rest(categories: tuple[Category, ...]) -> None:
    for times in itertools.product((0.0, 0.1, 0.4), repeat=3):
        shares = dict(zip((C.MATMUL, C.ATTENTION, C.ELEMENTWISE), times, strict=True))
        found = situation("cpu", {**shares, C.HOST: 1 - sum(times)}) if sum(times) <= 1 else None
        if found is not None:
            saved = at_roofline(found, *categories)
            assert sum(saved.values()) == pytest.approx(above_roofline(found, *categories))
            assert set(saved) == set(categories or COMPUTE)
