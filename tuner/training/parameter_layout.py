"""Placement of a job's parameters, gradients and optimizer states on the ranks and in memory.

The base class is the plain one: every parameter is whole on its rank and has memory of its own. Contiguous buffers,
FSDP, ZeRO-1 and a device mesh each override the part in which they differ; the job names none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Parameters = Sequence[torch.nn.Parameter]


class ParameterLayout:
    """Base layout: whole parameters, each in separate memory.

    `parameters` are always those that the optimizer updates. Where a rank holds only a part of something, every rank
    must call the method, and gets the whole.

    Attributes:
        has_every_parameter: Whether this rank has at least a part of every parameter.
        has_every_value: Whether it has all parameters and optimizer states whole.
    """

    has_every_parameter: bool = True
    has_every_value: bool = True

    def shared_batch(self, batch: Any) -> Any:
        """Return the batch that this rank computes on, from the share that it loaded."""
        return batch

    # --- gradients ----------------------------------------------------------------------------

    def waiting(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which all micro-batches of a batch run except for the last one. Their gradients are
        reduced together with the last one's.
        """
        return model.no_sync() if hasattr(model, "no_sync") else nullcontext()  # type: ignore[operator]

    def finish_gradients(self, parameters: Parameters) -> None:
        """Transfer the gradients of a backward pass to the parameters that the optimizer updates."""

    def gradients_by_parameter(self) -> Mapping[torch.nn.Parameter, torch.Tensor]:
        """Return the gradients that are not stored in their parameters' `grad`, by parameter."""
        return {}

    def norm(self, parameters: Parameters, gradients: list[torch.Tensor]) -> float:
        """Return the norm of the whole model's gradients.

        It is summed in FP64: a CPU's FP32 sum of millions of squares is 0.1 % off, by an amount that depends on the
        layout.
        """
        import torch

        if not gradients:
            return 0.0
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        return float(self.whole(total))

    def clip(self, parameters: Parameters, max_norm: float) -> None:
        """Scale the gradients down so that the whole model's norm is at most `max_norm`."""
        import torch

        gradients = self._own_gradients(parameters)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, torch.nn.utils.get_total_norm(gradients))

    def _own_gradients(self, parameters: Parameters) -> list[torch.Tensor]:
        return [p.grad for p in parameters if p.grad is not None]

    # --- state --------------------------------------------------------------------------------

    def whole(self, value: Any) -> Any:
        """Return a structure of tensors in which sharded tensors are gathered."""
        return value

    def state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the model's whole state under the user's names."""
        return self.whole(dict(model.state_dict()))  # type: ignore[no-any-return]

    def whole_parameters(
        self, model: torch.nn.Module, named: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the whole value of each updated parameter.

        Args:
            named: Parameters that this rank's optimizer updates.
        """
        for name, parameter in named:
            yield name, self.whole(parameter.detach())

    def groups(self, optimizer: torch.optim.Optimizer) -> list[list[torch.nn.Parameter]]:
        """Return the user's parameters in each group of the optimizer."""
        return [group["params"] for group in optimizer.param_groups]

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's own state dict, in this layout."""
        return optimizer.state_dict()

    def whole_optimizer_state(
        self, state: dict[str, Any], optimizer: torch.optim.Optimizer, names: Sequence[str]
    ) -> tuple[dict[str, Any], Sequence[str]]:
        """Return the optimizer state in the form that the user's optimizer would return, and the parameter names in the
        order of that state.

        Args:
            names: Names of this rank's parameters.
        """
        return self.whole(state), names

    def own_optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the part of a whole optimizer state that this rank's optimizer loads."""
        return state
