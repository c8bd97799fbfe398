"""FP32 masters of 16-bit parameters: the optimizer half of precision level O2.

The model computes with 16-bit weights; the optimizer holds FP32 copies. After the backward pass the
16-bit gradients are added to FP32 ones (so that those of micro-batches add up in FP32), and after the
update the masters are rounded back. Both are multi-tensor operations. Parameters that are not trained have
no master. Definition: apex amp O2 ("master_weights"), with normalisation layers kept in FP32; see
docs/strategies/precision.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.training.step_hook import StepHook

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.step_hook import Named


class MasterWeights(StepHook):
    """Hook that pairs every trainable 16-bit parameter with an FP32 master. Other parameters (FP32, complex) are their
    own masters.
    """

    def __init__(self, named_parameters: Named) -> None:
        import torch

        self._names: list[str] = []
        self._masters: list[torch.nn.Parameter] = []
        self._pairs: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
        for name, parameter in named_parameters:
            if not parameter.requires_grad:
                continue
            self._names.append(name)
            if parameter.dtype in (torch.float16, torch.bfloat16):
                master = torch.nn.Parameter(parameter.detach().float())
                self._masters.append(master)
                self._pairs.append((parameter, master))
            else:
                self._masters.append(parameter)

    def updated(self, named: Named) -> Named:
        """Return the masters, under the user's own names."""
        return list(zip(self._names, self._masters, strict=True))

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that holds the 16-bit parameters of the model instead of the masters.

        Raises:
            WorkloadRejectedError: The optimizer was not built from the parameters that `Workload.optimizer` gets.
        """
        sixteen_bit = {id(parameter) for parameter, _ in self._pairs}
        held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in sixteen_bit]
        if held:
            raise WorkloadRejectedError(
                f"{type(optimizer).__name__} holds {len(held)} 16-bit parameters of the model, so their FP32 "
                "master weights would not be trained: build the optimizer from the named_parameters that "
                "optimizer() receives"
            )

    def after_micro_batch(self, model: torch.nn.Module) -> None:
        if not hasattr(model, "no_sync"):  # else ranks have yet to add theirs
            self.finish_gradients()

    def finish_gradients(self) -> None:
        """Add the 16-bit gradients to the FP32 gradients of the masters, and free them."""
        import torch

        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter, master in self._pairs:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:  # sparse, of an embedding
                master.grad = gradient.float() if master.grad is None else master.grad + gradient.float()
            elif master.grad is None:
                master.grad = torch.empty_like(master)
                copied.append((master.grad, gradient))
            else:
                added.append((master.grad, gradient))
        if copied:
            torch._foreach_copy_([target for target, _ in copied], [source for _, source in copied])
        if added:
            torch._foreach_add_([target for target, _ in added], [source for _, source in added])

    def after_update(self, parameters: Sequence[torch.Tensor]) -> None:
        """Round the masters into the model's parameters."""
        import torch

        if self._pairs:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in self._pairs], [master for _, master in self._pairs])

    def parameters_set(self) -> None:
        """Copy the model's parameters into the masters."""
        import torch

        if self._pairs:
            with torch.no_grad():
                torch._foreach_copy_([master for _, master in self._pairs], [p for p, _ in self._pairs])

    def state(self, state: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the model's state with FP32 values under all names of the parameters; a tied weight has several
        names.
        """
        values = {id(parameter): master.detach() for parameter, master in self._pairs}
        named = model.named_parameters(remove_duplicate=False)
        return {**state, **{name: values[id(parameter)] for name, parameter in named if id(parameter) in values}}
