"""Setting of `parallel_mesh`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from steptune.tuner.strategies.api import Setting

AXES = ("pipeline", "tensor", "expert")
"""Axes of a mesh along which ranks hold parts of one model."""


@dataclass(frozen=True, kw_only=True)
class ParallelMeshSetting(Setting):
    strategy: ClassVar[str] = "parallel_mesh"

    pipeline: Annotated[int, range(1, 1025)] = 1
    tensor: Annotated[int, range(1, 1025)] = 1
    expert: Annotated[int, range(1, 1025)] = 1
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    micro_batches: Annotated[int, range(1, 65537)] = 8

    @property
    def model_ranks(self) -> int:
        """Number of ranks that share one copy of the model."""
        return self.pipeline * self.tensor * self.expert

    @property
    def splits_model(self) -> bool:
        return self.model_ranks > 1
