"""Studies for pages: none, one trial, running, failed and two hundred trials; and a service that shows them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvicorn
from api_builders import sqlite_url
from builders import sample_facts
from msgspec.structs import replace
from predictions import profile_of, result_of, study_of, topology_of
from report_builders import (
    INPUT_BOUND,
    NOT_TRIED,
    STEP_AFTER,
    STEP_BEFORE,
    WORKERS,
    WORKERS_AND_THREADS,
    complete_study,
    cpu_hardware,
    failed_study,
    make_recommendation,
    make_result,
    make_study,
    make_trials,
    running_study,
)
from servers import listening
from sqlalchemy import update

from steptune.service.app import create_app
from steptune.service.connections import writing
from steptune.service.models import QueueEntryRow, StudyRow
from steptune.service.settings import Settings
from steptune.service.store import SqlStudyStore
from steptune.tuner.protocols import StudyStore
from steptune.tuner.records import (
    BASELINE,
    Candidate,
    Decision,
    Environment,
    Failure,
    FailureKind,
    GuardCheck,
    GuardVerdict,
    MemoryPeak,
    Move,
    Phase,
    Purpose,
    Recommendation,
    Study,
    StudyState,
    Trial,
    TrialResult,
    TrialState,
    new_id,
)

Story = tuple[Study, list[Trial], list[Decision], Recommendation | None]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "data_loading": [{"num_workers": 1}, WORKERS, {"num_workers": 4, "prefetch_factor": 4}],
    "cpu_threads": [{"num_threads": 1}, {"num_threads": 2}],
    "memory_format": [{"layout": "channels_last"}],
    "optimizer_implementation": [{"implementation": "foreach"}, {"implementation": "fused"}],
    "backend_flags": [{"flush_denormals": True}],
    "micro_batch": [{"size": 16}, {"size": 8}],
    "dataset_cache": [{"where": "memory"}],
    "compile": [{"mode": "default"}],
}
EFFECTS = {
    "data_loading": (1.35, 1.9, 1.75),
    "cpu_threads": (1.2, 1.05),
    "memory_format": (0.98,),
    "optimizer_implementation": (1.02, 1.04),
    "backend_flags": (1.003,),
    "micro_batch": (0.93, 0.85),
    "dataset_cache": (1.12,),
    "compile": (1.06,),
}
OUT_OF_MEMORY = Failure(
    kind=FailureKind.OUT_OF_MEMORY, phase=Phase.MEASURE, message="24.1 GiB were asked for and 23.5 GiB are there"
)
REJECTED = GuardVerdict(
    passed=False,
    num_steps=8,
    checks=(GuardCheck(name="loss", kind="pointwise", passed=False, observed=3.1e-2, tolerance=2.0e-5),),
    losses=tuple(0.69 - 0.005 * step for step in range(8)),
    reference_losses=tuple(0.69 - 0.01 * step for step in range(8)),
)


def large_story(num_trials: int = 200) -> Story:
    """A long search: starts of the baseline, single changes and pairs of them, some of which fail or are rejected."""
    chance = random.Random(7)
    before = float(sum(STEP_BEFORE.values()))
    results: list[TrialResult] = []
    decisions: list[Decision] = []
    incumbent, best = BASELINE, 1.0
    for number in range(1, num_trials + 1):
        trial_id = f"trial{number:04d}"
        if number <= 4 or number % 25 == 0:
            candidate, speed = BASELINE, 1.0
        else:
            candidate, speed = _some_candidate(chance, incumbent, best)
        fate = chance.random() if number > 4 and candidate != BASELINE else 1.0
        failure = OUT_OF_MEMORY if fate < 0.05 else None
        result = make_result(
            trial_id,
            candidate,
            before / speed * (1 + chance.gauss(0, 0.008)),
            purpose=Purpose.BASELINE if candidate.is_baseline else Purpose.EXPLORE,
            breakdown=STEP_BEFORE if number <= 4 else STEP_AFTER if number % 40 == 0 else None,
            findings=[INPUT_BOUND] if number <= 4 else (),
            failure=failure,
            seed=number,
        )
        memory = int((600 + 60 * len(candidate.choices) + chance.gauss(0, 12)) * (1 << 20))
        result = replace(result, memory=(MemoryPeak(rank=0, resident_bytes=memory),))
        if 0.05 <= fate < 0.09:
            result = replace(result, guard=REJECTED)
        results.append(result)
        verdict = "failed" if failure else "guard_rejected" if 0.05 <= fate < 0.09 else "no_gain"
        if verdict == "no_gain" and speed > 1.02 * best:
            verdict, incumbent, best = "accepted", candidate, speed
        if not candidate.is_baseline:
            decisions.append(_decision(len(decisions) + 1, verdict, candidate, trial_id, speed / best - 1, chance))
    study = make_study(facts=replace(sample_facts(), steps_per_epoch=1250, units_per_batch=32.0))
    study = replace(study, environment=Environment(hardware=cpu_hardware()))
    return study, make_trials(results), [*decisions, *_renumbered(NOT_TRIED)], make_recommendation(WORKERS_AND_THREADS)


def _some_candidate(chance: random.Random, incumbent: Candidate, best: float) -> tuple[Candidate, float]:
    strategy = chance.choice(list(OPTIONS))
    place = chance.randrange(len(OPTIONS[strategy]))
    choice = OPTIONS[strategy][place]
    if incumbent.choices.get(strategy) == choice:
        return incumbent, best
    gone = incumbent.choices.get(strategy)
    was = EFFECTS[strategy][OPTIONS[strategy].index(gone)] if gone else 1.0
    return incumbent.with_choice(strategy, choice), best / was * EFFECTS[strategy][place]


def _decision(
    number: int, verdict: str, candidate: Candidate, trial_id: str, gain: float, chance: random.Random
) -> Decision:
    strategy, choice = chance.choice(list(candidate.choices.items()))
    return Decision(
        sequence=number,
        stage="move",
        verdict=verdict,
        reason=f"could save at most {chance.randint(2, 60)} % of the step",
        candidate=candidate,
        moves=(Move(strategy=strategy, choice=choice),),
        trial_ids=(trial_id,),
        predicted_bound=chance.uniform(0.02, 0.6),
        measured_gain=None if verdict in ("failed", "guard_rejected") else gain,
        measured_se=0.012,
    )


def _renumbered(decisions: tuple[Decision, ...]) -> list[Decision]:
    return [replace(decision, sequence=1000 + number) for number, decision in enumerate(decisions)]


def stories(num_trials: int = 200) -> dict[str, Story]:
    """Stories by the name of their state; the large one has `num_trials`."""
    return {
        "complete": told(complete_study()),
        "one": told(running_study(0), keep_running=False, num_trials=1),
        "running": told(running_study(7)),
        "failed": told(failed_study()),
        "large": large_story(num_trials),
    }


def ranks_story() -> Story:
    """Two ranks that were measured two ways, whose links are known."""
    bf16 = Candidate(choices={"gradient_compression": {"method": "bf16"}})
    results = [
        result_of("a", BASELINE, 79_000_000, num_ranks=2, breakdown=profile_of(exposed_ns=9_000_000)),
        result_of("b", bf16, 80_000_000, num_ranks=2),
    ]
    return study_of(2, topology=topology_of((0, 0))), make_trials(results), [], None


def told(store: StudyStore, *, keep_running: bool = True, num_trials: int | None = None) -> Story:
    """Story of the only study in a store."""
    study = store.list_studies()[0]
    trials = store.trials(study.study_id)
    trials = [t for t in trials if keep_running or t.result is not None] or _single()
    return study, trials[:num_trials], store.decisions(study.study_id), store.recommendation(study.study_id)


def _single() -> list[Trial]:
    return make_trials(
        [
            make_result(
                "trial0001", BASELINE, 2.5e7, purpose=Purpose.BASELINE, breakdown=STEP_BEFORE, findings=[INPUT_BOUND]
            )
        ]
    )


def put(
    store: SqlStudyStore, story: Story, *, owner_id: str | None = None, queued: bool = True
) -> tuple[str, list[str]]:
    """Writes a study under new ids; returns these."""
    study, trials, decisions, recommendation = story
    study_id = new_id()
    ids = {trial.trial_id: new_id() for trial in trials}
    study = replace(study, study_id=study_id)
    store.create_study(study)
    moved = [replace(t, trial_id=ids[t.trial_id], study_id=study_id) for t in trials]
    store.begin_trials([replace(t, state=TrialState.RUNNING, result=None) for t in moved])
    store.complete_trials([replace(t.result, trial_id=t.trial_id) for t in moved if t.result is not None])
    store.replace_decisions(
        study_id, [replace(d, trial_ids=tuple(ids[i] for i in d.trial_ids if i in ids)) for d in decisions]
    )
    if recommendation is not None:
        store.save_recommendation(replace(recommendation, study_id=study_id))
    with writing(store.engine) as session:
        session.execute(update(StudyRow).where(StudyRow.study_id == study_id).values(owner_id=owner_id))
        session.add(QueueEntryRow(study_id=study_id, queued_at=datetime.now(UTC)))
    return study_id, list(ids.values())


class Shown:
    """A service that a browser can reach, and what it shows."""

    def __init__(self, url: str, app, store: SqlStudyStore) -> None:
        self.url = url
        self.app = app
        self.store = store
        self.studies: dict[str, str] = {}
        self.trials: dict[str, list[str]] = {}

    def add(self, state: str, story: Story | None = None) -> str:
        self.studies[state], self.trials[state] = put(self.store, story or stories()[state])
        return self.studies[state]

    def change_state(self, study_id: str, state: StudyState) -> None:
        """Change a state as a worker does: with its event."""
        self.store.set_state(study_id, state)
        self.store.add_event(study_id, "state", {"state": state.value, "message": ""})


@contextmanager
def shown(folder: Path, **settings) -> Iterator[Shown]:
    """A server in a thread, on a port of its own; nobody has to log in unless `settings` say so."""
    url = sqlite_url(folder)
    found = {"insecure_no_auth": True, "requests_per_minute": 1_000_000, "event_poll_s": 0.05, **settings}
    app = create_app(Settings(_env_file=None, database_url=url, data_directory=folder / "data", **found))
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    with listening(config) as (_, address):
        yield Shown(f"{address}{found.get('base_path', '')}", app, SqlStudyStore(app.state.services.engine))
        app.state.services.events.close()
