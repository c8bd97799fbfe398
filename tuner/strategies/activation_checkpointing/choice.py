"""Setting of `activation_checkpointing`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingSetting(Setting):
    strategy: ClassVar[str] = "activation_checkpointing"

    every: Annotated[int | None, None, range(1, 1025)] = None
    save: Literal[None, "attention", "products"] = None
