"""Setting of `fused_kernels`: fused kernels in place of groups of operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from steptune.kernels.names import pattern_names
from steptune.tuner.records import Choice, Scalar
from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, init=False)
class FusedKernelsSetting(Setting):
    """Switches of the kernels: Steptune's own, and those that other packages register.

    Attributes:
        on: Names of the requested kernels.
    """

    strategy: ClassVar[str] = "fused_kernels"

    on: frozenset[str]

    def __init__(self, **switches: Scalar) -> None:
        object.__setattr__(self, "on", frozenset(name for name, wanted in switches.items() if wanted))

    @classmethod
    def defaults(cls) -> Choice:
        return dict.fromkeys(pattern_names(), False)

    @classmethod
    def allowed(cls) -> Mapping[str, tuple[Scalar | range, ...]]:
        return dict.fromkeys(pattern_names(), (False, True))

    @property
    def is_on(self) -> bool:
        """True where any kernel is requested."""
        return bool(self.on)
