"""The space: every legal choice, and why each other one is not in it."""

import pytest
from builders import sample_environment, sample_facts
from search_builders import SMALL, candidate, move, surface_space

from steptune.tuner.costs.categories import Category
from steptune.tuner.errors import ChoiceError
from steptune.tuner.records import Candidate, Move, Numerics, StudySettings
from steptune.tuner.search.space import Space
from steptune.tuner.strategies import STRATEGIES
from steptune.tuner.strategies.api import Unsupported
from steptune.tuner.strategies.combine import normalise
from steptune.tuner.trials.fake import FakeStrategy, fake_environment, fake_workload


def real_space(device_kind="cpu", current=None, **settings):
    return Space(sample_environment(device_kind), sample_facts(current=current or {}), StudySettings(**settings))


class Picky(FakeStrategy):
    """Level 1 is unsupported, level 2 is lossy, level 3 is another recipe."""

    def __init__(self, *, memory=False):
        super().__init__("picky", Category.MATMUL, 4, memory=memory)

    def supports(self, choice, environment, workload):
        return Unsupported("needs a moon") if choice["level"] == 1 else super().supports(choice, environment, workload)

    def numerics(self, choice):
        return {2: Numerics.LOSSY, 3: Numerics.RECIPE}.get(choice["level"], Numerics.EXACT)


def picky_space(*, memory=False, **settings):
    return Space(fake_environment(), fake_workload(), StudySettings(**settings), [Picky(memory=memory)])


class TestLegality:
    def test_every_choice_is_a_move_or_excluded_with_its_reason(self):
        space = picky_space()
        assert [m.choice["level"] for m in space.moves] == [4]
        assert {e.move.choice["level"]: e.reason for e in space.excluded} == {
            1: "needs a moon",
            2: "is lossy: allow it with --allow lossy",
            3: "is recipe: allow it with --allow recipe",
        }

    @pytest.mark.parametrize(
        ("allow", "levels"), [((Numerics.LOSSY,), [2, 4]), ((Numerics.RECIPE,), [3, 4]), (tuple(Numerics), [2, 3, 4])]
    )
    def test_consent_opens_what_it_names(self, allow, levels):
        assert [m.choice["level"] for m in picky_space(allow=allow).moves] == levels

    def test_only_and_skip(self):
        only, skipped = surface_space(SMALL, only=("loader",)), surface_space(SMALL, skip=("loader",))
        assert {m.strategy for m in only.moves} == {"loader"}
        assert {m.strategy for m in skipped.moves} == {"products", "update"}
        assert {e.reason for e in only.excluded} == {"left out by --only"}
        assert {e.reason for e in skipped.excluded} == {"left out by --skip"}

    @pytest.mark.parametrize("name", ["only", "skip"])
    def test_unknown_names_are_refused(self, name):
        with pytest.raises(ChoiceError, match="no strategy 'lodaer': did you mean 'loader'"):
            surface_space(SMALL, **{name: ("loader", "lodaer")})

    def test_one_that_is_to_be_tried_and_left_out_is_refused(self):
        with pytest.raises(ChoiceError, match="loader: named in both --only and --skip"):
            surface_space(SMALL, only=("loader", "update"), skip=("loader",))

    @pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
    def test_every_strategy_is_accounted_for(self, device_kind):
        """A family is in the space, or excluded with a reason, or has no choice but the neutral one."""
        space = real_space(device_kind)
        seen = {m.strategy for m in space.moves} | {e.move.strategy for e in space.excluded}
        assert all(exclusion.reason for exclusion in space.excluded)
        for strategy in STRATEGIES:
            others = [
                c for c in strategy.choices(space.environment, space.workload) if strategy.difference(c, space.workload)
            ]
            assert strategy.name in seen or not others

    def test_lossy_ways_to_need_less_memory_are_no_reference(self):
        """The reference for all comparisons must be the same training, whatever the user allows."""
        space = picky_space(memory=True, allow=tuple(Numerics))
        assert space.memory_ladder() == [candidate(picky=4)]

    def test_what_costs_a_fresh_interpreter_is_tried_last_of_its_rung(self):
        """Single choices before pairs, and fragmentation is seldom why a workload does not fit."""
        ladder = real_space("cuda").memory_ladder()
        singles = [len(c.choices) == 1 for c in ladder]
        assert singles == sorted(singles, reverse=True)
        for size in (1, 2):
            fresh = ["allocator" in c.choices for c in ladder if len(c.choices) == size]
            assert any(fresh)
            assert fresh == sorted(fresh)


class TestCandidates:
    @pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
    def test_moves_are_normalised_and_differ_from_today(self, device_kind):
        space = real_space(device_kind)
        alone = [Candidate(choices={m.strategy: m.choice}) for m in space.moves]
        assert len({c.key for c in alone}) == len(alone)
        for found in alone:
            assert not found.is_baseline
            assert normalise(found, space.workload) == found

    def test_completing_a_move_and_taking_the_difference_gives_it_back(self):
        space = real_space()
        for chosen in space.moves:
            complete = space.complete(Candidate(choices={chosen.strategy: chosen.choice}))
            assert set(complete) == {strategy.name for strategy in STRATEGIES}
            assert (
                space.strategy(chosen.strategy).difference(complete[chosen.strategy], space.workload) == chosen.choice
            )

    def test_what_the_user_runs_today_is_the_neutral_choice(self):
        today = {"data_loading": {"num_workers": 2}}
        space = real_space(current=today)
        assert space.complete(candidate())["data_loading"]["num_workers"] == 2
        asked = Move(strategy="data_loading", choice={"num_workers": 2})
        assert space.combine(candidate(), [asked]) == candidate()

    def test_parameters_without_meaning_are_dropped(self):
        """Without workers nothing is prefetched."""
        space = real_space()
        odd = Candidate(choices={"data_loading": {"prefetch_factor": 4}})
        assert space.combine(odd, []) == candidate()

    def test_the_order_of_moves_does_not_matter_and_an_empty_choice_undoes(self):
        space = surface_space(SMALL)
        there = space.combine(candidate(), [move("loader", 2), move("products", 1)])
        back = space.combine(candidate(), [move("products", 1), move("loader", 2)])
        assert there == back == candidate(loader=2, products=1)
        assert space.combine(there, [Move(strategy="loader", choice={})]) == candidate(products=1)

    def test_combinations_that_cannot_run_are_none(self):
        """Flash attention on CUDA needs 16-bit inputs."""
        space = real_space("cuda", current={"precision": {"level": "fp32"}})
        assert space.combine(candidate(), [Move(strategy="attention_backend", choice={"backend": "flash"})]) is None
