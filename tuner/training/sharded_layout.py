"""Parameter layouts of jobs that shard parameters or optimizer states over ranks: FSDP and ZeRO-1."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from steptune.tuner.training.parameter_layout import ParameterLayout
from steptune.tuner.training.sharding import consolidated, laid_out, unreduced, whole

if TYPE_CHECKING:
    import torch


class ShardedParameters(ParameterLayout):
    """Layout in which every rank has a part of every parameter, of its gradient and of its states.

    Args:
        reduce_each: Whether every micro-batch's gradients are reduced; else the sum of all is reduced once.
    """

    has_every_value = False

    def __init__(self, *, reduce_each: bool) -> None:
        self._reduce_each = reduce_each

    def waiting(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        return super().waiting(model) if self._reduce_each else unreduced(model)

    def whole(self, value: Any) -> Any:
        return whole(value)

    def own_optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return laid_out(state, [p for group in optimizer.param_groups for p in group["params"]])


class ShardedOptimizerStates(ParameterLayout):
    """Layout in which every rank has whole parameters, and the optimizer states of some of them."""

    has_every_value = False

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return consolidated(optimizer)
