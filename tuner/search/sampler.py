"""Optuna as a stateless library: candidates suggested by TPE from our own rows.

Our rows are the only truth: for every suggestion an in-memory study is rebuilt from all trials (tens
of milliseconds), asked, and thrown away. Candidates that ran out of memory or failed are told as
violating a constraint, so that the sampler learns the wall instead of a value.

Source: Bergstra et al., "Algorithms for Hyper-Parameter Optimization" (2011); multivariate and group
options: https://optuna.readthedocs.io/en/stable/reference/samplers/generated/optuna.samplers.TPESampler.html
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

from steptune.tuner.records import BASELINE, Candidate, Move
from steptune.tuner.search.space import Space

ASKS = 12
STARTUP_TRIALS = 5
NEUTRAL = "neutral"


def suggest_candidates(
    space: Space,
    moves: Sequence[Move],
    told: Sequence[tuple[Candidate, float | None]],
    *,
    seed: int,
    known: Collection[str],
    base: Candidate = BASELINE,
) -> list[Candidate]:
    """Legal candidates that were not run yet, the sampler's first choice first.

    Args:
        moves: The choices to combine.
        told: Candidates with their gain (a logarithm; larger is better), None where infeasible.
        known: Keys of candidates that were run.
        base: Keeps its choices for strategies that no move is of.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    labels = _labels(moves)
    kept = Candidate(choices={name: choice for name, choice in base.choices.items() if name not in labels})
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.CategoricalDistribution([NEUTRAL, *options]) for name, options in labels.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=STARTUP_TRIALS)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for candidate, value in told:
            parameters = {name: _label_of(candidate, name, options) for name, options in labels.items()}
            if any(label is None for label in parameters.values()):
                continue
            study.add_trial(
                optuna.trial.create_trial(
                    params=parameters,
                    distributions=distributions,
                    value=value if value is not None else -1.0,
                    constraints={"feasible": 0.0 if value is not None else 1.0},
                )
            )
        suggested: dict[str, Candidate] = {}
        for _ in range(ASKS):
            parameters = study.ask(distributions).params
            chosen = [labels[name][str(label)] for name, label in parameters.items() if label != NEUTRAL]
            combined = space.combine(kept, chosen)
            if combined is not None and combined.key not in known and not combined.is_baseline:
                suggested.setdefault(combined.key, combined)
    return list(suggested.values())


def _labels(moves: Sequence[Move]) -> dict[str, dict[str, Move]]:
    """Moves by strategy and label."""
    labels: dict[str, dict[str, Move]] = {}
    for move in moves:
        labels.setdefault(move.strategy, {})[move.label] = move
    return labels


def _label_of(candidate: Candidate, name: str, options: dict[str, Move]) -> str | None:
    """The label of a candidate's choice; None where it is not among the options."""
    choice = candidate.choices.get(name)
    if choice is None:
        return NEUTRAL
    return next((label for label, move in options.items() if move.choice == choice), None)
