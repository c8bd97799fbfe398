"""Hooks of a training step: on its gradients, after its update, and on the state in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Named = Sequence[tuple[str, torch.nn.Parameter]]
    Names = Mapping[torch.nn.Parameter, str]


class StepHook:
    """A technique that takes part in a step. A job calls its hooks in order, and in reverse order to collect state.

    Attributes:
        method: Name of the technique whose state each rank keeps from step to step; empty where none is kept.
        steps_per_round: Smallest number of steps in which each kind of a step's work occurs.
        ranks_differ: Whether parameters or states may differ between ranks for some steps.
        has_clipped: Whether gradients are clipped before they are averaged.
    """

    method: str = ""
    steps_per_round: int = 1
    ranks_differ: bool = False
    has_clipped: bool = False

    def updated(self, named: Named) -> Named:
        """Return the parameters that the optimizer updates in place of the given ones, under the same names."""
        return named

    # --- one step -----------------------------------------------------------------------------

    def after_micro_batch(self, model: torch.nn.Module) -> None:
        """Act after each backward pass of a batch that is split into micro-batches."""

    def finish_gradients(self) -> None:
        """Transfer the gradients of the backward pass to the parameters that the optimizer updates."""

    def after_update(self, parameters: Sequence[torch.Tensor]) -> None:
        """Act after the optimizer has updated `parameters`."""

    def parameters_set(self) -> None:
        """Act after the model's parameters were set from outside."""

    # --- checkpoints: of all ranks ------------------------------------------------------------

    def state(self, state: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the model's state, with the hook's own values in it."""
        return state

    def optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, with the hook's own values in it."""
        return state

    def optimizer_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Act after the optimizer has loaded a state."""

    # --- checkpoints: of each rank ------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the hook; a kept state can be used again only by a hook with equal settings."""
        return {}

    def kept(self, names: Names) -> dict[str, Any]:
        """Return the state that the hook keeps on this rank for later steps, in separate tensors; empty if it keeps
        none.

        Args:
            names: The user's names of the parameters.
        """
        return {}

    def keep(self, kept: Mapping[str, Any], names: Names) -> None:
        """Continue from the state that `kept` returned, perhaps in another job."""
        assert not kept, f"{self.method} keeps nothing"
