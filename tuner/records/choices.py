"""Choices that change a training step, alone and together, and their effect on its numbers."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from steptune.tuner.records.base import Record

Scalar = bool | int | float | str | None
Choice = dict[str, Scalar]
"""One setting of a strategy: the parameters that differ from the neutral choice, by name."""


class Numerics(StrEnum):
    """Effect of a choice on the numbers of a training step, mildest first.

    `exact`: bit for bit. `sampling`: the same indices and distribution; random augmentation may
    differ. `rounding`: the order of operations, or 16-bit compute with FP32 masters. `lossy`:
    information is dropped. `recipe`: another training recipe. The last two need consent.
    """

    EXACT = "exact"
    SAMPLING = "sampling"
    ROUNDING = "rounding"
    LOSSY = "lossy"
    RECIPE = "recipe"

    @property
    def rank(self) -> int:
        return list(Numerics).index(self)

    @property
    def needs_consent(self) -> bool:
        return self in (Numerics.LOSSY, Numerics.RECIPE)


def _label_value(value: Scalar) -> str:
    return (
        {True: "on", False: "off", None: "default"}.get(value, str(value))
        if (value is None or isinstance(value, bool))
        else str(value)
    )


def choice_label(choice: Mapping[str, Scalar]) -> str:
    """Return a choice in readable form, such as `num_workers=2, persistent_workers=on`."""
    return ", ".join(f"{name}={_label_value(value)}" for name, value in choice.items()) or "unchanged"


class Candidate(Record, dict=True):
    """The non-neutral choices of a configuration, normalised (see `steptune.tuner.strategies.combine`).

    Only strategies, and within them only parameters, that differ from what the user runs today are
    listed. So the hash of a candidate does not change when Steptune learns a new strategy.

    Attributes:
        choices: Parameters that differ from what the user runs today, by strategy.
    """

    choices: dict[str, Choice] = msgspec.field(default_factory=dict)

    @functools.cached_property
    def key(self) -> str:
        """Stable identity of the candidate: 16 hexadecimal digits of the SHA-256 of the canonical JSON."""
        canonical = msgspec.json.encode(self.choices, order="deterministic")
        return hashlib.sha256(canonical).hexdigest()[:16]

    @property
    def is_baseline(self) -> bool:
        return not self.choices

    @functools.cached_property
    def label(self) -> str:
        if self.is_baseline:
            return "baseline"
        return "; ".join(f"{name}: {choice_label(choice)}" for name, choice in sorted(self.choices.items()))

    @property
    def moves(self) -> tuple[Move, ...]:
        """Moves of the candidate, one for each of its choices."""
        return tuple(Move(strategy=strategy, choice=choice) for strategy, choice in self.choices.items())

    def with_choice(self, strategy: str, choice: Choice) -> Candidate:
        """Return a copy of the candidate with one strategy set to `choice` (an empty choice is the neutral one)."""
        choices = {name: value for name, value in self.choices.items() if name != strategy}
        if choice:
            choices[strategy] = choice
        return Candidate(choices=choices)


BASELINE = Candidate()


class Move(Record):
    """One strategy set to one choice.

    Attributes:
        strategy: The strategy.
        choice: The choice to which it is set.
    """

    strategy: str
    choice: Choice

    @property
    def label(self) -> str:
        return f"{self.strategy}: {choice_label(self.choice)}"

    @property
    def key(self) -> str:
        """Identity of the setting, independent of the order of the parameters."""
        return f"{self.strategy}:{tuple(sorted(self.choice.items()))}"
