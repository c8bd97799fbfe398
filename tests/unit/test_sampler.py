"""Optuna as a stateless library: everything it knows it is told."""

import random

import numpy as np
import pytest
from search_builders import candidate, surface_space

from steptune.tuner.search.sampler import suggest_candidates
from steptune.tuner.trials.fake import SEPARABLE

SPACE = surface_space(SEPARABLE)
MOVES = [move for move in SPACE.moves if move.strategy in ("loader", "products", "fusion", "threads")]
TOLD = [
    (candidate(), 0.0),
    (candidate(loader=1), 0.12),
    (candidate(loader=2), 0.2),
    (candidate(products=1), -0.1),
    (candidate(products=2), None),
    (candidate(loader=2, fusion=1), 0.3),
    (candidate(fusion=1), 0.1),
]


def suggested(told=TOLD, **changes):
    known = {done.key for done, _ in told}
    return suggest_candidates(SPACE, MOVES, told, **{"seed": 0, "known": known, **changes})


def test_the_same_rows_give_the_same_suggestions():
    first = suggested()
    random.seed(99)
    np.random.seed(99)
    assert suggested() == first
    assert first
    assert any(suggested(seed=seed) != first for seed in range(1, 4))


def test_global_generators_are_left_alone():
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    suggested()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@pytest.mark.parametrize("seed", range(5))
def test_suggests_legal_candidates_that_were_not_run(seed):
    found = suggested(seed=seed)
    assert len({c.key for c in found}) == len(found)
    for new in found:
        assert new not in [done for done, _ in TOLD]
        assert not new.is_baseline
        assert SPACE.combine(new, []) == new
        assert set(new.choices) <= {"loader", "products", "fusion", "threads"}


def test_keeps_what_it_does_not_decide_on():
    """Choices of strategies that are not among the moves stay as in the base."""
    base = candidate(update=1, loader=1)
    found = suggested(base=base)
    assert found
    assert all(new.choices["update"] == {"level": 1} for new in found)
    assert any(new.choices.get("loader") != {"level": 1} for new in found)


def test_learns_from_what_ran_out_of_memory():
    """Told a wall at `products: level=2`, it asks for that level less often than for the others."""
    generator = random.Random(0)
    told = []
    for _ in range(30):
        levels = {
            "loader": generator.randrange(4),
            "products": generator.randrange(3),
            "fusion": generator.randrange(2),
        }
        value = None if levels["products"] == 2 else 0.05 * levels["fusion"]
        told.append((candidate(**{name: level for name, level in levels.items() if level}), value))
    found = [c for seed in range(6) for c in suggest_candidates(SPACE, MOVES, told, seed=seed, known=set())]
    beyond = [c for c in found if c.choices.get("products") == {"level": 2}]
    assert len(beyond) < len(found) / 6
