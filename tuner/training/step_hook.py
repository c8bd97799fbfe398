"""Work beside a step: on its gradients, after its update, and on what a checkpoint has of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Named = Sequence[tuple[str, torch.nn.Parameter]]
    Names = Mapping[torch.nn.Parameter, str]


class StepHook:
    """A technique that takes part in a step. A job calls its hooks in their order; for a state in the opposite one.

    Attributes:
        method: Name of what is kept on each rank from step to step; empty where nothing is.
        steps_per_round: After so many steps everything that a step does was done.
        ranks_differ: Ranks have parameters or states of their own for a while.
        has_clipped: Gradients were clipped before they were averaged.
    """

    method: str = ""
    steps_per_round: int = 1
    ranks_differ: bool = False
    has_clipped: bool = False

    def updated(self, named: Named) -> Named:
        """Parameters that the optimizer updates instead of these, under the same names."""
        return named

    # --- one step -----------------------------------------------------------------------------

    def after_micro_batch(self, model: torch.nn.Module) -> None:
        """Act after every backward pass of a batch that is computed in several."""

    def finish_gradients(self) -> None:
        """Bring gradients of the backward pass to what the optimizer updates."""

    def after_update(self, parameters: Sequence[torch.Tensor]) -> None:
        """Act when the optimizer has updated `parameters`."""

    def parameters_set(self) -> None:
        """Act when the model's parameters were set from outside."""

    # --- checkpoints: of all ranks ------------------------------------------------------------

    def state(self, state: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The model's state, with what the hook holds of it."""
        return state

    def optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state, with what the hook holds of it."""
        return state

    def optimizer_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Act when the optimizer has loaded a state."""

    # --- checkpoints: of each rank ------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """Parameters with which alone something kept can be used again."""
        return {}

    def kept(self, names: Names) -> dict[str, Any]:
        """State that it keeps for later steps on this rank, in tensors of its own; empty where there is none.

        Args:
            names: The user's, of the parameters.
        """
        return {}

    def keep(self, kept: Mapping[str, Any], names: Names) -> None:
        """Go on with what `kept` gave, in another job too."""
        assert not kept, f"{self.method} keeps nothing"
