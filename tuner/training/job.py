"""The assembled training: what a trial measures and what `tuner.apply` gives to a user's script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tuner.training.micro_batch import split_batch
from tuner.training.structure import map_structure

if TYPE_CHECKING:
    import torch

    from tuner.training.master_weights import MasterWeights
    from tuner.training.plan import LoaderArguments, Plan
    from tuner.workloads.workload import Workload


class TrainingJob:
    """A model, its optimizer and its loader, and the step that the plan asks for.

    Attributes:
        model: The user's model, transformed and wrapped.
        optimizer: The user's optimizer (over FP32 masters where the plan has them).
        scheduler: The user's scheduler or None.
        loader: Iterable over batches.
        skipped_steps: Updates that the loss scaler skipped so far.
        on_gradients: Called with the parameters after unscaling and before clipping, or None.
    """

    def __init__(
        self,
        *,
        workload: Workload,
        plan: Plan,
        device: torch.device,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        masters: MasterWeights | None,
        loader: Any,
    ) -> None:
        import torch

        self.workload = workload
        self.plan = plan
        self.device = device
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.loader = loader
        self.skipped_steps = 0
        self.on_gradients: Callable[[list[torch.Tensor]], None] | None = None
        self._masters = masters
        self._scaler = torch.amp.GradScaler(device.type) if plan.step.loss_scaler else None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    # --- one step -----------------------------------------------------------------------------

    def step(self, batch: Any) -> torch.Tensor:
        """One update from one batch as the loader gives it.

        Returns:
            The loss, detached, still on the device (reading it synchronises).
        """
        batch = self.to_device(batch)
        if self.workload.has_custom_step:
            return self.workload.training_step(self, batch).detach()
        loss = self._forward_backward(batch)
        self.update()
        return loss

    def to_device(self, batch: Any) -> Any:
        """Moves a batch to the device and applies the batch transforms."""
        if self.device.type != "cpu":
            batch = moved(batch, self.device, non_blocking=self.plan.loader.pin_memory)
        batch = self.workload.batch_transform(batch)
        for transform in self.plan.batch:
            batch = transform(batch)
        return batch

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of a batch that is on the device, in the plan's precision."""
        import torch

        with ExitStack() as stack:
            for context in self.plan.step.contexts:
                stack.enter_context(context())
            if self.plan.step.autocast_dtype:
                dtype = getattr(torch, self.plan.step.autocast_dtype)
                stack.enter_context(torch.autocast(self.device.type, dtype=dtype))
            return self.workload.loss(self.model, batch)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates gradients, scaled where the plan has a loss scaler."""
        with ExitStack() as stack:
            for context in self.plan.step.contexts:
                stack.enter_context(context())
            (self._scaler.scale(loss) if self._scaler else loss).backward()

    def update(self) -> None:
        """Clips, updates, clears the gradients and steps the scheduler."""
        if self._masters:
            self._masters.take_gradients()
        if self._scaler:
            self._scaler.unscale_(self.optimizer)
        parameters = self._parameters()
        if self.on_gradients:
            self.on_gradients([p.grad for p in parameters if p.grad is not None])
        if self.workload.max_grad_norm is not None:
            import torch

            torch.nn.utils.clip_grad_norm_(parameters, self.workload.max_grad_norm)
        stepped = self._step_optimizer()
        self.optimizer.zero_grad(set_to_none=True)
        if self._masters:
            self._masters.write_back()
        if self.scheduler is not None and stepped:
            self.scheduler.step()

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state under the user's own key names, masters in FP32 where there are any."""
        state = dict(unwrapped(self.model).state_dict())
        if self._masters:
            state.update(self._masters.state())
        return state

    def master_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Name and value of what the optimizer updates."""
        if self._masters:
            return self._masters.named()
        return [(name, p) for name, p in unwrapped(self.model).named_parameters() if p.requires_grad]

    def reload_masters(self) -> None:
        """Takes the masters anew from the model's parameters, after those were set from outside."""
        if self._masters:
            self._masters.reload()

    # --- pieces -------------------------------------------------------------------------------

    def _forward_backward(self, batch: Any) -> torch.Tensor:
        count = self.plan.step.num_micro_batches
        if count == 1:
            loss = self.loss(batch)
            self.backward(loss)
            return loss.detach()
        pieces, weights = split_batch(self.workload, batch, count)
        total: Any = 0.0
        for number, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
            with ExitStack() as stack:
                if number < count - 1 and hasattr(self.model, "no_sync"):
                    stack.enter_context(self.model.no_sync())  # type: ignore[operator]
                loss = self.loss(piece) * weight
                self.backward(loss)
            total = total + loss.detach()
        return total  # type: ignore[no-any-return]

    def _step_optimizer(self) -> bool:
        if self._scaler is None:
            self.optimizer.step()
            return True
        before = self._scaler.get_scale()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        skipped = self._scaler.get_scale() < before
        self.skipped_steps += skipped
        return not skipped

    def _parameters(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module under a data-parallel wrapper."""
    return model.module if hasattr(model, "module") and hasattr(model, "no_sync") else model  # type: ignore[return-value]


def moved(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """A batch with everything that can be moved on the device."""
    return map_structure(
        lambda leaf: leaf.to(device, non_blocking=non_blocking) if hasattr(leaf, "to") else leaf, batch
    )


def batch_mover(workload: Workload, arguments: LoaderArguments, device: torch.device) -> Callable[[Any], Any]:
    """What makes of a batch as the loader gives it the same batch on the device, converted from bytes where it is."""

    def move(batch: Any) -> Any:
        batch = moved(batch, device, non_blocking=True)
        return workload.from_bytes(batch) if arguments.as_bytes else batch

    return move
