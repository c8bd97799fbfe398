"""Export of a study to Optuna: a journal file, which optuna-dashboard and `optuna.load_study` open.

SQLite would be the usual file, but Optuna writes it through SQLAlchemy, row by row: seconds for 200 trials.

The objective is the rate (samples or tokens per second), to be maximised. Every start of a process is one trial:
repeats of a candidate are trials with the same parameters. A parameter is a choice that any trial changed, by the name
`STRATEGY.PARAMETER`; its values are those that were run. A trial that failed, or was another training, has state FAIL.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from steptune.tuner.estimates import units_per_s
from steptune.tuner.records import Candidate, Scalar, Study, Trial, TrialState
from steptune.tuner.strategies import STRATEGIES

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

WRITER = "steptune"
_DEFAULTS = {strategy.name: strategy.defaults for strategy in STRATEGIES}


def optuna_journal(study: Study, trials: Sequence[Trial]) -> bytes:
    """Return the Optuna journal of a study, named by the study's id; equal trials give equal bytes."""
    import optuna
    from optuna.storages import JournalStorage

    lines = _journal()
    with _quiet():
        written = optuna.create_study(storage=JournalStorage(lines), study_name=study.study_id, direction="maximize")
        for name, value in _study_attributes(study).items():
            written.set_user_attr(name, value)
        written.add_trials(list(_frozen(study, trials)))
    # Entries name the process and the thread that wrote them, which is nobody's business here.
    logs = ({**log, "worker_id": WRITER} for log in lines.logs)
    return "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()


def _journal() -> Any:
    """Return a journal backend that keeps its log in memory."""
    from optuna.storages.journal import BaseJournalBackend

    class Lines(BaseJournalBackend):
        def __init__(self) -> None:
            self.logs: list[dict[str, Any]] = []

        def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
            return self.logs[log_number_from:]

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            self.logs += logs

    return Lines()


def _study_attributes(study: Study) -> dict[str, Any]:
    return {
        "workload": study.workload,
        "hardware": study.environment.hardware.label if study.environment else "",
        "objective": f"{study.facts.sample_unit.value if study.facts else 'sample'}s per second",
        "steptune_version": study.steptune_version,
    }


def _frozen(study: Study, trials: Sequence[Trial]) -> Iterator[FrozenTrial]:
    """Yield the ended trials, each with all parameters, so that they can be compared."""
    import optuna
    from optuna.distributions import CategoricalDistribution

    values = _values(study, [trial.candidate for trial in trials])
    distributions: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(found) for name, found in values.items()
    }
    for trial in trials:
        if trial.state is TrialState.RUNNING:
            continue
        rate = _rate(trial)
        frozen = optuna.trial.create_trial(
            state=optuna.trial.TrialState.FAIL if rate is None else optuna.trial.TrialState.COMPLETE,
            value=rate,
            params={name: _value(study, trial.candidate, name) for name in values},
            distributions=distributions,
            user_attrs=_trial_attributes(trial),
        )
        frozen.datetime_start = datetime.fromisoformat(trial.started_at)
        taken_ns = trial.result.duration_ns if trial.result else 0
        frozen.datetime_complete = frozen.datetime_start + timedelta(microseconds=taken_ns / 1000)
        yield frozen


def _values(study: Study, candidates: Sequence[Candidate]) -> dict[str, list[Scalar]]:
    """Return, for each parameter that some candidate changes, its values in all candidates, sorted."""
    names = sorted(
        {
            f"{strategy}.{name}"
            for candidate in candidates
            for strategy, choice in candidate.choices.items()
            for name in choice
        }
    )
    found: dict[str, list[Scalar]] = {}
    for name in names:
        values = {_value(study, candidate, name) for candidate in candidates}
        found[name] = sorted(values, key=lambda value: (str(type(value)), value if value is not None else 0))
    return found


def _value(study: Study, candidate: Candidate, name: str) -> Scalar:
    """Return the value of a parameter in a candidate: the candidate's own choice, or else the current setting."""
    strategy, _, parameter = name.partition(".")
    current = study.facts.current.get(strategy, {}) if study.facts else {}
    choice = {**_DEFAULTS.get(strategy, {}), **current, **candidate.choices.get(strategy, {})}
    return choice.get(parameter)


def _rate(trial: Trial) -> float | None:
    """Return the rate over the clean windows of a trial that was measured and passed the guard; None for any other."""
    if trial.result is None or not trial.result.ok:
        return None
    return units_per_s(trial.result)


def _trial_attributes(trial: Trial) -> dict[str, Any]:
    result = trial.result
    attributes: dict[str, Any] = {
        "trial_id": trial.trial_id,
        "purpose": trial.purpose.value,
        "group": trial.group,
        "state": trial.state.value,
        "candidate": trial.candidate.label,
    }
    if result is not None:
        attributes["peak_memory_bytes"] = result.peak_memory_bytes
        if result.guard is not None:
            attributes["guard"] = result.guard.reason
        if result.failure is not None:
            attributes["failure"] = f"{result.failure.kind.value}: {result.failure.message}"
    return attributes


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna, which logs every study that it creates."""
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
