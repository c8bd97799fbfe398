"""Lessons of earlier studies for a new one."""

import pytest
from builders import sample_decision, sample_facts, sample_recommendation, sample_study
from msgspec.structs import replace
from search_builders import SMALL, candidate, move, surface_space

from steptune.tuner.memory_store import MemoryStudyStore
from steptune.tuner.records import StudyState, Verdict, new_id
from steptune.tuner.search.priors import MAX_WINNERS, WEIGHT, gather_priors, realised_shares

SPACE = surface_space(SMALL)
SAMPLE = sample_facts()
HARDWARE = SPACE.environment.hardware


def store_with(*, answers=(), decisions=()):
    store = MemoryStudyStore()
    for hour, changes in enumerate(answers):
        created_at = f"2026-11-21T{hour:02d}:00:00+00:00"
        study = sample_study(
            study_id=new_id(),
            state=StudyState.COMPLETED,
            environment=SPACE.environment,
            created_at=created_at,
            facts=changes.pop("facts", SPACE.workload),
        )
        store.create_study(study)
        answer = {"study_id": study.study_id, "hardware": HARDWARE, "created_at": created_at}
        store.save_recommendation(sample_recommendation(**{**answer, **changes}))
    if decisions:
        study = sample_study(study_id=new_id(), state=StudyState.COMPLETED, environment=SPACE.environment)
        store.create_study(study)
        store.replace_decisions(study.study_id, decisions)
    return store


class TestPastWinners:
    def test_are_the_newest_distinct_ones_of_similar_workloads(self):
        store = store_with(
            answers=[
                {"candidate": candidate(update=1)},
                {"candidate": candidate(loader=2)},
                {"candidate": candidate(products=2)},
                {"candidate": candidate(products=2)},
            ]
        )
        winners = gather_priors(store, "new", SPACE).past_winners
        assert winners == (candidate(products=2), candidate(loader=2))
        assert len(winners) == MAX_WINNERS

    @pytest.mark.parametrize(
        "changes",
        [
            {"verdict": Verdict.NO_SIGNIFICANT_GAIN},
            {"verdict": Verdict.UNCONFIRMED},
            {"candidate": candidate()},
            {"facts": SAMPLE},
            {"facts": None},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_only_what_was_confirmed_faster_for_a_similar_workload_counts(self, changes):
        store = store_with(answers=[{"candidate": candidate(loader=2), **changes}])
        assert gather_priors(store, "new", SPACE).past_winners == ()

    def test_the_most_alike_come_first_whatever_their_age(self):
        larger = replace(SPACE.workload, global_batch=8 * SPACE.workload.global_batch)
        store = store_with(
            answers=[{"candidate": candidate(update=1)}, {"candidate": candidate(loader=2), "facts": larger}]
        )
        assert gather_priors(store, "new", SPACE).past_winners == (candidate(update=1), candidate(loader=2))

    def test_an_empty_store_teaches_nothing(self):
        priors = gather_priors(MemoryStudyStore(), "new", SPACE)
        assert (priors.past_winners, priors.realisation, priors.audits) == ((), {}, 0)


def decision(sequence=1, *, bound, gain, se=0.01, moves=None, **changes):
    return sample_decision(
        sequence,
        predicted_bound=bound,
        measured_gain=gain,
        measured_se=se,
        moves=moves or (move("loader", 1),),
        **changes,
    )


class TestRealisation:
    """Saved share of the step over the bound: 25 % faster is a fifth of the step."""

    def test_is_drawn_towards_what_is_usual(self):
        found = realised_shares([decision(bound=0.4, gain=0.25)], {"loader": 0.2})
        assert found == {"loader": pytest.approx((0.5 + WEIGHT * 0.2) / (1 + WEIGHT))}

    def test_of_many_studies_is_what_they_showed(self):
        many = [decision(n, bound=0.4, gain=0.25) for n in range(400)]
        assert realised_shares(many, {"loader": 0.2})["loader"] == pytest.approx(0.5, abs=0.01)

    def test_a_loss_realises_nothing_and_more_than_the_bound_counts_as_all(self):
        usual = {"loader": 0.2}
        assert realised_shares([decision(bound=0.4, gain=-0.5)], usual)["loader"] == pytest.approx(0.16)
        assert realised_shares([decision(bound=0.1, gain=3.0)], usual)["loader"] == pytest.approx(0.36)

    def test_several_changes_at_once_say_nothing_of_one(self):
        both = (move("loader", 1), move("products", 2))
        assert realised_shares([decision(bound=0.4, gain=0.25, moves=both)], {"loader": 0.2}) == {}

    def test_a_choice_in_place_of_another_says_nothing_of_the_first(self):
        """The loader was taken at once; that the next choice of it brought nothing more was to be expected."""
        taken = decision(1, bound=0.4, gain=0.25, verdict="accepted", candidate=candidate(loader=1))
        again = decision(2, bound=0.4, gain=0.0, verdict="no_gain", moves=(move("loader", 2),))
        alone = realised_shares([taken], {"loader": 0.2})
        assert realised_shares([taken, again], {"loader": 0.2}) == alone
        studies = realised_shares([taken, again, taken, again], {"loader": 0.2})
        assert studies == realised_shares([taken, taken], {"loader": 0.2})

    def test_strategies_that_are_not_here_are_left_out(self):
        assert realised_shares([decision(bound=0.4, gain=0.25)], {"products": 0.2}) == {}


def test_audits_are_counted_and_those_beyond_their_bound():
    """A bound of 2 % allows a gain of 2.04 %; 10 % with an error of 1 % is beyond, 3 % is not."""
    store = store_with(
        decisions=[
            decision(1, bound=0.02, gain=0.10, stage="audit"),
            decision(2, bound=0.02, gain=0.03, stage="audit"),
            decision(3, bound=0.02, gain=0.50, stage="move"),
        ]
    )
    priors = gather_priors(store, "new", SPACE)
    assert (priors.audits, priors.audit_violations) == (2, 1)
