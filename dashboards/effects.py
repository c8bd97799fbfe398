"""Speeds of a study's candidates: as the answer states them, or else estimated from all trials together.

What the answer states (`tuner.speeds`) goes first, so that every table has one speed for a configuration. For the rest
`tuner.search.effects.EffectModel`, the search's own model, takes every run and every pair that ran in turns, and
shrinks what few noisy trials say towards "no effect"; its intervals widen where choices were only ever tried together.
So differences that pages show are those that the search acted on.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from steptune.dashboards.starts import reference_results
from steptune.tuner.estimates import log_rate, log_ratio
from steptune.tuner.records import BASELINE, Candidate, Purpose, Recommendation, Trial, TrialResult
from steptune.tuner.search.effects import EffectModel, Observation
from steptune.tuner.speeds import Method, Speed, contribution_of, speed_of

NORMAL_QUANTILE = 1.96
UNKNOWN_WINDOW_ERROR = 0.05
_COMPARED_WITH = (Purpose.COMPANION, Purpose.BASELINE, Purpose.SENTINEL)


class Ratio(NamedTuple):
    """A ratio of speeds with its 95 % interval, and how it was measured."""

    value: float
    low: float
    high: float
    method: str = Method.SEARCHED.value


UNKNOWN_RATIO = Ratio(math.nan, math.nan, math.nan, "")


class KeptModel:
    """A fitted model, with a cache of the ratios that it has estimated."""

    def __init__(self, model: EffectModel) -> None:
        self.model = model
        self._ratios: dict[tuple[str, str], Ratio] = {}

    def ratio(self, candidate: Candidate, other: Candidate) -> Ratio:
        key = candidate.key, other.key
        if key not in self._ratios:
            difference = self.model.difference(candidate, other)
            half = NORMAL_QUANTILE * difference.sd
            value, low, high = (math.exp(difference.mean + shift) for shift in (0.0, -half, half))
            self._ratios[key] = Ratio(value, low, high)
        return self._ratios[key]


class Effects:
    """Speed ratios between candidates, as stated by the answer or estimated by the model; NaN where nothing is
    known.
    """

    def __init__(self, trials: Sequence[Trial], recommendation: Recommendation | None = None) -> None:
        self._recommendation = recommendation
        starts = reference_results(trials)
        self.reference = starts[0].candidate if starts else BASELINE
        observations = list(_observations(trials, self.reference))
        self.measured = {o.candidate.key for o in observations}
        self._model = _model_of(observations) if observations else None

    def ratio(self, candidate: Candidate, other: Candidate) -> Ratio:
        """Return the ratio of one candidate's speed to another's; if one of them is the reference, use the answer's
        figure.
        """
        if other == self.reference:
            found = self._stated(candidate)
        elif candidate == self.reference:
            found = _inverse(self._stated(other))
        else:
            found = None
        return self.modelled(candidate, other) if found is None else found

    def without_part(self, strategy: str) -> Ratio | None:
        """Return the factor by which the recommendation's speed changes if one of its strategies is left out, from the
        measured contributions. None for a strategy that is not part of the recommendation.
        """
        parts = () if self._recommendation is None else self._recommendation.parts
        part = next((part for part in parts if part.strategy == strategy), None)
        if self._recommendation is None or part is None:
            return None
        speed = contribution_of(self._recommendation, part)
        return UNKNOWN_RATIO if speed is None else _inverse(_as_ratio(speed))

    def modelled(self, candidate: Candidate, other: Candidate) -> Ratio:
        """Return the ratio of one candidate's speed to another's, estimated from the trials alone."""
        return UNKNOWN_RATIO if self._model is None else self._model.ratio(candidate, other)

    def speed(self, candidate: Candidate) -> Ratio:
        """Return the ratio of a candidate's speed to the reference's; NaN where the candidate was not measured."""
        return self.ratio(candidate, self.reference) if candidate.key in self.measured else UNKNOWN_RATIO

    def _stated(self, candidate: Candidate) -> Ratio | None:
        if self._recommendation is None:
            return None
        speed = speed_of(self._recommendation, candidate)
        if speed is None:
            return None
        return _as_ratio(speed)


def _as_ratio(speed: Speed) -> Ratio:
    ends = (math.nan, math.nan) if speed.interval is None else (speed.interval.low, speed.interval.high)
    return Ratio(speed.ratio, *ends, speed.told)


def _inverse(ratio: Ratio | None) -> Ratio | None:
    return None if ratio is None else Ratio(1 / ratio.value, 1 / ratio.high, 1 / ratio.low, ratio.method)


NUM_KEPT = 32
GROWTH = 1.25
"""Factor by which the number of observations must grow before the model's widths, noise and drift are fitted again."""
_models: OrderedDict[tuple[object, ...], KeptModel] = OrderedDict()


def _model_of(observations: Sequence[Observation]) -> KeptModel:
    """Return the posterior of all observations. Its widths, noise and drift are fitted to most of the observations, and
    not again after each trial: a fit takes longer than everything else on a page.
    """
    key = tuple(
        (o.candidate.key, o.value, o.order, o.reference and o.reference.key, o.standard_error, o.place)
        for o in observations
    )
    kept = _models.get(key)
    if kept is None:
        fitted = _num_fitted(len(observations))
        like = _model_of(observations[:fitted]).model if fitted < len(observations) else None
        kept = KeptModel(EffectModel(observations, like))
    _models[key] = kept
    _models.move_to_end(key)
    while len(_models) > NUM_KEPT:
        _models.popitem(last=False)
    return kept


def _num_fitted(count: int) -> int:
    """Return the largest number in the sequence 1, 2, 3, …, 8, 10, 12, 15, 18, … that is at most `count`."""
    number = following = 1
    while following <= count:
        number, following = following, max(following + 1, int(GROWTH * following))
    return number


def _observations(trials: Sequence[Trial], reference: Candidate) -> Iterable[Observation]:
    by_group: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.result is not None and trial.result.ok:
            by_group.setdefault(trial.group, []).append(trial)
    order = 0
    for group in by_group.values():
        beside = _beside(group, reference)
        for trial in group:
            order += 1
            if trial is beside:
                continue  # the others are its observations
            assert trial.result is not None
            yield _observation(trial.result, beside.result if beside is not None else None, order)


def _beside(group: Sequence[Trial], reference: Candidate) -> Trial | None:
    """Return the trial with which the other trials of a group are compared; None where all trials have the same
    candidate.
    """
    known = [t for t in group if t.candidate == reference or t.purpose in _COMPARED_WITH]
    return known[0] if known and any(t.candidate != known[0].candidate for t in group) else None


def _observation(result: TrialResult, beside: TrialResult | None, order: int) -> Observation:
    paired = log_ratio(result, beside) if beside is not None and beside.candidate != result.candidate else None
    estimate = paired or log_rate(result)
    error = estimate.standard_error
    return Observation(
        candidate=result.candidate,
        value=estimate.mean,
        order=order,
        reference=beside.candidate if paired is not None and beside is not None else None,
        standard_error=error if error < 1.0 else UNKNOWN_WINDOW_ERROR,
        place=result.place,
    )
