"""Duties of every search, whoever wrote it, under the designer that asks it."""

import random

import pytest
from search_builders import NO_LIMIT_S, RECOMPILING, SMALL, Machine, StudyRun, candidate, searched, surface_space, tell

from steptune.service.api.requests import StudyRequest
from steptune.tuner.errors import ChoiceError
from steptune.tuner.records import BASELINE, Candidate, FailureKind, Purpose, Verdict
from steptune.tuner.search import model_search, searches
from steptune.tuner.search.confirmation import LONGEST_OVERRUN
from steptune.tuner.search.designer import Designer
from steptune.tuner.search.history import Proposal
from steptune.tuner.search.knowledge import Priors
from steptune.tuner.search.model_search import ModelSearch, as_it_came_true
from steptune.tuner.search.plain_searches import RandomSearch
from steptune.tuner.search.searches import OWN, make_search, search_names
from steptune.tuner.trials.fake import PAIR, SEPARABLE, WALL, FakeRunner, FakeStrategy

TRIALS = 7


class Backwards:
    """A search of another package: the last choices first, one at a time. Ends after four."""

    def __init__(self):
        self.told = []

    def update(self, results):
        self.told += results

    def suggest(self, history):
        if len(self.told) > 4:
            return []
        single = [history.space.combine(history.grid.reference, [move]) for move in reversed(history.space.moves)]
        return [Proposal(candidate=c, reason="from behind") for c in single if not history.knowledge.was_run(c)]


class Entry:
    name, value = "backwards", "someone.elses:Backwards"

    @staticmethod
    def load():
        return Backwards


@pytest.fixture
def installed(monkeypatch):
    """Pretend that a package with that entry point is installed."""
    monkeypatch.setattr(searches, "entry_points", lambda group, name="backwards": [Entry] * (name == "backwards"))


def told(name, trials=TRIALS, seed=1):
    """Suggestions and outcomes of a search of seven trials on a surface with a wall of memory."""
    runner = FakeRunner(WALL, noise_sd=0.01, seed=seed)
    designer = Designer(
        surface_space(WALL), search=make_search(name), budget_s=NO_LIMIT_S, max_trials=trials, seed=seed
    )
    return *tell(designer, runner), designer


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", [name for name in (*OWN, "backwards") if name != "gp"])
class TestEverySearch:
    def test_begins_with_the_baseline_and_keeps_its_limit(self, name):
        suggestions, _, designer = told(name)
        assert suggestions[0].purpose is Purpose.BASELINE
        assert len(suggestions) <= TRIALS
        assert designer.suggest() is None

    def test_answers_with_what_was_measured(self, name):
        _, outcomes, designer = told(name)
        assert designer.best() in [outcome.result.candidate for outcome in outcomes if outcome.result.ok]

    def test_every_trial_is_decided_on_with_a_reason(self, name):
        suggestions, outcomes, designer = told(name)
        changed = [
            outcome.result.trial_id
            for suggestion, outcome in zip(suggestions, outcomes, strict=True)
            if suggestion.stage != "baseline"
        ]
        assert sorted(t for decision in designer.decisions for t in decision.trial_ids) == sorted(changed)
        assert all(suggestion.reason for suggestion in suggestions)
        assert all(decision.reason for decision in designer.decisions)

    def test_nothing_that_failed_is_started_again(self, name):
        suggestions, outcomes, _ = told(name)
        failed = [s.candidate.key for s, o in zip(suggestions, outcomes, strict=True) if not o.result.ok]
        assert len(failed) == len(set(failed))

    def test_the_same_history_gives_the_same_next_trial(self, name):
        suggestions, outcomes, _ = told(name)
        random.seed(17)
        again = Designer(surface_space(WALL), search=make_search(name), budget_s=NO_LIMIT_S, max_trials=TRIALS, seed=1)
        for suggestion, outcome in zip(suggestions, outcomes, strict=True):
            assert again.suggest() == suggestion
            again.update(outcome)

    def test_a_study_of_it_is_confirmed_and_goes_on_after_a_kill(self, name):
        limits = {"search": name, "max_trials": TRIALS, "confirm_blocks": 2}
        whole = StudyRun(Machine(WALL), **limits)
        answer = whole.run()
        study = StudyRun(Machine(WALL, interrupt_at=4), **limits)
        study.run()
        assert study.run().candidate == answer.candidate
        assert study.story() == whole.story()


class TestNames:
    def test_a_search_that_does_not_exist_is_refused_with_those_that_do(self):
        with pytest.raises(ChoiceError, match=r"there is no search 'modl': did you mean 'model'\?"):
            make_search("modl")

    def test_a_study_of_the_search_that_is_no_more_goes_on_with_the_default(self):
        assert "stages" not in search_names()
        assert type(make_search("stages")) is type(make_search(search_names()[0]))

    @pytest.mark.usefixtures("installed")
    def test_what_cannot_propose_is_refused_by_what_it_lacks(self, monkeypatch):
        monkeypatch.setattr(Entry, "load", staticmethod(lambda: object))
        with pytest.raises(ChoiceError, match=r"'backwards' of someone.elses:Backwards has no method suggest"):
            make_search("backwards")


def test_the_model_ends_when_nothing_is_likely_left():
    """And says how likely that is."""
    _, _, designer = told("model", trials=60)
    certificate = designer.certificate()
    assert certificate.ended == "no bound above noise"
    assert certificate.probability_left < 0.05


def test_late_proposals_take_turns_with_those_of_the_step_alone(monkeypatch):
    asked = set()

    class Noted(model_search.Look):
        def proposals(self, pool):
            asked.add((len(self._history.starts), self._history.by_category))
            return super().proposals(pool)

    monkeypatch.setattr(model_search, "Look", Noted)
    search = ModelSearch(ends_below=0.0)
    designer = Designer(surface_space(SEPARABLE), search=search, budget_s=NO_LIMIT_S, max_trials=14)
    tell(designer, FakeRunner(SEPARABLE, noise_sd=0.01))
    by_step = sorted(number for number, by_category in asked if not by_category)
    first = max(8, int(0.75 * sum(n - 1 for n in designer.grid.num_levels)))
    assert by_step == list(range(first, 14, 2))
    assert {number for number, by_category in asked if by_category} == set(range(1, 14)) - set(by_step)


def test_draws_that_say_too_much_are_read_as_they_came_true():
    """Chances that they call even come true less often; those that they are sure of stay sure, and more stays more."""
    said = [0.0, 0.05, 0.2, 0.5, 0.9, 1.0]
    read = [as_it_came_true(probability) for probability in said]
    assert (read[0], read[-1]) == (0.0, 1.0)
    assert read == sorted(read)
    assert all(less < probability for less, probability in zip(read[1:-1], said[1:-1], strict=True))


class Doubtful(Backwards):
    """Tries every choice alone and still expects something of those together."""

    probability_left = 0.9

    def suggest(self, history):
        self.told.clear()
        return super().suggest(history)


def test_that_every_choice_was_tried_alone_does_not_mean_that_nothing_is_left():
    space = surface_space(PAIR)
    designer = Designer(space, search=Doubtful(), budget_s=NO_LIMIT_S, max_trials=len(space.moves) + 1)
    tell(designer, FakeRunner(PAIR, noise_sd=0.001))
    certificate = designer.certificate()
    assert (certificate.ended, certificate.probability_left) == ("trials spent", 0.9)


@pytest.mark.parametrize("seed", range(3))
def test_the_answer_of_the_model_changes_nothing_that_brings_nothing(seed):
    """Most strategies of this surface do nothing; the search tries several of them at once."""
    designer = Designer(surface_space(PAIR), search=make_search("model"), budget_s=NO_LIMIT_S, max_trials=25, seed=seed)
    tell(designer, FakeRunner(PAIR, noise_sd=0.001, seed=seed))
    answer = designer.best()
    assert not answer.is_baseline
    for name in answer.choices:
        without = Candidate(choices={other: choice for other, choice in answer.choices.items() if other != name})
        assert PAIR.total_ms(without) > PAIR.total_ms(answer), name


class Recompiling(FakeStrategy):
    """A strategy that the compiled model depends on, and that says what compiling costs."""

    recompiles = True
    trial_cost_s = 60.0


class Hurried(Recompiling):
    """A strategy that says too little of what compiling costs."""

    trial_cost_s = 5.0


@pytest.mark.parametrize("seed", range(3))
def test_a_start_that_would_compile_beyond_the_time_left_is_not_proposed(seed):
    """Candidates of the model that is compiled already can still be paid for, and are tried."""
    compile_s = dict.fromkeys(RECOMPILING, 60.0)
    machine = Machine(SEPARABLE, compile_s=compile_s, start_s=2.0, seed=seed)
    strategies = [Recompiling(s.name, s.category, s.levels) if s.name in compile_s else s for s in SEPARABLE.strategies]
    study = StudyRun(
        machine, strategies=strategies, search="model", budget_s=200.0, max_trials=None, confirm_blocks=2, seed=seed
    )
    study.run()
    assert [trial for trial in study.trials if trial.result.failure is not None] == []
    assert len({trial.candidate.key for trial in study.trials}) > 3


@pytest.mark.parametrize("seed", range(3))
def test_a_first_compilation_that_takes_longer_than_expected_leaves_time_for_an_answer(seed):
    """It is ended while something else can still be tried, and confirmed."""
    compile_s = dict.fromkeys(RECOMPILING, 500.0)
    machine = Machine(SEPARABLE, compile_s=compile_s, start_s=2.0, seed=seed)
    strategies = [Hurried(s.name, s.category, s.levels) if s.name in compile_s else s for s in SEPARABLE.strategies]
    study = StudyRun(
        machine, strategies=strategies, search="model", budget_s=60.0, max_trials=None, confirm_blocks=2, seed=seed
    )
    answer = study.run()
    kinds = [trial.result.failure.kind for trial in study.trials if trial.result.failure is not None]
    assert kinds == [FailureKind.TIMEOUT], "the first compilation, and no second one"
    assert answer.verdict is Verdict.FASTER
    assert machine.now_s <= (1 + LONGEST_OVERRUN) * 60.0


@pytest.mark.parametrize(("left_s", "longest_s"), [(1000.0, 500.0), (150.0, 97.5), (70.0, 70.0)])
def test_a_later_compilation_may_take_half_of_what_is_left_or_somewhat_more_than_expected(left_s, longest_s):
    """A model that autotuned for minutes took all that was left of a study that had found a gain before."""
    designer = searched(SEPARABLE, 0, trials=8)
    assert designer.best() != designer.reference
    measured = [c.choices for c in designer.knowledge.measured()]
    unseen = next(m for m in designer.space.moves if all(c.get(m.strategy) != m.choice for c in measured))
    for strategy in designer.space.strategies:
        strategy.recompiles = strategy.name == unseen.strategy
        strategy.trial_cost_s = 60.0 if strategy.name == unseen.strategy else 0.0
    designer.budget_s += left_s - designer.left_s
    fused = BASELINE.with_choice(unseen.strategy, unseen.choice)
    assert designer.history.cost_s(fused) == pytest.approx(65.0)
    assert designer.longest_s(fused) == pytest.approx(longest_s)
    assert designer.longest_s(designer.reference) == pytest.approx(left_s)


@pytest.mark.parametrize("seed", range(3))
def test_a_compilation_is_not_ended_for_candidates_that_do_not_exist(seed):
    """Where every choice compiles, time that is left for another one is of no use."""
    machine = Machine(SEPARABLE, compile_s={"fusion": 42.0}, start_s=2.0, seed=seed)
    strategies = [Hurried(s.name, s.category, s.levels) for s in SEPARABLE.strategies]
    study = StudyRun(
        machine, strategies=strategies, search="model", budget_s=60.0, max_trials=None, confirm_blocks=2, seed=seed
    )
    study.run()
    first = next(trial.result for trial in study.trials if not trial.candidate.is_baseline)
    assert first.failure is None


def test_a_service_keeps_the_name_with_the_study_and_refuses_one_that_does_not_exist():
    assert StudyRequest(workload="zoo:synthetic", search="model").settings().search == "model"
    with pytest.raises(ValueError, match="there is no search 'modl'"):
        StudyRequest(workload="zoo:synthetic", search="modl")


@pytest.mark.parametrize("before", ["as here", "elsewhere", "unknown"])
def test_a_winner_of_another_study_is_tried_first_unless_its_time_went_elsewhere(before):
    def suggested(**priors):
        designer = Designer(
            surface_space(SMALL), search=RandomSearch(), budget_s=NO_LIMIT_S, max_trials=3, priors=Priors(**priors)
        )
        return designer, tell(designer, FakeRunner(SMALL, noise_sd=0.01))[0]

    shares = suggested()[0].knowledge.own_situation(BASELINE).shares
    told = {"as here": (shares,), "elsewhere": ({"communication": 1.0},), "unknown": ()}[before]
    winner = candidate(loader=2)
    found = [s.candidate for s in suggested(past_winners=(winner,), past_shares=told)[1] if s.stage == "past"]
    assert found == ([] if before == "elsewhere" else [winner])
