"""Generated cost surfaces: training steps of which every configuration's time is known.

A surface is drawn from a family by a number. Its parameters act on categories of the breakdown, mostly on the ones
that they declare; ordered ones rise and saturate; some interact in pairs or in threes; some act only beside another's
choice; some fail, alone, together or by memory. Declared bounds are tight, loose or wrong. Half of the families begin
where a professional does: in 16 bits, compiled and fused, so that little is left and a change of the model compiles
again.

Families come in two halves. Constants of a search may be fitted on the first and are judged on the second.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from steptune.tuner.costs.bounds import Savings, Situation
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import (
    Candidate,
    Choice,
    Environment,
    Failure,
    FailureKind,
    GuardVerdict,
    MemoryPeak,
    Move,
    Numerics,
    Phase,
    Purpose,
    Startup,
    StudySettings,
    TrialResult,
    WorkloadFacts,
)
from steptune.tuner.search.space import Space
from steptune.tuner.search.starts import warm_compile_s
from steptune.tuner.strategies import STRATEGIES
from steptune.tuner.strategies.api import Strategy
from steptune.tuner.trials.fake import fake_environment, fake_workload, known_breakdown, known_window

C = Category
PROFILE_NOISE_SD = 0.05
WINDOW_S, WARM_UP_S, GUARD_S = 2.0, 2.0, 1.0
NUM_WINDOWS = 3
MOST_CONFIGURATIONS = 6000
LEAST_GAIN, PROFESSIONAL_GAIN = 1.05, 1.3
"""Today's step over the best."""
ACTS = 0.6
"""How likely a choice acts on each of the categories that it declares, beside the one that it is drawn for."""
ATTACKED = tuple(s.attacks for s in STRATEGIES if s.attacks and len(s.attacks) < len(Category))
"""Categories that the product's strategies declare to act on: a parameter of a surface has one of these sets."""
EXPERIENCE = 0.7
"""Standard deviation of the logarithm of what a strategy is said to realise usually, about what it does here."""
HARMLESS = 0.004
"""Largest logarithm of an effect on a plateau."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Common properties of surfaces of one kind.

    Attributes:
        base: Shares of the step by category, about which surfaces scatter.
        half: "fit" or "report".
        professional: Begins in 16 bits, compiled and fused: gains are small, and the model is compiled already.
        effective: Part of the choices that do something worth while.
        strength: Usual part of a category that such a choice saves.
        pairs: Interactions of two choices, for each parameter.
        triples: Joint effects of three.
        gated: Part of the parameters that act only beside another's choice.
        failing: Part of the choices that fail, alone or beside another.
        memory: Whether choices need memory, of which there is little.
        wrong: Part of the parameters whose declaration is wrong.
        loose: Part whose bound is the whole category.
        noise_sd: Between starts; of one in `tail` starts, four times that and slower only.
        drift: Of the machine over a whole search.
    """

    name: str
    half: str
    base: Mapping[Category, float]
    professional: bool = False
    num_parameters: tuple[int, int] = (6, 9)
    effective: float = 0.45
    strength: float = 0.45
    pairs: float = 0.6
    triples: float = 0.1
    gated: float = 0.1
    failing: float = 0.06
    memory: bool = False
    wrong: float = 0.12
    loose: float = 0.4
    noise_sd: float = 0.012
    tail: float = 0.0
    drift: float = 0.0


_COMPUTE = {
    C.MATMUL: 0.5,
    C.ATTENTION: 0.15,
    C.ELEMENTWISE: 0.15,
    C.NORMALISATION: 0.05,
    C.OPTIMIZER: 0.06,
    C.HOST: 0.09,
}
_LAUNCH = {
    C.MATMUL: 0.2,
    C.ELEMENTWISE: 0.15,
    C.HOST: 0.3,
    C.LAUNCH_LATENCY: 0.2,
    C.OPTIMIZER: 0.1,
    C.OPTIMIZER_HOST: 0.05,
}
_INPUT = {C.MATMUL: 0.3, C.ELEMENTWISE: 0.1, C.DATA_WAIT: 0.4, C.COPY_H2D: 0.08, C.OPTIMIZER: 0.05, C.HOST: 0.07}
_RANKS = {C.MATMUL: 0.35, C.ATTENTION: 0.1, C.COMMUNICATION: 0.33, C.ELEMENTWISE: 0.1, C.OPTIMIZER: 0.07, C.HOST: 0.05}
_PRO_COMPUTE = {
    C.MATMUL: 0.66,
    C.ATTENTION: 0.16,
    C.ELEMENTWISE: 0.08,
    C.REDUCTION: 0.03,
    C.OPTIMIZER: 0.04,
    C.HOST: 0.03,
}
_PRO_LAUNCH = {
    C.MATMUL: 0.42,
    C.ELEMENTWISE: 0.13,
    C.HOST: 0.14,
    C.LAUNCH_LATENCY: 0.12,
    C.OPTIMIZER: 0.09,
    C.DATA_WAIT: 0.1,
}
_PRO_RANKS = {
    C.MATMUL: 0.5,
    C.ATTENTION: 0.1,
    C.COMMUNICATION: 0.23,
    C.ELEMENTWISE: 0.08,
    C.OPTIMIZER: 0.05,
    C.HOST: 0.04,
}
_PRO_INPUT = {C.MATMUL: 0.5, C.ELEMENTWISE: 0.1, C.DATA_WAIT: 0.22, C.COPY_H2D: 0.05, C.OPTIMIZER: 0.06, C.HOST: 0.07}
_PRO: dict[str, Any] = {"professional": True, "effective": 0.3, "strength": 0.3, "noise_sd": 0.006}

FAMILIES: tuple[Family, ...] = (
    Family(name="launch-bound", half="fit", base=_LAUNCH, noise_sd=0.025),
    Family(name="compute-bound, little memory", half="fit", base=_COMPUTE, memory=True),
    Family(name="many small gains", half="fit", base=_COMPUTE, effective=0.7, strength=0.15, num_parameters=(8, 10)),
    Family(name="drift", half="fit", base=_INPUT, drift=0.06),
    Family(name="professional, compute", half="fit", base=_PRO_COMPUTE, **_PRO),
    Family(name="professional, launches", half="fit", base=_PRO_LAUNCH, **_PRO),
    Family(name="professional, little memory", half="fit", base=_PRO_COMPUTE, memory=True, **_PRO),
    Family(name="professional, loose bounds", half="fit", base=_PRO_LAUNCH, loose=0.9, **_PRO),
    Family(name="input-bound", half="report", base=_INPUT),
    Family(name="communication", half="report", base=_RANKS, pairs=1.0),
    Family(name="conditional and failing", half="report", base=_COMPUTE, gated=0.35, failing=0.15),
    Family(name="heavy tails, wrong bounds", half="report", base=_LAUNCH, wrong=0.35, noise_sd=0.02, tail=0.12),
    Family(name="professional, several ranks", half="report", base=_PRO_RANKS, **_PRO),
    Family(name="professional, input", half="report", base=_PRO_INPUT, **_PRO),
    Family(name="professional, joint effects", half="report", base=_PRO_LAUNCH, triples=0.4, pairs=1.2, **_PRO),
    Family(name="professional, wrong bounds", half="report", base=_PRO_COMPUTE, wrong=0.35, gated=0.2, **_PRO),
)


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One parameter.

    Attributes:
        values: Of its levels in their order; the user's own is `values[today]`.
        effects: By level and category: logarithms of factors.
        savings: By level: declared most that it saves of each category, as a part of it.
        memory: By level: gigabytes.
        gate: Another parameter and the levels of it beside which this one acts; None where it always does.
    """

    name: str
    values: tuple[Any, ...]
    ordered: bool
    today: int
    effects: np.ndarray
    savings: tuple[Mapping[Category, float], ...]
    memory: tuple[float, ...]
    usual_realisation: float
    recompiles: bool
    gate: tuple[int, frozenset[int]] | None = None


class KnobStrategy(Strategy):
    """A parameter of a surface as the search sees it."""

    summary: ClassVar[str] = "levels of a known effect"
    trial_cost_s: ClassVar[float] = 0.0

    def __init__(self, knob: Knob, compile_s: float) -> None:
        self.name = knob.name  # type: ignore[misc]
        self.defaults = {"value": knob.values[knob.today]}  # type: ignore[misc]
        self.values = {"value": knob.values}  # type: ignore[misc]
        self.attacks = tuple(dict.fromkeys(c for s in knob.savings for c in s))  # type: ignore[misc]
        self.touches = None  # type: ignore[misc]
        self.recompiles = knob.recompiles  # type: ignore[misc]
        self.usual_realisation = knob.usual_realisation  # type: ignore[misc]
        self.memory = min(knob.memory) < 0  # type: ignore[misc]
        self._knob, self._compile_s = knob, compile_s

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return tuple({"value": value} for value in self._knob.values)

    def cost_s(self, choice: Choice, workload: WorkloadFacts) -> float:
        return self._compile_s if self.recompiles and choice != self.defaults else 0.0

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Any, choice: Choice) -> None:
        return None

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        declared = self._knob.savings[self._knob.values.index(choice["value"])]
        return {c: part * situation.time_ns([c]) / situation.step_ns for c, part in declared.items()}


class SurfaceSpace(Space):
    """The space of a surface: what has no effect beside the others is dropped, and some pairs are known not to run."""

    def __init__(self, surface: Surface, order: Sequence[int]) -> None:
        self.surface = surface
        strategies = [KnobStrategy(surface.knobs[k], surface.compile_s) for k in order]
        super().__init__(fake_environment(), fake_workload(), StudySettings(), strategies)

    def combine(self, candidate: Candidate, moves: Any) -> Candidate | None:
        for move in moves:
            candidate = candidate.with_choice(move.strategy, move.choice)
        levels = self.surface.normalised(self.surface.levels(candidate))
        if self.surface.is_illegal(levels):
            return None
        return self.surface.candidate(levels)

    def why_impossible(self, candidate: Candidate, move: Move) -> str | None:
        return None if self.combine(candidate, [move]) is not None else "these two cannot be run together"


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Attributes:
    base_ms: By category, of today's configuration.
    joint: Levels of some parameters, and the logarithms of the factors by category that all of them bring together.
    illegal: Sets of levels that are known not to run together.
    broken: Sets of levels that fail when they are run.
    cap_gb: Memory that there is.
    """

    family: Family
    number: int
    knobs: tuple[Knob, ...]
    categories: tuple[Category, ...]
    base_ms: np.ndarray
    joint: tuple[tuple[Mapping[int, int], np.ndarray], ...] = ()
    illegal: tuple[Mapping[int, int], ...] = ()
    broken: tuple[Mapping[int, int], ...] = ()
    base_gb: float = 20.0
    cap_gb: float = math.inf
    start_s: float = 8.0
    compile_s: float = 40.0

    @property
    def name(self) -> str:
        return f"{self.family.name} {self.number}"

    def levels(self, candidate: Candidate) -> tuple[int, ...]:
        return tuple(
            knob.values.index(candidate.choices[knob.name]["value"]) if knob.name in candidate.choices else knob.today
            for knob in self.knobs
        )

    def candidate(self, levels: Sequence[int]) -> Candidate:
        pairs = zip(self.knobs, levels, strict=True)
        return Candidate(choices={k.name: {"value": k.values[level]} for k, level in pairs if level != k.today})

    def normalised(self, levels: Sequence[int]) -> tuple[int, ...]:
        """Today's choice where a parameter does not act beside the others."""
        found = list(levels)
        for k, knob in enumerate(self.knobs):
            if knob.gate is not None and found[knob.gate[0]] not in knob.gate[1]:
                found[k] = knob.today
        return tuple(found)

    def is_illegal(self, levels: Sequence[int]) -> bool:
        return any(all(levels[k] == level for k, level in some.items()) for some in self.illegal)

    def fails(self, levels: Sequence[int]) -> FailureKind | None:
        if self.base_gb + sum(k.memory[level] for k, level in zip(self.knobs, levels, strict=True)) > self.cap_gb:
            return FailureKind.OUT_OF_MEMORY
        if any(all(levels[k] == level for k, level in some.items()) for some in self.broken):
            return FailureKind.CRASH
        return None

    def peak_gb(self, levels: Sequence[int]) -> float:
        return self.base_gb + sum(k.memory[level] for k, level in zip(self.knobs, levels, strict=True))

    def times_ms(self, levels: Sequence[int]) -> np.ndarray:
        """True time by category."""
        logs = np.log(self.base_ms)
        for knob, level in zip(self.knobs, levels, strict=True):
            logs = logs + knob.effects[level]
        for needed, effect in self.joint:
            if all(levels[k] == level for k, level in needed.items()):
                logs = logs + effect
        return np.asarray(np.exp(logs))

    def step_ms(self, candidate: Candidate) -> float:
        return float(self.times_ms(self.levels(candidate)).sum())

    @cached_property
    def best_ms(self) -> float:
        """The shortest true step of all configurations that run."""
        best = math.inf
        for levels in itertools.product(*(range(len(knob.values)) for knob in self.knobs)):
            if self.normalised(levels) != levels or self.is_illegal(levels):
                continue
            step = float(self.times_ms(levels).sum())
            if step < best and self.fails(levels) is None:
                best = step
        return best

    @property
    def today_ms(self) -> float:
        return float(self.base_ms.sum())

    def model_of(self, levels: Sequence[int]) -> tuple[int, ...]:
        """Return the levels that decide whether a model has to be compiled again."""
        return tuple(level for knob, level in zip(self.knobs, levels, strict=True) if knob.recompiles)

    def is_compiled(self, levels: Sequence[int]) -> bool:
        changed = any(k.recompiles and level != k.today for k, level in zip(self.knobs, levels, strict=True))
        return self.family.professional or changed


class SurfaceRunner:
    """Starts configurations of a surface: their noise, what they cost and what they show."""

    def __init__(self, surface: Surface, seed: int) -> None:
        self.surface = surface
        self._random = np.random.default_rng([seed, zlib.crc32(surface.name.encode())])
        self._compiled: set[tuple[int, ...]] = set()
        self.num_starts = 0

    def run(self, candidate: Candidate, purpose: Purpose, *, profiled: bool) -> TrialResult:
        surface, levels = self.surface, self.surface.levels(candidate)
        self.num_starts += 1
        kind = surface.fails(levels)
        compile_s = cold = 0.0
        if surface.is_compiled(levels):
            model = surface.model_of(levels)
            cold = model not in self._compiled
            compile_s = surface.compile_s if cold else warm_compile_s(surface.compile_s)
            if kind is None:
                self._compiled.add(model)
        phases_s = {"build": surface.start_s, "warm_up": WARM_UP_S + compile_s}
        if kind is None:
            phases_s |= {
                "measure": WINDOW_S,
                "guard": GUARD_S if profiled else 0.0,
                "profile": 1.0 if profiled else 0.0,
            }
        common: dict[str, Any] = {
            "trial_id": f"trial-{self.num_starts}",
            "candidate": candidate,
            "purpose": purpose,
            "group": f"group-{self.num_starts}",
            "phases_ns": {name: int(s * 1e9) for name, s in phases_s.items() if s},
        }
        if kind is not None:
            failure = Failure(kind=kind, phase=Phase.WARM_UP, message="as the surface has it")
            return TrialResult(failure=failure, **common)
        times = surface.times_ms(levels) * self._slowness()
        step_ns = float(times.sum()) * 1e6
        return TrialResult(
            windows=tuple(
                known_window(n, step_ns * math.exp(self._random.normal(0, 0.002))) for n in range(NUM_WINDOWS)
            ),
            startup=Startup(
                build_ns=int(surface.start_s * 1e9),
                user_code_ns=0,
                first_step_ns=0,
                warm_up_ns=int(phases_s["warm_up"] * 1e9),
                warm_up_steps=3,
                steady=True,
                compile_ns=int(compile_s * 1e9),
                compile_cold=bool(cold),
            ),
            memory=(MemoryPeak(rank=0, resident_bytes=int(surface.peak_gb(levels) * 1e9)),),
            breakdowns=(self._breakdown(times),) if profiled else (),
            guard=GuardVerdict(passed=True, num_steps=4),
            **common,
        )

    def _slowness(self) -> float:
        family = self.surface.family
        noise = self._random.normal(0, family.noise_sd)
        if self._random.random() < family.tail:
            noise += abs(self._random.normal(0, 4 * family.noise_sd))
        drift = family.drift * (1 - math.exp(-self.num_starts / 12)) + family.drift / 3 * math.sin(self.num_starts / 4)
        return math.exp(noise + drift)

    def _breakdown(self, times_ms: np.ndarray) -> Any:
        found = dict.fromkeys((category.value for category in Category), 0)
        noise = np.exp(self._random.normal(0, PROFILE_NOISE_SD, len(times_ms)))
        scaled = times_ms * noise
        scaled *= times_ms.sum() / scaled.sum()
        for category, value in zip(self.surface.categories, scaled, strict=True):
            found[category.value] = int(value * 1e6)
        return known_breakdown(found)


# --- drawing surfaces -------------------------------------------------------------------------


def draw_surface(family: Family, number: int) -> Surface:
    """The n-th surface of a family; always the same one. Something is to be gained on it, and little where a
    professional has been.
    """
    for attempt in itertools.count():
        generator = np.random.default_rng([zlib.crc32(family.name.encode()), number, attempt])
        surface = _drawn(family, number, generator)
        gain = surface.today_ms / surface.best_ms
        if LEAST_GAIN <= gain <= (PROFESSIONAL_GAIN if family.professional else math.inf):
            return surface
    raise AssertionError("unreachable")


def _drawn(family: Family, number: int, g: np.random.Generator) -> Surface:
    categories = tuple(family.base)
    shares = g.dirichlet(60 * np.array(list(family.base.values())))
    knobs: list[Knob] = []
    count, size = int(g.integers(family.num_parameters[0], family.num_parameters[1] + 1)), 1
    while len(knobs) < count:
        num_levels = int(g.choice([2, 2, 3, 3, 4, 5]))
        if size * num_levels > MOST_CONFIGURATIONS:
            break
        size *= num_levels
        knobs.append(_knob(family, len(knobs), num_levels, categories, g))
    knobs = [_gated(family, k, knobs, g) for k in range(len(knobs))]
    joint = [_together(knobs, 2, len(categories), g) for _ in range(int(g.poisson(family.pairs * len(knobs))))]
    joint += [_together(knobs, 3, len(categories), g) for _ in range(int(g.poisson(family.triples * len(knobs))))]
    return Surface(
        family=family,
        number=number,
        knobs=tuple(knobs),
        categories=categories,
        base_ms=100.0 * np.maximum(shares, 0.003),
        joint=tuple(joint),
        illegal=tuple(_levels_of(knobs, 2, g) for _ in range(int(g.poisson(1.0)))),
        broken=tuple(_failing(family, knobs, g)),
        cap_gb=20.0 + float(g.uniform(2, 6)) if family.memory else math.inf,
        start_s=float(np.exp(g.uniform(math.log(4), math.log(25)))),
        compile_s=float(g.uniform(15, 70)),
    )


def _knob(family: Family, index: int, num_levels: int, categories: Any, g: np.random.Generator) -> Knob:
    ordered = bool(num_levels > 2 and g.random() < 0.55)
    sets = [found for attacks in ATTACKED if (found := [n for n, c in enumerate(categories) if c in attacks])]
    declared = np.array(sets[int(g.integers(len(sets)))])
    attacked = declared[(g.random(len(declared)) < ACTS) | (np.arange(len(declared)) == g.integers(len(declared)))]
    today = int(g.integers(num_levels)) if ordered else 0
    effects = _ordered(family, num_levels, g) if ordered else _unordered(family, num_levels, g)
    effects = effects - effects[today]
    table = np.zeros((num_levels, len(categories)))
    table[:, attacked] = effects[:, None] * g.uniform(0.4, 1.0, len(attacked))
    table[np.arange(num_levels) != today] += g.normal(0, 0.015, (num_levels - 1, len(categories))) * (
        g.random((num_levels - 1, len(categories))) < 0.25
    )
    if g.random() < family.wrong:
        declared = np.array(sets[int(g.integers(len(sets)))])
    savings = []
    for level in range(num_levels):
        true = 1 - np.exp(np.minimum(0.0, table[level, declared]))
        if g.random() < family.loose:
            part = np.ones(len(declared))
        elif g.random() < family.wrong:
            part = true * g.uniform(0.1, 0.7)
        else:
            part = np.minimum(1.0, np.maximum(true * g.uniform(1.0, 1.4), 0.05))
        savings.append({} if level == today else {categories[c]: float(p) for c, p in zip(declared, part, strict=True)})
    values = tuple(2**n for n in range(num_levels)) if ordered else tuple(f"v{n}" for n in range(num_levels))
    needs = g.normal(0.5, 2.0, num_levels) if family.memory else np.zeros(num_levels)
    needs[today] = 0.0
    return Knob(
        name=f"p{index}",
        values=values,
        ordered=ordered,
        today=today,
        effects=table,
        savings=tuple(savings),
        memory=tuple(float(n) for n in needs),
        usual_realisation=_usual(table, savings, categories, g),
        recompiles=bool(g.random() < 0.35),
    )


def _usual(
    table: np.ndarray, savings: Sequence[Mapping[Category, float]], categories: Any, g: np.random.Generator
) -> float:
    """The part of its bound that such a choice usually realises: what this one does, as far as experience can tell."""
    true = 1 - np.exp(np.minimum(0.0, table))
    parts = [
        true[n, categories.index(c)] / most for n, own in enumerate(savings) for c, most in own.items() if most > 0
    ]
    return float(np.clip(np.mean(parts or [0.0]) * np.exp(g.normal(0, EXPERIENCE)), 0.05, 0.9))


def _unordered(family: Family, num_levels: int, g: np.random.Generator) -> np.ndarray:
    """Levels of one choice are alike: their effects share a part."""
    shared = _effect(family, g)
    found = np.array([0.7 * shared + 0.3 * _effect(family, g) for _ in range(num_levels)])
    found[0] = 0.0
    return found


def _effect(family: Family, g: np.random.Generator) -> float:
    kind = g.random()
    if kind < family.effective:
        return float(math.log(1 - min(0.9, family.strength * g.beta(2, 3) * 2)))
    return float(g.normal(0, HARMLESS) if kind < 0.8 else abs(g.normal(0, 0.12)))


def _ordered(family: Family, num_levels: int, g: np.random.Generator) -> np.ndarray:
    """Rises to a best value and saturates, or falls again."""
    rank = np.linspace(0, 1, num_levels)
    best, width = g.uniform(0.2, 1.1), g.uniform(0.3, 0.9)
    depth = abs(_effect(family, g)) + 0.02
    curve = -depth * np.exp(-0.5 * ((rank - best) / width) ** 2)
    return np.asarray(curve + g.normal(0, HARMLESS, num_levels))


def _gated(family: Family, index: int, knobs: list[Knob], g: np.random.Generator) -> Knob:
    knob = knobs[index]
    if index == 0 or g.random() >= family.gated:
        return knob
    other = int(g.integers(index))
    levels = [level for level in range(len(knobs[other].values)) if g.random() < 0.5]
    if not levels or len(levels) == len(knobs[other].values):
        levels = [level for level in range(len(knobs[other].values)) if level != knobs[other].today][:1]
    return Knob(**{**knob.__dict__, "gate": (other, frozenset(levels))})


def _levels_of(knobs: list[Knob], count: int, g: np.random.Generator) -> dict[int, int]:
    """Choices of some parameters, none of them today's."""
    found = {}
    for k in g.choice(len(knobs), size=min(count, len(knobs)), replace=False):
        found[int(k)] = int(g.choice([v for v in range(len(knobs[k].values)) if v != knobs[k].today]))
    return found


def _together(
    knobs: list[Knob], count: int, num_categories: int, g: np.random.Generator
) -> tuple[dict[int, int], np.ndarray]:
    levels = _levels_of(knobs, count, g)
    effect = np.zeros(num_categories)
    first = knobs[next(iter(levels))]
    strongest = int(np.argmax(np.abs(first.effects).sum(0)))
    effect[strongest] = g.normal(0, 0.12) - (0.1 if g.random() < 0.25 else 0.0)
    return levels, effect


def _failing(family: Family, knobs: list[Knob], g: np.random.Generator) -> list[dict[int, int]]:
    num_choices = sum(len(knob.values) - 1 for knob in knobs)
    count = int(g.poisson(family.failing * num_choices))
    return [_levels_of(knobs, 1 + int(g.random() < 0.6), g) for _ in range(count)]


def every_surface(half: str, per_family: int, first: int = 0) -> list[Surface]:
    """Surfaces of one half of the families, or of `both`, from the number `first` of each family on."""
    chosen = [family for family in FAMILIES if half in ("both", family.half)]
    return [draw_surface(family, number) for number in range(first, first + per_family) for family in chosen]
