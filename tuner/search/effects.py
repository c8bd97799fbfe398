"""Model of the difference between two candidates, from all trials together.

Every process start gives a noisy rate; a group of trials that took turns gives noisy ratios. Both are
put into one Gaussian model of logarithms:

    log rate of trial t  =  gain(candidate)  +  level(place, t)  +  noise
    log ratio in a group =  gain(candidate) - gain(reference)  +  noise

`gain` has a prior in which candidates that share a choice share its effect (main effects), and every candidate has a
small part of its own (interaction). Of many choices most change little and one changes a lot: where the data say so, a
choice has a wider prior than the others, so that a large effect and small ones are not mistaken for each other. `level`
is the drift of a shared machine over the order of trials: none, a random walk, or something smooth. How large effects
are, the kind of drift, and the widths of drift and noise are taken from the data by maximum likelihood over a grid. So
replicates, restarts of the baseline, sentinels and trials of other combinations all sharpen one comparison, and a
machine that slows down does not look like a slow candidate. Each place (a machine, some devices of it) has a level of
its own that says nothing about another's: where a study moves, rates are compared with rates of their place only.

Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), chapters 2 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve

from steptune.tuner.records import Candidate
from steptune.tuner.search.gaussian import one_blas_thread

Floats = npt.NDArray[np.float64]

NOISE_GRID = (0.003, 0.006, 0.012, 0.02, 0.03, 0.045, 0.07, 0.1)
NOISE_PRIOR_SD = 0.03
"""Prior standard deviation between runs; the prior weighs as much as two replicates."""
LEVEL_SD = 1.0
CALM_SHARES = (1.0, 0.3, 0.1)
"""Ratios among which the fit chooses: the noise of trials in which the device hardly waited for its host, divided by
the noise of other trials.
"""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Standard deviations of the logarithms of effects, assumed before anything is measured.

    Attributes:
        main_sd: Standard deviation of the main effect of a choice.
        own_sd: Standard deviation of a candidate's interaction, beyond the main effects of its choices.
    """

    main_sd: float
    own_sd: float


SURPRISING = 1.5
"""Absolute effect of a choice, in prior standard deviations, above which a wider prior is tried for this choice."""
WIDENING = 2.0
"""Minimum increase of the log-likelihood for a choice to get a wider prior."""
MOST_WIDENED = 6
"""Maximum number of choices with a wider prior in one model."""
PRIORS = (Prior(main_sd=0.2, own_sd=0.1), Prior(main_sd=0.6, own_sd=0.2), Prior(main_sd=2.0, own_sd=0.4))
"""Alternative priors of effects, among which the fit chooses. On CPUs a typical choice changes the rate by a fifth; on
GPUs some choices change it by a factor of five, which the narrowest prior would take for noise.
"""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Drift of the machine's level: a random walk (`length` 0) or smooth over `length` trials."""

    sd: float
    length: float = 0.0

    def covariance(self, order: Floats) -> Floats:
        if self.length == 0:
            walk: Floats = self.sd**2 * np.minimum.outer(order, order)
            return walk
        distance = np.subtract.outer(order, order) / self.length
        smooth: Floats = self.sd**2 * np.exp(-0.5 * distance**2)
        return smooth


DRIFTS = (
    Drift(sd=0.0),
    Drift(sd=0.003),
    Drift(sd=0.01),
    Drift(sd=0.03),
    Drift(sd=0.05, length=6),
    Drift(sd=0.15, length=12),
    Drift(sd=0.30, length=25),
)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One measured logarithm: of a ratio, or of a rate where `reference` is None."""

    candidate: Candidate
    value: float
    order: int
    reference: Candidate | None = None
    standard_error: float = 0.0
    """Known part of the standard error, from the windows within the process."""
    calm: bool = False
    """True where the device hardly ever waited for its host."""
    reference_calm: bool = False
    noisy: bool = True
    """True if the noise between runs is to be added; False for evidence from profiles."""
    place: str = ""
    """Place (machine and devices) where a rate was measured; both trials of a ratio are always in one place."""
    companion: bool = False
    """True for the rate of a trial if the ratio of this trial to another one is observed too."""


CONTRADICTS = 3.0
"""Maximum distance, in standard errors, between an effect seen in profiles and the measured effect, for the profiles to
count as evidence.
"""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Posterior of gain(candidate) - gain(reference), in logarithms."""

    mean: float
    sd: float

    def probability_above(self, threshold: float = 0.0) -> float:
        return 0.5 * (1 + math.erf((self.mean - threshold) / max(self.sd, 1e-12) / math.sqrt(2)))

    @property
    def expected_improvement(self) -> float:
        """Expected improvement: the mean gain, with a loss counted as 0."""
        z = self.mean / max(self.sd, 1e-12)
        density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return self.mean * self.probability_above() + self.sd * density

    @property
    def ratio(self) -> float:
        return math.exp(self.mean)


class EffectModel:
    """Posterior of all gains, given all observations."""

    def __init__(self, observations: Sequence[Observation], like: EffectModel | None = None) -> None:
        """Fit the model to observations.

        Args:
            like: A model of fewer observations whose widths, noise and drift are reused: fitting them takes a hundred
                times as long as the posterior.
        """
        self._observations = list(observations)
        self._candidates = _distinct(self._observations)
        self._keys = [candidate.key for candidate in self._candidates]
        self._choices = list(dict.fromkeys(move.key for candidate in self._candidates for move in candidate.moves))
        self._design = self._design_matrix()
        self._by_choice = self._design @ np.array([self._features(candidate) for candidate in self._candidates])
        self._by_itself = self._design * [not candidate.is_baseline for candidate in self._candidates]
        self._same_place = _same_place(self._observations)
        self._values = _centred(self._observations)
        self._widths: Floats = np.zeros(0)
        with one_blas_thread():
            self.prior, self.calm_share, self.noise_sd, self.drift = self._fit() if like is None else self._as_in(like)
            self._factor = cho_factor(self._covariance(self.noise_sd, self.drift), lower=True)
            self._weights = cho_solve(self._factor, self._values)

    def difference(self, candidate: Candidate, reference: Candidate) -> Difference:
        """Return the posterior of one difference; the prior where neither candidate was observed."""
        contrast = self._features(candidate) - self._features(reference)
        own = {c.key: sign for sign, c in ((1.0, candidate), (-1.0, reference)) if not c.is_baseline}
        if candidate.key == reference.key:
            own = {}
        index = np.array([own.get(key, 0.0) for key in self._keys])
        main, alone = self._widths**2, self.prior.own_sd**2
        cross = self._by_choice @ (main * contrast) + alone * self._by_itself @ index
        unseen = self._unseen(candidate, reference) * self.prior.main_sd**2
        variance = float(contrast @ (main * contrast)) + unseen + alone * len(own)
        explained = float(cross @ cho_solve(self._factor, cross))
        return Difference(mean=float(cross @ self._weights), sd=math.sqrt(max(variance - explained, 1e-12)))

    def noise_of(self, *, calm: bool) -> float:
        """Return the standard deviation between runs."""
        return self.noise_sd * (self.calm_share if calm else 1.0)

    def smallest_detectable(self, starts: int = 2, *, calm: bool = False) -> float:
        """Return the smallest gain that `starts` runs of each candidate distinguish from none with 95 % confidence."""
        return math.exp(1.64 * self.noise_of(calm=calm) * math.sqrt(2 / starts)) - 1

    # --- pieces -------------------------------------------------------------------------------

    def _design_matrix(self) -> Floats:
        index = {candidate.key: number for number, candidate in enumerate(self._candidates)}
        design = np.zeros((len(self._observations), len(self._candidates)))
        for row, observation in enumerate(self._observations):
            design[row, index[observation.candidate.key]] += 1
            if observation.reference is not None:
                design[row, index[observation.reference.key]] -= 1
        return design

    def _covariance(self, noise_sd: float, drift: Drift) -> Floats:
        rates = np.array([o.reference is None for o in self._observations])
        order = np.array([o.order for o in self._observations], dtype=float)
        level = (LEVEL_SD**2 + drift.covariance(order)) * self._same_place
        known = np.array([o.standard_error**2 for o in self._observations])
        own = self._noise_of_starts * noise_sd**2 + known
        covariance: Floats = self._gains + np.outer(rates, rates) * level + np.diag(own + 1e-10)
        return covariance

    def _features(self, candidate: Candidate) -> Floats:
        """Return an indicator for each known choice: 1 where the candidate makes it."""
        made = {move.key for move in candidate.moves}
        features: Floats = np.array([float(key in made) for key in self._choices])
        return features

    def _unseen(self, candidate: Candidate, reference: Candidate) -> int:
        """Return the number of choices in which the two candidates differ and that occur in no observation."""
        ours, theirs = ({move.key for move in c.moves} for c in (candidate, reference))
        return len((ours ^ theirs) - set(self._choices))

    def _explained_by(self, prior: Prior, widths: Floats) -> Floats:
        main, alone = self._by_choice * widths, self._by_itself * prior.own_sd
        covariance: Floats = main @ main.T + alone @ alone.T
        return covariance

    def _noise(self, calm_share: float) -> Floats:
        """Return each observation's variance, in units of one run's variance; a ratio has the variance of two runs."""
        calm = calm_share**2
        noise: Floats = np.array(
            [
                o.noisy * ((calm if o.calm else 1.0) + (o.reference is not None) * (calm if o.reference_calm else 1.0))
                for o in self._observations
            ]
        )
        return noise

    def _fit(self) -> tuple[Prior, float, float, Drift]:
        """Fit first the prior of the choices' effects, without drift, and then noise and drift. Otherwise one large
        effect would make all trials look noisy.
        """
        drifts = DRIFTS if any(o.reference is None for o in self._observations) else DRIFTS[:1]
        shares = CALM_SHARES if len({o.calm for o in self._observations if o.noisy}) > 1 else CALM_SHARES[:1]
        found = {(prior, share): self._fit_widths(prior, share) for prior, share in product(PRIORS, shares)}
        prior, share = max(found, key=lambda pair: found[pair][0])
        self._widths = found[prior, share][1]
        self._gains, self._noise_of_starts = self._explained_by(prior, self._widths), self._noise(share)
        noise_sd, drift = max(product(NOISE_GRID, drifts), key=lambda pair: self._score(*pair))
        return prior, share, noise_sd, drift

    def _as_in(self, like: EffectModel) -> tuple[Prior, float, float, Drift]:
        """Take the prior, noise and drift from another model. Choices unknown to that model get its prior standard
        deviation.
        """
        widths = dict(zip(like._choices, like._widths, strict=True))
        self._widths = np.array([widths.get(choice, like.prior.main_sd) for choice in self._choices])
        self._gains, self._noise_of_starts = self._explained_by(like.prior, self._widths), self._noise(like.calm_share)
        return like.prior, like.calm_share, like.noise_sd, like.drift

    def _fit_widths(self, prior: Prior, share: float) -> tuple[float, Floats]:
        """Return the score of a prior, and the prior's width for every choice: choices with surprising effects get a
        wider prior.
        """
        widths = np.full(len(self._choices), prior.main_sd)
        self._noise_of_starts = self._noise(share)
        score, noise_sd = self._best_noise(prior, widths)
        for _ in range(MOST_WIDENED):
            number = self._most_surprising(widths, noise_sd)
            if number is None:
                break
            wider = [_with(widths, number, p.main_sd) for p in PRIORS if p.main_sd > widths[number]]
            options = [(*self._best_noise(prior, option), option) for option in wider]
            best = max(options, key=lambda option: option[0], default=None)
            if best is None or best[0] - WIDENING <= score:
                break
            score, noise_sd, widths = best[0] - WIDENING, best[1], best[2]
        return score, widths

    def _best_noise(self, prior: Prior, widths: Floats) -> tuple[float, float]:
        """Return the best score without drift, and the noise that gives it; set `_gains` for these widths."""
        self._gains = self._explained_by(prior, widths)
        return max((self._score(noise_sd, DRIFTS[0]), noise_sd) for noise_sd in NOISE_GRID)

    def _most_surprising(self, widths: Floats, noise_sd: float) -> int | None:
        """Return the choice with the largest effect in prior standard deviations, if that exceeds `SURPRISING`."""
        factor = cho_factor(self._covariance(noise_sd, DRIFTS[0]), lower=True)
        surprise = np.abs(widths * (self._by_choice.T @ cho_solve(factor, self._values)))
        return int(surprise.argmax()) if surprise.max(initial=0.0) > SURPRISING else None

    def _score(self, noise_sd: float, drift: Drift) -> float:
        return _log_likelihood(self._covariance(noise_sd, drift), self._values) + _log_prior(noise_sd, drift)


def uncontradicted(observations: Sequence[Observation]) -> list[Observation]:
    """Return all measured observations, and those from profiles that do not contradict them."""
    measured = [o for o in observations if o.noisy]
    if len(measured) == len(observations):
        return measured
    model = EffectModel(measured)
    return [o for o in observations if o.noisy or _agrees(o, model)]


def _agrees(said: Observation, model: EffectModel) -> bool:
    assert said.reference is not None
    found = model.difference(said.candidate, said.reference)
    return abs(said.value - found.mean) <= CONTRADICTS * math.hypot(found.sd, said.standard_error)


def _distinct(observations: Sequence[Observation]) -> list[Candidate]:
    found: dict[str, Candidate] = {}
    for observation in observations:
        found.setdefault(observation.candidate.key, observation.candidate)
        if observation.reference is not None:
            found.setdefault(observation.reference.key, observation.reference)
    return list(found.values())


def _same_place(observations: Sequence[Observation]) -> Floats:
    """Return a matrix with 1 where two observations are of the same place, else 0."""
    places = np.array([o.place for o in observations])
    same: Floats = (places[:, None] == places[None, :]).astype(float)
    return same


def _centred(observations: Sequence[Observation]) -> Floats:
    """Return the values, with rates relative to the first in the same place, so that the level's prior does not depend
    on the unit.
    """
    first: dict[str, float] = {}
    for observation in observations:
        if observation.reference is None:
            first.setdefault(observation.place, observation.value)
    return np.array([o.value - (first[o.place] if o.reference is None else 0.0) for o in observations])


def _with(widths: Floats, number: int, sd: float) -> Floats:
    changed = widths.copy()
    changed[number] = sd
    return changed


def _log_likelihood(covariance: Floats, values: Floats) -> float:
    factor, lower = cho_factor(covariance, lower=True)
    determinant = 2 * float(np.log(np.diag(factor)).sum())
    return -0.5 * (float(values @ cho_solve((factor, lower), values)) + determinant)


def _log_prior(noise_sd: float, drift: Drift) -> float:
    """Return the log-prior of noise and drift. Deviation from the usual noise counts as if two replicates had shown the
    usual noise; drift has a penalty.
    """
    spread = math.log(noise_sd / NOISE_PRIOR_SD) / math.log(3)
    return -0.5 * spread**2 - (1.0 if drift.sd else 0.0)
