"""Base class of strategies.

A strategy is one technique that can be switched or set: one folder here and one entry in `registry.STRATEGIES`, or
a package of its own that names it as an entry point of the group `steptune.strategies`. The folder has the setting
(`choice.py`, all that other strategies may import), the strategy (`strategy.py`), and the combinations with others
(`conflicts.py`). It never wraps anything itself and never edits another strategy: it says in the plan
what it wants at which stage. Strategies are used by processes that must not load torch, so torch is
imported inside functions only.

The contract tests in tests/contracts/test_strategies.py hold for every entry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from steptune.tuner.costs.bounds import Savings, Situation, total
from steptune.tuner.costs.categories import Category
from steptune.tuner.errors import ChoiceError
from steptune.tuner.records import Choice, Effect, Environment, Failure, Numerics, Scalar, ScriptFacts, WorkloadFacts
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.wording import which_of

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan

FP32_ROUNDOFF = 2.0**-24
TF32_ROUNDOFF = 2.0**-11
FP16_ROUNDOFF = 2.0**-11
BF16_ROUNDOFF = 2.0**-8
HARDLY = 0.005
"""Saving assumed for a change that is expected to have almost no effect, as a share of the step."""


@dataclass(frozen=True)
class Supported:
    """Answer of `supports` for a choice that can be tried here."""


@dataclass(frozen=True)
class Unsupported:
    """Answer of `supports` for a choice that cannot be tried here, with the reason."""

    reason: str


Support = Supported | Unsupported

_S = TypeVar("_S", bound="Setting")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Complete choice of one strategy, typed; subclasses have its parameters as fields.

    The default of a field is what plain PyTorch runs. Its annotation says what it may be: `bool`, a `Literal`, or
    `Annotated` with values and ranges of whole numbers.

    Attributes:
        strategy: Name of the strategy, under which candidates store its choice.
    """

    strategy: ClassVar[str]

    @classmethod
    def of(cls, choice: Choice) -> Self:
        """Build the setting of a stored choice; missing parameters get plain PyTorch's values."""
        return cls(**choice)

    @classmethod
    def defaults(cls) -> Choice:
        return {field.name: field.default for field in fields(cls)}  # type: ignore[misc]

    @classmethod
    def allowed(cls) -> Mapping[str, tuple[Scalar | range, ...]]:
        """Return the allowed values and ranges of every parameter."""
        hints = get_type_hints(cls, include_extras=True)
        return {field.name: _allowed_by(hints[field.name]) for field in fields(cls)}


def _allowed_by(annotation: Any) -> tuple[Scalar | range, ...]:
    if annotation is bool:
        return (False, True)
    if get_origin(annotation) is Annotated:
        return tuple(annotation.__metadata__)
    assert get_origin(annotation) is Literal, (
        f"{annotation} must be bool, or a Literal or Annotated of all allowed values"
    )
    return get_args(annotation)


class Settings:
    """Complete choices of several strategies, by the class of their settings."""

    def __init__(self, choices: Mapping[str, Choice]) -> None:
        self._choices = choices
        self._made: dict[type[Setting], Setting] = {}

    def __getitem__(self, kind: type[_S]) -> _S:
        """Return the setting of one strategy; its defaults where the choices do not set it."""
        made = self._made.get(kind)
        if made is None:
            made = self._made[kind] = kind.of(self._choices.get(kind.strategy, {}))
        return made  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Combination of choices that cannot be run.

    Attributes:
        detail: Addition to the reason, from the workload.
    """

    between: tuple[type[Setting], type[Setting]]
    when: Callable[[Settings, Environment, WorkloadFacts], bool]
    reason: str
    detail: Callable[[WorkloadFacts], str] = lambda workload: ""

    @property
    def strategies(self) -> tuple[str, str]:
        return self.between[0].strategy, self.between[1].strategy


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Parameters that have no meaning in a combination, and are therefore dropped from the candidate."""

    setting: type[Setting]
    parameters: tuple[str, ...]
    when: Callable[[Settings], bool]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Together:
    """Pair of strategies whose choices are worth changing together, because they share a resource."""

    between: tuple[type[Setting], type[Setting]]
    reason: str

    @property
    def strategies(self) -> tuple[str, str]:
        return self.between[0].strategy, self.between[1].strategy


class Way(StrEnum):
    """Way to apply a choice in a training script's own loop.

    LIVE: the choice can be made and undone while the loop runs. FORK: it needs a copy of the process, frozen before
    training began. START: it needs a new process.
    """

    LIVE = "live"
    FORK = "fork"
    START = "start"


@dataclass(frozen=True, kw_only=True)
class Outside:
    """Application of a choice in a training script whose source stays unchanged.

    Attributes:
        way: Cheapest way that works; a new process works for every choice.
        changes: What the hooks in the script change, by name (`scripts/agent/changes.py`); variables of the environment
            come from `environment_variables`.
        words: The change as a user would write it.
        at: Object at whose line in the script it is written: "loader", "optimizer", "model", or empty for the script's
            beginning.
    """

    way: Way
    changes: Mapping[str, Scalar]
    words: str
    at: str = ""


@dataclass(frozen=True)
class NeedsWorkload:
    """Refusal of a choice in a training script's own loop, with the reason; the choice may be possible with a
    `Workload`.
    """

    reason: str


class Strategy(ABC):
    """Base class of strategies; a strategy is one technique.

    Attributes:
        setting: Class of its choices; gives the name, the defaults and the allowed values.
        name: Name in `current` and in stored candidates.
        summary: Human-readable summary in one line.
        defaults: The complete choice that plain PyTorch runs.
        values: Values that each parameter may have: single ones, and ranges of whole numbers.
        conflicts: Combinations that cannot be run, with strategies registered before it.
        dropped: Parameters that have no meaning in a combination.
        together: Strategies worth trying at once with it.
        attacks: Categories of the breakdown that it can shrink.
        cures: Cures of a step's limits that it carries out, by which findings advise it.
        memory: Whether it saves memory; tried where memory is the limit.
        touches: Categories whose time it can change, for better or worse; changes of the others in a profile are due to
            the machine. None where it can change any.
        trial_cost_s: Expected seconds of its trial beyond an ordinary one, before any was measured.
        recompiles: Whether a change of it compiles a compiled model again.
        has_order: Whether neighbours among choices that differ in one number behave alike.
        usual_realisation: Share of its bound that a choice usually realises, before any was measured; orders trials.
        needs_workload: Reason why no choice can be applied in a training script's own loop; empty where `outside` says
            how.
        raises: Modules or classes of the exceptions by which a trial refuses its choices: a failure with such an
            exception is blamed on this strategy.
        exchange_realisation: Usual share for a choice that replaces another one of the incumbent. None means halfway
            between the usual share and 1, because one choice may finish what another began.
    """

    setting: ClassVar[type[Setting]]
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    dropped: ClassVar[tuple[Dropped, ...]] = ()
    together: ClassVar[tuple[Together, ...]] = ()
    name: ClassVar[str]
    summary: ClassVar[str]
    defaults: ClassVar[Choice]
    values: ClassVar[Mapping[str, tuple[Scalar | range, ...]]]
    attacks: ClassVar[tuple[Category, ...]]
    cures: ClassVar[tuple[Cure, ...]] = ()
    memory: ClassVar[bool] = False
    touches: ClassVar[tuple[Category, ...] | None] = None
    trial_cost_s: ClassVar[float] = 0.0
    recompiles: ClassVar[bool] = False
    has_order: ClassVar[bool] = True
    usual_realisation: ClassVar[float] = 0.2
    exchange_realisation: ClassVar[float | None] = None
    needs_workload: ClassVar[str] = ""
    raises: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "setting" in vars(cls):
            cls.name = cls.setting.strategy
            cls.defaults, cls.values = cls.setting.defaults(), cls.setting.allowed()

    # --- the space ----------------------------------------------------------------------------

    def neutral(self, workload: WorkloadFacts) -> Choice:
        """Return the complete choice that the user runs today."""
        return self.completed(workload.current.get(self.name, {}))

    def completed(self, current: Mapping[str, Scalar]) -> Choice:
        """Return the complete choice that a workload's `current` stands for."""
        return {**self.defaults, **current}

    @abstractmethod
    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        """Return the complete choices worth trying here, the most promising first; today's choice may be among them."""

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        """Say, without running the choice, whether it can be tried here."""
        return Supported()

    def raised(self, failure: Failure | None) -> bool:
        """Say whether a trial's failure, by its exception, is a refusal of this strategy's choice."""
        return failure is not None and bool(self.raises) and failure.error.startswith(self.raises)

    def cost_s(self, choice: Choice, workload: WorkloadFacts) -> float:
        """Estimate how many seconds longer a trial of this choice takes than an ordinary one, before one was timed."""
        return self.trial_cost_s

    def likely_part(self, workload: WorkloadFacts) -> float:
        """Return the share of the maximum saving that a choice usually realises in a workload, before any was
        measured.
        """
        return self.usual_realisation

    @abstractmethod
    def numerics(self, choice: Choice) -> Numerics:
        """Return the effect on numerics of a choice that differs from today's."""

    def unit_roundoff(self, choice: Choice) -> float:
        """Return the unit roundoff of the coarsest arithmetic that the choice computes with."""
        return FP32_ROUNDOFF

    def environment_variables(self, choice: Choice) -> dict[str, str]:
        """Return the variables that must be set before torch is imported."""
        return {}

    # --- what it does -------------------------------------------------------------------------

    @abstractmethod
    def contribute(self, plan: Plan, choice: Choice) -> None:
        """Add the choice's requests to the plan; the default choice adds nothing."""

    def outside(self, choice: Choice, script: ScriptFacts) -> Outside | NeedsWorkload:
        """Return the application of a complete choice in a script's own loop, or the reason why it needs a workload."""
        return NeedsWorkload(self.needs_workload)

    def exchange(self, choice: Choice) -> Mapping[str, Any]:
        """Return the fields of `Exchange` that a complete choice sets: what ranks exchange, and how."""
        return {}

    def computation(self, choice: Choice) -> Mapping[str, Any]:
        """Return the fields of `Computation` that a complete choice sets: dtypes of matmuls, samples per step."""
        return {}

    # --- what it can gain ---------------------------------------------------------------------

    @abstractmethod
    def savings(self, situation: Situation, choice: Choice) -> Savings:
        """Return the maximum saving of the choice in each category, as shares of the incumbent's step."""

    def bound(self, situation: Situation, choice: Choice) -> float:
        """Return the maximum saving of the choice, as a share of the incumbent's step."""
        return total(self.savings(situation, choice))

    def expected(self, situation: Situation, choice: Choice) -> float | None:
        """Return the expected saving of the choice, as a share of the incumbent's step. None if the only estimate is
        the share of the maximum saving that the strategy usually realises.
        """
        return None

    # --- whether it did -----------------------------------------------------------------------

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        """Return evidence of this strategy in the running job (plain values; runs in the rank)."""
        return {}

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        """Say whether the evidence shows that the choice is in effect. By default, every parameter in the evidence must
        equal the choice's. If the evidence has none of the choice's parameters, the choice counts as in effect, and the
        detail says that nothing shows it.
        """
        for name, wanted in choice.items():
            if name in evidence and evidence[name] != wanted:
                return Effect(strategy=self.name, took=False, detail=f"{name} is {evidence[name]}, not {wanted}")
        seen = any(name in evidence for name in choice)
        return Effect(strategy=self.name, took=True, detail="as asked" if seen else "nothing shows it")

    # --- checks -------------------------------------------------------------------------------

    def check(self, choice: Mapping[str, Scalar]) -> None:
        """Refuse parameters and values that the strategy does not have.

        Raises:
            ChoiceError: A parameter or value is unknown; the message lists those that exist.
        """
        for name, value in choice.items():
            if name not in self.defaults:
                raise ChoiceError(
                    f"{self.name} has no parameter {name!r} (value {value!r}): {which_of(name, self.defaults)}"
                )
            if not any(_allows(allowed, value) for allowed in self.values[name]):
                raise ChoiceError(
                    f"{self.name} has no {name} {value!r}; it may be {', '.join(map(_described, self.values[name]))}"
                )

    def difference(self, choice: Choice, workload: WorkloadFacts) -> Choice:
        """Return the parameters of a complete choice that differ from today's choice."""
        neutral = self.neutral(workload)
        return {name: value for name, value in choice.items() if value != neutral[name]}

    def complete(self, difference: Choice, workload: WorkloadFacts) -> Choice:
        """Return the complete choice, given the parameters in which it differs from today's choice."""
        return {**self.neutral(workload), **difference}


def _allows(allowed: Scalar | range, value: Scalar) -> bool:
    """Say whether a value is allowed, comparing types too: True is not the number 1."""
    if isinstance(allowed, range):
        return type(value) is int and value in allowed
    return type(value) is type(allowed) and value == allowed


def _described(allowed: Scalar | range) -> str:
    return f"a whole number from {allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else repr(allowed)


def each_once(today: Choice, changes: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return variants of today's choice, one for each change, in the order of the changes and without duplicates."""
    found: list[Choice] = []
    for change in changes:
        choice = {**today, **change}
        if choice not in found:
            found.append(choice)
    return tuple(found)


def needs_cuda(environment: Environment) -> Support:
    """Return the support of a choice that requires a CUDA device."""
    if environment.hardware.device_kind == "cuda":
        return Supported()
    return Unsupported("requires a CUDA device")


def needs_ranks(environment: Environment) -> Support:
    """Return the support of a choice that changes how ranks communicate, and so requires several ranks."""
    if environment.num_ranks > 1:
        return Supported()
    return Unsupported("requires more than one rank")
