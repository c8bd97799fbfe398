"""fused_kernels has a switch for every kernel, whoever registered it; without a use a search ends at the baseline."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
from builders import sample_environment, sample_facts

from steptune.kernels import names
from steptune.tuner.records import BASELINE, StudySettings
from steptune.tuner.search.grid import Grid
from steptune.tuner.search.space import Space
from steptune.tuner.strategies import strategy_named
from steptune.tuner.strategies.fused_kernels.choice import FusedKernelsSetting


@pytest.fixture
def one_more(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    entry = EntryPoint(name="their-kernel", value="other:KERNEL", group=names.GROUP)
    monkeypatch.setattr(names, "entry_points", lambda group: [entry])
    names.pattern_names.cache_clear()
    yield entry.name
    names.pattern_names.cache_clear()


def test_a_switch_for_each_of_ours() -> None:
    assert set(strategy_named("fused_kernels").defaults) >= set(names.OURS)


def test_a_switch_for_one_of_another_package(one_more: str) -> None:
    assert FusedKernelsSetting.defaults()[one_more] is False
    assert FusedKernelsSetting.allowed()[one_more] == (False, True)
    assert FusedKernelsSetting(**{one_more: True}).is_on


def test_switched_off_is_the_default() -> None:
    assert FusedKernelsSetting(lamb=False) == FusedKernelsSetting()
    assert not FusedKernelsSetting(lamb=False).is_on


def test_without_a_use_the_search_has_one_configuration() -> None:
    settings = StudySettings(only=("fused_kernels",))
    space = Space(sample_environment("cpu"), sample_facts(current={}), settings)
    assert not space.moves
    grid = Grid(space, BASELINE)
    assert grid.num_levels == [1]
    assert grid.levels_of(BASELINE) == grid.origin
