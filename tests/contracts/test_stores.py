"""Behaviour of every `StudyStore`, in memory and in a database alike."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from builders import (
    STUDY_ID,
    TRIAL_ID,
    failed_result,
    sample_decision,
    sample_environment,
    sample_facts,
    sample_hardware,
    sample_recommendation,
    sample_result,
    sample_study,
    sample_topology,
    sample_trial,
)
from msgspec.structs import replace

from steptune.service.connections import writing
from steptune.service.database import open_store
from steptune.service.fencing import Lease
from steptune.service.models import QueueEntryRow, WorkerRow
from steptune.service.store import SqlStudyStore
from steptune.tuner import store_rules
from steptune.tuner.errors import StoreError, StudyNotFoundError
from steptune.tuner.memory_store import MemoryStudyStore
from steptune.tuner.protocols import StudyStore
from steptune.tuner.records import Attempt, Purpose, StudyState, TrialState, Verdict

MISSING = "no-such-study"
DIGEST = "ab" * 32


@pytest.fixture(params=["memory", "sqlite", "postgresql", "fenced sqlite", "fenced postgresql"])
def store(request) -> Iterator[StudyStore]:
    if request.param == "memory":
        yield MemoryStudyStore()
    else:
        kind = "postgres_url" if "postgresql" in request.param else "sqlite_url"
        store = open_store(request.getfixturevalue(kind))
        yield FencedStores(store) if "fenced" in request.param else store
        store.close()


class FencedStores:
    """A worker's view: each study is held by a lease, and written to under it."""

    def __init__(self, store: SqlStudyStore) -> None:
        self._store = store
        self._of_study: dict[str, SqlStudyStore] = {}
        self._of_trial: dict[str, SqlStudyStore] = {}

    def create_study(self, study) -> None:
        self._store.create_study(study)
        lease = Lease(study_id=study.study_id, worker_id="worker", fence=1)
        now = datetime.now(UTC)
        with writing(self._store.engine) as session:
            session.merge(
                WorkerRow(
                    worker_id="worker",
                    name="",
                    host_id="",
                    state="busy",
                    device_kind="cpu",
                    devices="[]",
                    isolation="none",
                    version="",
                    started_at=now,
                    heartbeat_at=now,
                )
            )
            session.flush()
            session.add(
                QueueEntryRow(
                    study_id=study.study_id,
                    worker_id="worker",
                    fence=1,
                    queued_at=now,
                    lease_until=now + timedelta(hours=1),
                )
            )
        self._of_study[study.study_id] = SqlStudyStore(self._store.engine, lease=lease)

    def begin_trials(self, trials) -> None:
        store = self._of_study.get(trials[0].study_id, self._store)
        store.begin_trials(trials)
        self._of_trial |= {trial.trial_id: store for trial in trials}

    def complete_trials(self, results) -> None:
        self._of_trial.get(results[0].trial_id, self._store).complete_trials(results)

    def __getattr__(self, name: str):
        def call(first=None, *arguments, **named):
            arguments = arguments if first is None else (first, *arguments)
            store = self._of_study.get(str(getattr(first, "study_id", first)), self._store)
            return getattr(store, name)(*arguments, **named)

        return call


@pytest.fixture
def begun(store: StudyStore) -> StudyStore:
    """A store with one study and one running trial."""
    store.create_study(sample_study())
    store.begin_trials([sample_trial()])
    return store


def numbered_trial(number: int, **changes):
    return sample_trial(trial_id=f"trial-{number}", sequence=number, **changes)


class TestStudies:
    def test_a_study_comes_back_as_it_was(self, store):
        """Every field of the record survives, down to the last bit of its numbers."""
        store.create_study(sample_study())
        assert store.get_study(STUDY_ID) == sample_study()

    def test_a_study_without_facts_comes_back(self, store):
        """A study exists before its workload was inspected."""
        study = sample_study(facts=None, environment=None)
        store.create_study(study)
        assert store.get_study(STUDY_ID) == study

    def test_an_id_is_used_once(self, store):
        """A second study with the same id is refused, and the first is kept."""
        store.create_study(sample_study())
        with pytest.raises(StoreError, match="exists already"):
            store.create_study(sample_study(message="another"))
        assert store.get_study(STUDY_ID) == sample_study()

    def test_a_time_without_zone_is_refused(self, store):
        """A naive time would be read as another time on another machine."""
        with pytest.raises(StoreError, match="is not a time with a time zone"):
            store.create_study(sample_study(created_at="2026-11-21T10:00:00"))
        assert store.list_studies() == []

    def test_update_replaces_what_changes_and_nothing_else(self, store):
        """Facts, environment, state and message are replaced; what the user asked for is not."""
        store.create_study(sample_study(facts=None, environment=None, state=StudyState.RUNNING, message=""))
        store.update_study(sample_study(workload="another.py:Model", directory="/elsewhere"))
        assert store.get_study(STUDY_ID) == sample_study()

    def test_set_state_replaces_state_and_message(self, store):
        """A message is about its state: without a new one the old one goes."""
        store.create_study(sample_study())
        store.set_state(STUDY_ID, StudyState.FAILED, "the baseline failed")
        assert store.get_study(STUDY_ID) == sample_study(state=StudyState.FAILED, message="the baseline failed")
        store.set_state(STUDY_ID, StudyState.RUNNING)
        assert store.get_study(STUDY_ID) == sample_study(state=StudyState.RUNNING, message="")

    def test_studies_are_listed_newest_first(self, store):
        """The moment of creation decides, whatever zone it is written in; `limit` keeps the newest."""
        for study_id, created_at in (
            ("oldest", "2026-11-21T10:00:00+00:00"),
            ("newest", "2026-11-21T10:30:00-02:00"),
            ("middle", "2026-11-21T12:30:00+01:00"),
        ):
            store.create_study(sample_study(study_id=study_id, created_at=created_at))
        assert [study.study_id for study in store.list_studies()] == ["newest", "middle", "oldest"]
        assert [study.study_id for study in store.list_studies(limit=1)] == ["newest"]

    def test_two_studies_share_workload_and_hardware(self, store):
        """Studying the same workload on the same machine again is the ordinary case."""
        studies = [sample_study(study_id="first"), sample_study(study_id="second", facts=sample_facts(sample_loss=0.5))]
        for study in studies:
            store.create_study(study)
        assert [store.get_study(study.study_id) for study in studies] == studies


class TestFindingStudies:
    @pytest.fixture
    def three(self, store):
        for study_id in ("01aaa-xx", "01bbb-yy", "02ccc-yy"):
            store.create_study(sample_study(study_id=study_id))
        return store

    @pytest.mark.parametrize(
        ("text", "found"),
        [("01aaa-xx", "01aaa-xx"), ("01a", "01aaa-xx"), ("02", "02ccc-yy"), ("xx", "01aaa-xx"), ("b-yy", "01bbb-yy")],
    )
    def test_the_beginning_or_the_end_of_an_id_suffices(self, three, text, found):
        """If it fits one study only."""
        assert three.get_study(text).study_id == found

    @pytest.mark.parametrize("text", ["01", "yy"])
    def test_what_fits_several_is_refused_and_names_them(self, three, text):
        """The message lists them, so that one can write more."""
        with pytest.raises(StudyNotFoundError, match=r"matches 2 studies \(01.*, 0.*\): write more"):
            three.get_study(text)

    @pytest.mark.parametrize("text", ["aaa", "03", "", "%", "_", "01_aa", "01AAA"])
    def test_what_fits_none_is_refused_and_names_the_newest(self, three, text):
        """Neither the middle of an id fits, nor a pattern, nor another case."""
        with pytest.raises(StudyNotFoundError, match="the newest studies: 02ccc-yy, 01bbb-yy, 01aaa-xx"):
            three.get_study(text)

    def test_an_id_that_begins_another_is_found(self, store):
        """A complete id means itself."""
        for study_id in ("abc", "abcd"):
            store.create_study(sample_study(study_id=study_id))
        assert store.get_study("abc").study_id == "abc"

    def test_an_empty_store_says_how_to_begin(self, store):
        """The way out of an empty store is a first study."""
        with pytest.raises(StudyNotFoundError, match="start one with `steptune tune`"):
            store.get_study("abc")


class TestTrials:
    def test_a_begun_trial_comes_back_as_it_was(self, begun):
        """It is running and has no result."""
        assert begun.trials(STUDY_ID) == [sample_trial()]

    def test_another_budget_is_stored_and_noted(self, begun):
        before = begun.get_study(STUDY_ID)
        after = begun.set_budget(STUDY_ID, 700.0)
        assert after == replace(before, settings=replace(before.settings, budget_s=700.0)) == begun.get_study(STUDY_ID)
        event = begun.events(STUDY_ID)[-1]
        assert (event.kind, event.data) == ("budget_changed", {"budget_s": 700.0})

    @pytest.mark.parametrize(
        ("result", "state"), [(sample_result(), TrialState.COMPLETED), (failed_result(), TrialState.FAILED)]
    )
    def test_a_completed_trial_has_its_result(self, begun, result, state):
        """Everything comes back as it was: infinite losses and unprintable tracebacks too."""
        begun.complete_trials([result])
        assert begun.trials(STUDY_ID) == [sample_trial(state=state, result=result)]

    def test_runs_that_were_repeated_count_as_attempts(self, begun):
        attempt = Attempt(failure=failed_result().failure, began_at=sample_trial().started_at, duration_ns=10**9)
        begun.complete_trials([sample_result(repeated=(attempt,))])
        (trial,) = begun.trials(STUDY_ID)
        assert trial.attempts == sample_trial().attempts + 1
        assert trial.result.repeated == (attempt,)

    def test_a_loss_that_is_not_a_number_comes_back(self, begun):
        """A diverged run stays visible as such; every later reading would fail otherwise."""
        guard = sample_result().guard
        begun.complete_trials([sample_result(guard=replace(guard, losses=(1.0, float("nan"))))])
        (trial,) = begun.trials(STUDY_ID)
        assert str(trial.result.guard.losses) == "(1.0, nan)"

    def test_a_rejected_candidate_was_completed(self, begun):
        """The guard's verdict is a result of the trial, not its failure."""
        begun.complete_trials([sample_result(guard=failed_result().guard)])
        assert begun.trials(STUDY_ID)[0].state is TrialState.COMPLETED

    def test_trials_come_in_the_order_in_which_they_began(self, store):
        """Whatever order they were handed over or completed in."""
        store.create_study(sample_study())
        store.begin_trials([numbered_trial(3), numbered_trial(1)])
        store.begin_trials([numbered_trial(2)])
        store.complete_trials([sample_result(trial_id="trial-3")])
        assert [trial.sequence for trial in store.trials(STUDY_ID)] == [1, 2, 3]

    def test_trials_belong_to_their_study(self, begun):
        """One sequence may be used in every study."""
        begun.create_study(sample_study(study_id="another"))
        begun.begin_trials([sample_trial(trial_id="other", study_id="another")])
        assert [trial.trial_id for trial in begun.trials(STUDY_ID)] == [TRIAL_ID]
        assert [trial.trial_id for trial in begun.trials("another")] == ["other"]

    @pytest.mark.parametrize(
        "second",
        [sample_trial(sequence=4), sample_trial(trial_id="another")],
        ids=["the id is taken", "the sequence is taken"],
    )
    def test_a_group_begins_as_a_whole_or_not_at_all(self, begun, second):
        """Where one of several trials is refused, none is recorded."""
        with pytest.raises(StoreError, match="is already in use"):
            begun.begin_trials([numbered_trial(9), second])
        assert begun.trials(STUDY_ID) == [sample_trial()]

    def test_a_group_cannot_hold_a_trial_twice(self, begun):
        """Repetition inside one call is found as well."""
        with pytest.raises(StoreError, match="is already in use"):
            begun.begin_trials([numbered_trial(9), numbered_trial(9)])

    def test_a_second_completion_is_refused(self, begun):
        """A trial completes once: the first result stays."""
        begun.complete_trials([sample_result()])
        with pytest.raises(StoreError, match=f"{TRIAL_ID}' is already completed"):
            begun.complete_trials([failed_result()])
        assert begun.trials(STUDY_ID)[0].result == sample_result()

    def test_an_unknown_trial_cannot_complete(self, begun):
        """A result without a trial is a mistake, not a new trial."""
        with pytest.raises(StoreError, match="there is no trial 'another'"):
            begun.complete_trials([sample_result(trial_id="another")])

    def test_running_trials_are_lost_with_their_process(self, store):
        """Only those of the study that still ran; completed ones stay as they are."""
        for study_id in (STUDY_ID, "another"):
            store.create_study(sample_study(study_id=study_id))
        store.begin_trials([numbered_trial(1), numbered_trial(2), numbered_trial(3)])
        store.begin_trials([numbered_trial(4, study_id="another")])
        store.complete_trials([sample_result(trial_id="trial-2")])
        assert store.lose_running_trials(STUDY_ID) == 2
        assert [trial.state for trial in store.trials(STUDY_ID)] == ["lost", "completed", "lost"]
        assert [trial.state for trial in store.trials("another")] == ["running"]
        assert store.lose_running_trials(STUDY_ID) == 0

    def test_a_lost_trial_cannot_complete(self, begun):
        """Another process may have begun it again."""
        begun.lose_running_trials(STUDY_ID)
        with pytest.raises(StoreError, match="is already lost"):
            begun.complete_trials([sample_result()])

    def test_one_of_several_completions_wins(self, begun):
        """However many threads hand in a result at once, one is recorded and the others are told."""

        def complete(number: int) -> bool:
            return succeeds(lambda: begun.complete_trials([sample_result(steps_per_epoch=number)]))

        with ThreadPoolExecutor(4) as pool:
            wins = list(pool.map(complete, range(4)))
        assert sum(wins) == 1
        assert begun.trials(STUDY_ID)[0].result.steps_per_epoch == wins.index(True)


class TestDecisions:
    def test_decisions_come_back_in_their_order(self, begun):
        """A decision about nothing that was tried has no candidate and no figures."""
        decisions = [
            sample_decision(1),
            sample_decision(2, candidate=None, predicted_bound=None, measured_gain=None, measured_se=None),
        ]
        begun.replace_decisions(STUDY_ID, decisions[::-1])
        assert begun.decisions(STUDY_ID) == decisions

    def test_new_decisions_replace_the_old(self, begun):
        """The story is told again from its beginning each time; other studies keep theirs."""
        begun.create_study(sample_study(study_id="another"))
        begun.replace_decisions("another", [sample_decision(1)])
        begun.replace_decisions(STUDY_ID, [sample_decision(1), sample_decision(2)])
        begun.replace_decisions(STUDY_ID, [sample_decision(1, verdict="no_gain")])
        assert begun.decisions(STUDY_ID) == [sample_decision(1, verdict="no_gain")]
        assert begun.decisions("another") == [sample_decision(1)]

    def test_a_repeated_number_is_refused(self, begun):
        """And the story so far is kept."""
        begun.replace_decisions(STUDY_ID, [sample_decision(1)])
        with pytest.raises(StoreError, match="two decisions have the number 2"):
            begun.replace_decisions(STUDY_ID, [sample_decision(2), sample_decision(2)])
        assert begun.decisions(STUDY_ID) == [sample_decision(1)]

    def test_past_decisions_tell_what_bounds_were_worth(self, store):
        """Finished studies on this kind of device count, where both figures are known; newest study first."""
        studies = {
            "older": ("2026-11-20T00:00:00+00:00", StudyState.COMPLETED, "cuda"),
            "newer": ("2026-11-21T00:00:00+00:00", StudyState.COMPLETED, "cuda"),
            "unfinished": ("2026-11-21T00:00:00+00:00", StudyState.INTERRUPTED, "cuda"),
            "elsewhere": ("2026-11-21T00:00:00+00:00", StudyState.COMPLETED, "cpu"),
        }
        for study_id, (created_at, state, kind) in studies.items():
            environment = sample_environment(kind)
            store.create_study(
                sample_study(study_id=study_id, created_at=created_at, state=state, environment=environment)
            )
            store.replace_decisions(
                study_id,
                [
                    sample_decision(1, reason=study_id),
                    sample_decision(2, predicted_bound=None),
                    sample_decision(3, measured_gain=None),
                    sample_decision(4, reason=study_id),
                ],
            )
        past = store.past_decisions("newer", sample_hardware("cuda", num_cores=3))
        told = [(decision.reason, decision.sequence) for decision in past]
        assert told == [("newer", 1), ("newer", 4), ("older", 1), ("older", 4)]


class TestRecommendations:
    def test_a_recommendation_comes_back_as_it_was(self, begun):
        """With every part, interval and reason."""
        begun.save_recommendation(sample_recommendation())
        assert begun.recommendation(STUDY_ID) == sample_recommendation()

    def test_there_is_none_before_the_end(self, begun):
        """A running study has no answer yet."""
        assert begun.recommendation(STUDY_ID) is None

    def test_a_study_has_one_answer(self, begun):
        """A resumed study replaces it."""
        begun.save_recommendation(sample_recommendation())
        begun.save_recommendation(sample_recommendation(gain=None))
        assert begun.recommendation(STUDY_ID) == sample_recommendation(gain=None)

    def test_a_study_ends_with_its_story_and_its_last_events(self, begun):
        """In one transaction, however often it is asked for: whoever sees the state finds all the rest."""
        for _ in range(2):
            begun.save_recommendation(
                sample_recommendation(), decisions=[sample_decision(1)], state=StudyState.COMPLETED
            )
        assert begun.get_study(STUDY_ID).state is StudyState.COMPLETED
        assert begun.decisions(STUDY_ID) == [sample_decision(1)]
        events = [(event.kind, event.data) for event in begun.events(STUDY_ID)]
        assert events[0] == ("recommended", {"verdict": "faster"})
        assert events[1:] in ([], [("state", {"state": "completed", "message": ""})]), "under a lease, and only once"

    def test_a_story_that_is_refused_leaves_the_study_as_it_was(self, begun):
        study = begun.get_study(STUDY_ID)
        with pytest.raises(StoreError, match="two decisions"):
            begun.save_recommendation(
                sample_recommendation(), decisions=[sample_decision(2), sample_decision(2)], state=StudyState.COMPLETED
            )
        assert (begun.get_study(STUDY_ID), begun.recommendation(STUDY_ID)) == (study, None)
        assert begun.events(STUDY_ID) == []

    def test_past_recommendations_are_of_the_kind_of_device_with_their_studies(self, store):
        """The newest first; whether they are alike is for others to say."""
        past = [
            sample_recommendation(study_id="older", created_at="2026-11-20T00:00:00+00:00"),
            sample_recommendation(study_id="newer", created_at="2026-11-21T00:00:00+00:00"),
            sample_recommendation(study_id="no gain", verdict=Verdict.NO_SIGNIFICANT_GAIN),
            sample_recommendation(study_id="other device", hardware=sample_hardware("cpu")),
        ]
        studies = [sample_study(study_id=r.study_id, created_at=r.created_at) for r in past]
        for study, recommendation in zip(studies, past, strict=True):
            store.create_study(study)
            store.save_recommendation(recommendation)
        found = store.past_recommendations("older", "cuda")
        assert found == [(studies[1], past[1]), (studies[0], past[0])]

    def test_of_a_long_history_the_newest_counts(self, store, monkeypatch):
        """However many studies there are: what a new one reads is bounded."""
        monkeypatch.setattr(store_rules, "NUM_PAST_STUDIES", 2)
        monkeypatch.setattr(store_rules, "NUM_PAST_DECISIONS", 3)
        for day in (20, 21, 22):
            name, created_at = f"of {day}", f"2026-11-{day}T00:00:00+00:00"
            store.create_study(sample_study(study_id=name, created_at=created_at, state=StudyState.COMPLETED))
            store.replace_decisions(name, [sample_decision(1, reason=name), sample_decision(2, reason=name)])
            store.save_recommendation(sample_recommendation(study_id=name, created_at=created_at))
        found = store.past_recommendations("of 20", "cuda")
        assert [past.study_id for _, past in found] == ["of 22", "of 21"]
        told = [(past.reason, past.sequence) for past in store.past_decisions("of 20", sample_hardware())]
        assert told == [("of 22", 1), ("of 22", 2), ("of 21", 1)]


class TestEvents:
    def test_events_come_in_order_with_growing_numbers(self, begun):
        """A number is a place to go on from: what came after it is exactly what is new."""
        for step in range(3):
            begun.add_event(STUDY_ID, "trial", {"step": step, "nested": {"loss": [0.5, None]}})
        events = begun.events(STUDY_ID)
        assert [event.data["step"] for event in events] == [0, 1, 2]
        assert events[0].data["nested"] == {"loss": [0.5, None]}
        assert [event.kind for event in events] == ["trial"] * 3
        assert all(first.sequence < second.sequence for first, second in pairwise(events))
        assert begun.events(STUDY_ID, after=events[0].sequence) == events[1:]
        assert begun.events(STUDY_ID, after=events[-1].sequence) == []

    def test_numbers_grow_over_all_studies(self, begun):
        """A reader sees the events of its study only."""
        begun.create_study(sample_study(study_id="another"))
        for study_id in (STUDY_ID, "another", STUDY_ID):
            begun.add_event(study_id, "state", {})
        first, last = (event.sequence for event in begun.events(STUDY_ID))
        (between,) = (event.sequence for event in begun.events("another"))
        assert first < between < last

    def test_an_event_says_when(self, begun):
        """With a zone."""
        begun.add_event(STUDY_ID, "state", {})
        (event,) = begun.events(STUDY_ID)
        assert datetime.fromisoformat(event.at).utcoffset() is not None


class TestArtifacts:
    def test_artifacts_of_a_study_and_its_trials_come_in_order(self, begun):
        """One content may belong to several."""
        begun.add_artifact(STUDY_ID, TRIAL_ID, "trace", DIGEST, 1234)
        begun.add_artifact(STUDY_ID, None, "export", DIGEST, 1234)
        trace, export = begun.artifacts(STUDY_ID)
        assert (trace.study_id, trace.trial_id, trace.kind, trace.digest, trace.size_bytes) == (
            STUDY_ID,
            TRIAL_ID,
            "trace",
            DIGEST,
            1234,
        )
        assert (export.trial_id, export.kind) == (None, "export")
        assert datetime.fromisoformat(export.created_at) >= datetime.fromisoformat(trace.created_at)

    def test_what_was_said_before_is_not_said_twice(self, begun):
        """A commit whose end nobody saw is sent again."""
        for trial_id in (TRIAL_ID, TRIAL_ID, None, None):
            begun.add_artifact(STUDY_ID, trial_id, "trace", DIGEST, 1234)
        begun.add_artifact(STUDY_ID, TRIAL_ID, "timeline", DIGEST, 1234)
        found = [(artifact.trial_id, artifact.kind) for artifact in begun.artifacts(STUDY_ID)]
        assert found == [(TRIAL_ID, "trace"), (None, "trace"), (TRIAL_ID, "timeline")]

    def test_the_trial_must_be_one_of_the_study(self, begun):
        """Neither an unknown trial nor one of another study is accepted."""
        begun.create_study(sample_study(study_id="another"))
        for study_id, trial_id in ((STUDY_ID, "unknown"), ("another", TRIAL_ID)):
            with pytest.raises(StoreError, match="there is no trial"):
                begun.add_artifact(study_id, trial_id, "trace", DIGEST, 1)
            assert begun.artifacts(study_id) == []


WRITES: dict[str, Callable[[StudyStore], object]] = {
    "update_study": lambda store: store.update_study(sample_study(study_id=MISSING)),
    "set_state": lambda store: store.set_state(MISSING, StudyState.FAILED),
    "begin_trials": lambda store: store.begin_trials([sample_trial(study_id=MISSING)]),
    "lose_running_trials": lambda store: store.lose_running_trials(MISSING),
    "replace_decisions": lambda store: store.replace_decisions(MISSING, [sample_decision()]),
    "save_recommendation": lambda store: store.save_recommendation(sample_recommendation(study_id=MISSING)),
    "add_event": lambda store: store.add_event(MISSING, "state", {}),
    "add_artifact": lambda store: store.add_artifact(MISSING, None, "trace", DIGEST, 1),
}


class TestUnknownStudies:
    @pytest.mark.parametrize("method", WRITES)
    def test_writing_is_refused(self, store, method):
        """The message names the id."""
        with pytest.raises(StudyNotFoundError, match=MISSING):
            WRITES[method](store)

    def test_reading_finds_nothing(self, store):
        """Only `get_study` insists on a study."""
        assert store.trials(MISSING) == []
        assert store.decisions(MISSING) == []
        assert store.recommendation(MISSING) is None
        assert store.events(MISSING) == []
        assert store.artifacts(MISSING) == []
        assert store.past_recommendations(MISSING, "cpu") == []
        assert store.past_decisions(MISSING, sample_hardware()) == []


class TestCopies:
    def test_what_is_returned_can_be_changed_without_harm(self, begun):
        """Records are frozen, but the dictionaries in them are not."""
        begun.get_study(STUDY_ID).facts.current["compile"] = {"mode": "off"}
        begun.trials(STUDY_ID)[0].candidate.choices.clear()
        assert begun.get_study(STUDY_ID) == sample_study()
        assert begun.trials(STUDY_ID) == [sample_trial()]

    def test_what_was_handed_over_can_be_changed_without_harm(self, begun):
        """The store keeps its own copy."""
        data, result = {"step": 1}, sample_result(phases_ns={"build": 1})
        begun.add_event(STUDY_ID, "trial", data)
        begun.complete_trials([result])
        data["step"] = 2
        result.phases_ns["build"] = 2
        assert begun.events(STUDY_ID)[0].data == {"step": 1}
        assert begun.trials(STUDY_ID)[0].result.phases_ns == {"build": 1}


class TestTopologies:
    def test_a_topology_comes_back_as_it_was(self, store):
        """Every measured point of it."""
        store.save_topology(sample_topology())
        assert store.topology(sample_hardware(), 4, 2) == sample_topology()

    def test_it_is_that_of_the_hardware_the_ranks_and_the_hosts(self, store):
        store.save_topology(sample_topology())
        assert store.topology(sample_hardware(num_cores=3), 4, 2) is None
        assert store.topology(sample_hardware(), 2, 2) is None
        assert store.topology(sample_hardware(), 4, 1) is None

    def test_what_is_measured_again_replaces_what_was(self, store):
        again = sample_topology(inside=None, measured_at="2026-11-22T11:00:00+00:00")
        store.save_topology(sample_topology())
        store.save_topology(again)
        assert store.topology(sample_hardware(), 4, 2) == again

    def test_of_two_placements_the_newest_counts(self, store):
        """Times are compared as moments, not as text."""
        older = sample_topology(host_of_rank=(0, 1, 0, 1), measured_at="2026-11-22T13:30:00+02:00")
        store.save_topology(sample_topology())
        store.save_topology(older)
        assert store.topology(sample_hardware(), 4, 2) == sample_topology()

    def test_a_study_keeps_what_it_was_measured_on(self, store):
        environment = sample_environment(topology=sample_topology())
        store.create_study(sample_study(environment=environment))
        store.save_topology(sample_topology(whole=sample_topology().between))
        assert store.get_study(STUDY_ID).environment == environment


# --- several writers of one SQLite file ---------------------------------------------------------

NUM_TRIALS = 20


def succeeds(write: Callable[[], object]) -> bool:
    try:
        write()
    except StoreError:
        return False
    return True


def write_everything(url: str, writer: int) -> int:
    """Opens the database, adds a study and events, and completes what it can; returns how much it could."""
    store = open_store(url)
    try:
        store.create_study(sample_study(study_id=f"own-{writer}"))
        completed = 0
        for number in range(NUM_TRIALS):
            store.add_event(STUDY_ID, "writer", {"writer": writer, "number": number})
            result = sample_result(trial_id=f"trial-{number}", purpose=Purpose.AUDIT)
            completed += succeeds(lambda result=result: store.complete_trials([result]))
        return completed
    finally:
        store.close()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_two_writers_of_one_file_neither_lose_nor_repeat(kind, sqlite_url):
    """Every event is there, in each writer's order, and each trial was completed by one of them."""
    store = open_store(sqlite_url)
    store.create_study(sample_study())
    store.begin_trials([numbered_trial(number) for number in range(NUM_TRIALS)])
    spawn = multiprocessing.get_context("spawn")
    with ThreadPoolExecutor(2) if kind == "threads" else ProcessPoolExecutor(2, mp_context=spawn) as pool:
        completed = list(pool.map(write_everything, [sqlite_url] * 2, range(2)))
    assert sum(completed) == NUM_TRIALS
    assert {trial.state for trial in store.trials(STUDY_ID)} == {TrialState.COMPLETED}
    events = store.events(STUDY_ID)
    for writer in range(2):
        numbers = [event.data["number"] for event in events if event.data["writer"] == writer]
        assert numbers == list(range(NUM_TRIALS))
    assert len(store.list_studies()) == 3
    store.close()


def test_processes_may_open_a_new_file_together(tmp_path):
    """One of them makes the tables, the others wait for it."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=spawn) as pool:
        assert list(pool.map(open_and_count, [f"sqlite:///{tmp_path}/steptune.db"] * 3)) == [0, 0, 0]


def open_and_count(url: str) -> int:
    store = open_store(url)
    try:
        return len(store.list_studies())
    finally:
        store.close()
