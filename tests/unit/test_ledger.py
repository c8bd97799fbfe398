"""The ledger and the specs: what is asked for, with which limits, and never twice."""

from typing import Any

import msgspec
import pytest
from builders import sample_study, sample_topology
from search_builders import SMALL, candidate, move, run_one, surface_space

from steptune.tuner.memory_store import MemoryStudyStore
from steptune.tuner.records import Link, MeasureSettings, Phase, Purpose, StudySettings, TrialState
from steptune.tuner.search.ledger import Ledger
from steptune.tuner.search.specs import (
    MIN_DEADLINE_S,
    PATIENCE,
    SpecMaker,
    expected_step_ns,
    guard_protocol,
    measure_settings,
)
from steptune.tuner.trials.fake import FakeRunner, fake_workload

BASE, FAST = candidate(), candidate(loader=2)
PAIR = [Purpose.COMPANION, Purpose.EXPLORE]


@pytest.fixture
def store():
    store = MemoryStudyStore()
    store.create_study(sample_study())
    return store


@pytest.fixture
def maker():
    return SpecMaker(sample_study(settings=StudySettings(seed=3)), surface_space(SMALL), BASE)


def group_of(maker, ledger, group="g", replicate=0):
    specs = [maker.spec(BASE, PAIR[0], replicate), maker.spec(FAST, PAIR[1], replicate)]
    trials = ledger.begin(specs, PAIR, group, replicate)
    results = FakeRunner(SMALL).run(specs, PAIR, MeasureSettings(cap_s=6.0), group, lambda progress: None)
    return trials, results


class TestLedger:
    def test_finds_what_is_complete_in_this_and_in_a_later_process(self, store, maker):
        ledger = Ledger(store, sample_study().study_id)
        assert ledger.find(FAST, Purpose.EXPLORE, 0) is None
        trials, results = group_of(maker, ledger)
        assert ledger.find(FAST, Purpose.EXPLORE, 0) is None, "not before it is complete"
        ledger.complete(trials, results)
        for reader in (ledger, Ledger(store, sample_study().study_id)):
            assert reader.find(FAST, Purpose.EXPLORE, 0) == results[1]
            assert reader.companion_of(results[1]) == results[0]
            assert reader.find(FAST, Purpose.EXPLORE, 1) is None
            assert reader.find(FAST, Purpose.CONFIRM, 0) is None
            assert reader.find(BASE, Purpose.EXPLORE, 0) is None
            assert (reader.num_trials, reader.spent_s) == (2, pytest.approx(6.0))

    def test_trials_that_were_running_when_their_process_died_are_lost(self, store, maker):
        group_of(maker, Ledger(store, sample_study().study_id))
        later = Ledger(store, sample_study().study_id)
        assert [t.state for t in store.trials(sample_study().study_id)] == [TrialState.LOST] * 2
        assert later.find(FAST, Purpose.EXPLORE, 0) is None
        trials, results = group_of(maker, later)
        later.complete(trials, results)
        assert [t.sequence for t in store.trials(sample_study().study_id)] == [1, 2, 3, 4]


class TestSpecs:
    def test_guard_and_profile_the_first_start_only(self, maker):
        assert [maker.spec(FAST, Purpose.EXPLORE, n).guard for n in (0, 1)] == [True, False]
        assert [maker.spec(FAST, Purpose.EXPLORE, n).profile for n in (0, 1)] == [True, False]
        for purpose in (Purpose.CONFIRM, Purpose.COMPANION, Purpose.SENTINEL, Purpose.REPLICATE):
            assert not maker.spec(FAST, purpose, 0).guard

    @pytest.mark.parametrize(("sample_ns", "checked"), [(1, True), (10**9, False), (None, False)])
    def test_check_what_a_candidate_is_fed_whatever_it_changes_where_that_is_cheap(self, sample_ns, checked):
        space = surface_space(SMALL)
        dataset = msgspec.structs.replace(space.workload.dataset, sample_ns=sample_ns)
        space.workload = msgspec.structs.replace(space.workload, dataset=dataset)
        maker = SpecMaker(sample_study(), space, BASE)
        assert maker.spec(candidate(update=1), Purpose.EXPLORE, 0).checks_loader is checked

    def test_are_complete_and_new_each_time(self, maker):
        first, again = (maker.spec(FAST, Purpose.EXPLORE, 0) for _ in range(2))
        assert first.choices == {"loader": {"level": 2}, "products": {"level": 0}, "update": {"level": 0}}
        assert first.seed == 3
        assert first.trial_id != again.trial_id

    def test_deadlines_are_multiples_of_what_the_baseline_took(self, maker):
        before = maker.spec(FAST, Purpose.EXPLORE, 0).deadlines
        maker.learn(run_one(FakeRunner(SMALL), BASE))  # five seconds of windows, nothing else
        after = maker.spec(FAST, Purpose.EXPLORE, 0).deadlines
        assert after.of(Phase.MEASURE) == pytest.approx(5 * PATIENCE)
        assert after.of(Phase.BUILD) == before.of(Phase.BUILD) > MIN_DEADLINE_S

    def test_a_fixed_deadline_is_kept(self):
        maker = SpecMaker(sample_study(settings=StudySettings(phase_timeout_s=7.0)), surface_space(SMALL), BASE)
        deadlines = maker.spec(FAST, Purpose.EXPLORE, 0).deadlines
        assert {deadlines.of(phase) for phase in Phase} == {7.0}

    def test_the_cap_only_ever_shortens(self):
        base = MeasureSettings(cap_s=4.0)
        assert [measure_settings(base, cap).cap_s for cap in (1.0, 9.0)] == [1.0, 4.0]

    @pytest.mark.parametrize("seconds", [0.0, 1.0, 1000.0])
    def test_the_guard_takes_what_steps_there_is_time_for_within_limits(self, seconds):
        step_ns = fake_workload().sample_step_ns
        figures: dict[str, Any] = {"num_roundoffs": 2, "bias_corrections": False, "seed": 0}
        figures |= {"seconds": seconds, "step_ns": step_ns}
        protocol = guard_protocol(fake_workload(), lossy=False, **figures)
        assert 2 <= protocol.num_pointwise <= 5
        assert protocol.num_horizon == 0
        assert protocol.num_disturbed == (2 if seconds >= 1 else 1)
        lossy = guard_protocol(fake_workload(), lossy=True, **figures)
        assert 16 <= lossy.num_horizon <= 60
        assert (lossy.num_horizon == 60) is (seconds > 0)

    def test_masks_that_are_drawn_by_one_run_cost_no_runs_over_seeds(self):
        """Two runs and four disturbed ones of four steps and two audits, and 16 draws: 52 steps. Runs over two more
        seeds, each with a second part, would have left them half as many.
        """
        facts = msgspec.structs.replace(fake_workload(), randomness="switchable")
        figures: dict[str, Any] = {"num_roundoffs": 2, "bias_corrections": False, "lossy": False, "seed": 0}
        figures |= {"seconds": 52.0, "step_ns": 1e9}
        protocol = guard_protocol(facts, **figures, draws=True)
        assert (protocol.num_pointwise, protocol.num_audits, protocol.num_disturbed) == (4, 2, 2)
        assert guard_protocol(facts, **{**figures, "seconds": 51.0}, draws=True).num_pointwise < 4
        assert guard_protocol(facts, **figures).num_pointwise == 2

    def test_a_step_of_the_reference_exchanges_its_gradients(self):
        """Each of four ranks sends three quarters of 1 GB twice."""
        facts = fake_workload()
        facts = msgspec.structs.replace(facts, model=msgspec.structs.replace(facts.model, parameter_bytes=10**9))
        link = Link(kind="network", latency_ns=0, bytes_per_s=1e9)
        assert expected_step_ns(facts, None) == facts.sample_step_ns
        slow = expected_step_ns(facts, sample_topology(whole=link))
        assert slow == pytest.approx(facts.sample_step_ns + 1.5e9)


def test_moves_of_the_surface_are_its_levels():
    """The builders of these tests say what they seem to."""
    assert list(surface_space(SMALL).moves) == [
        move("loader", 1), move("loader", 2), move("products", 1), move("products", 2), move("update", 1)
    ]  # fmt: skip
