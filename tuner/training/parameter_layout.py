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
    """Whole parameters, each in memory of its own.

    `parameters` are always those that the optimizer updates. Where a rank has only a part of something, every rank
    calls the method and gets all of it.

    Attributes:
        has_every_parameter: Of every parameter this rank has at least a part.
        has_every_value: It has all parameters and all states of the optimizer whole.
    """

    has_every_parameter: bool = True
    has_every_value: bool = True

    def shared_batch(self, batch: Any) -> Any:
        """The batch that this rank computes on, from its own share."""
        return batch

    # --- gradients ----------------------------------------------------------------------------

    def waiting(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Wrap a micro-batch whose gradients wait for those of the last one."""
        return model.no_sync() if hasattr(model, "no_sync") else nullcontext()  # type: ignore[operator]

    def finish_gradients(self, parameters: Parameters) -> None:
        """Bring gradients of a backward pass to what the optimizer updates."""

    def gradients_by_parameter(self) -> Mapping[torch.nn.Parameter, torch.Tensor]:
        """Gradients of parameters that do not hold them themselves."""
        return {}

    def norm(self, parameters: Parameters, gradients: list[torch.Tensor]) -> float:
        """Norm of the whole model's gradients.

        Summed in FP64: a CPU's FP32 sum of millions of squares is 0.1 % off, by another error for another layout.
        """
        import torch

        if not gradients:
            return 0.0
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        return float(self.whole(total))

    def clip(self, parameters: Parameters, max_norm: float) -> None:
        """Scale the gradients down to this norm of the whole model's."""
        import torch

        gradients = self._own_gradients(parameters)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, torch.nn.utils.get_total_norm(gradients))

    def _own_gradients(self, parameters: Parameters) -> list[torch.Tensor]:
        return [p.grad for p in parameters if p.grad is not None]

    # --- state --------------------------------------------------------------------------------

    def whole(self, value: Any) -> Any:
        """A structure of tensors, those whole of which a rank has a part."""
        return value

    def state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The model's state under the user's names, whole."""
        return self.whole(dict(model.state_dict()))  # type: ignore[no-any-return]

    def whole_parameters(
        self, model: torch.nn.Module, named: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole value of what is updated, one after the other.

        Args:
            named: What this rank's optimizer updates.
        """
        for name, parameter in named:
            yield name, self.whole(parameter.detach())

    def groups(self, optimizer: torch.optim.Optimizer) -> list[list[torch.nn.Parameter]]:
        """The user's parameters of each group of the optimizer."""
        return [group["params"] for group in optimizer.param_groups]

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's own state dict, as it is laid out here."""
        return optimizer.state_dict()

    def whole_optimizer_state(
        self, state: dict[str, Any], optimizer: torch.optim.Optimizer, names: Sequence[str]
    ) -> tuple[dict[str, Any], Sequence[str]]:
        """State as the user's optimizer has it, and the names of the parameters in its order.

        Args:
            names: Those of this rank's parameters.
        """
        return self.whole(state), names

    def own_optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The inverse: what this rank's optimizer loads of a whole state."""
        return state
