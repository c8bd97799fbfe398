"""Training job assembled from a plan; a trial measures it, and `steptune.apply` gives it to a user's script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.training.forward_contexts import forward_contexts
from steptune.tuner.training.layouts import Layout, in_layouts, layouts_of
from steptune.tuner.training.micro_batch import batch_length
from steptune.tuner.training.optimizer_state import implementation_flags, with_flags
from steptune.tuner.training.seen_formats import SeenFormats
from steptune.tuner.training.structure import moved

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.parameter_layout import ParameterLayout
    from steptune.tuner.training.plan import Plan
    from steptune.tuner.training.step_hook import Named, StepHook
    from steptune.tuner.training.step_runner import StepRunner
    from steptune.tuner.workloads.workload import Workload

_T = TypeVar("_T")


class TrainingJob:
    """A model, its optimizer and its loader, with the training step that the plan asks for.

    Attributes:
        model: The user's model, transformed and wrapped.
        optimizer: The user's optimizer, over what the plan has it update.
        loader: Iterable over batches.
        scaler: Loss scaler, or None.
        layout: Placement of parameters and states on ranks and in memory.
        hooks: Techniques that take part in a step, in the order of an update.
        runner: Runner of the job's steps.
        formats: Observed dtypes of the job's matmuls.
        on_gradients: Called with the gradients after unscaling and before clipping, or None.
    """

    def __init__(  # noqa: PLR0913  named; `assemble` alone calls it
        self,
        *,
        workload: Workload,
        plan: Plan,
        device: torch.device,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        layout: ParameterLayout,
        hooks: Sequence[StepHook],
        loader: Any,
        make_runner: Callable[[TrainingJob], StepRunner],
        user_flags: Sequence[Mapping[str, Any]] | None = None,
        user_layouts: Mapping[str, Layout] | None = None,
        names: Sequence[str] = (),
        user_rates: Sequence[float] | None = None,
    ) -> None:
        import torch

        self.workload = workload
        self.plan = plan
        self.device = device
        self.model = model
        self.optimizer = optimizer
        self._scheduler = scheduler
        self.loader = loader
        self.on_gradients: Callable[[list[torch.Tensor]], None] | None = None
        self.layout = layout
        self.hooks = hooks
        self.scaler = torch.amp.GradScaler(device.type) if plan.step.loss_scaler else None
        self.formats = SeenFormats()
        self._user_flags = user_flags or [implementation_flags(group) for group in optimizer.param_groups]
        self._user_layouts = user_layouts or {}
        self._optimizer_names = names
        self._user_rates = user_rates
        self._samples = 0
        self._skipped_steps: Any = 0
        """Number of skipped steps: an int, or a tensor on the device."""
        self.runner = make_runner(self)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    @property
    def scheduler(self) -> Any:
        """The user's scheduler, or None. Before the scheduler is returned, its pending steps are made."""
        self.runner.settle()
        return self._scheduler

    # --- one step -----------------------------------------------------------------------------

    def step(self, batch: Any) -> torch.Tensor:
        """Make one update from one batch as the loader gives it.

        Returns:
            The loss, detached, still on the device (reading it synchronises).
        """
        self._samples = max(self._samples, batch_length(batch) or 0)
        batch = self.to_device(batch)
        for begin in self.plan.step.beginnings:
            begin()
        return self.runner.step(batch)

    def to_device(self, batch: Any) -> Any:
        """Move a batch to the device and apply the batch transforms."""
        if self.device.type != "cpu":
            batch = moved(batch, self.device, non_blocking=self.plan.loader.pin_memory)
        batch = self.workload.batch_transform(batch)
        for transform in self.plan.batch:
            batch = transform(batch)
        return self.layout.shared_batch(batch)

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch that is on the device, in the plan's precision."""
        with forward_contexts(self.plan, self.device, cache_casts=self.runner.cache_casts):
            loss = self.workload.loss(self.model, batch)
            self.formats.look(loss, self.device)
            return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients, scaled where the plan has a loss scaler."""
        with ExitStack() as stack:
            for context in self.plan.step.contexts:
                stack.enter_context(context())
            (self.scaler.scale(loss) if self.scaler else loss).backward()

    def update(self) -> None:
        """Clip, update, clear the gradients and step the scheduler."""
        self.finish_gradients()
        if self.on_gradients:
            self.on_gradients(self.gradients())
        self.clip()
        stepped = self._step_optimizer()
        self.optimizer.zero_grad(set_to_none=True)
        self.after_update()
        if self.scheduler is not None and stepped:
            self.scheduler.step()

    # --- what a step consists of --------------------------------------------------------------

    def finish_gradients(self) -> None:
        """Transfer the gradients to the parameters that the optimizer updates, and unscale them."""
        for hook in self.hooks:
            hook.finish_gradients()
        self.layout.finish_gradients(self.parameters())
        if self.scaler:
            self.scaler.unscale_(self.optimizer)

    def after_update(self) -> None:
        for hook in self.hooks:
            hook.after_update(self.parameters())

    def hook_of(self, kind: type[_T]) -> _T | None:
        """Return the job's hook of this class, or None if the job has no such hook."""
        return next((hook for hook in self.hooks if isinstance(hook, kind)), None)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each gradient with the user's name of its parameter. Call this between `finish_gradients` and the
        update.
        """
        own = self.layout.gradients_by_parameter()
        for name, parameter in self.updated_parameters():
            gradient = own.get(parameter, parameter.grad)
            if gradient is not None:
                yield name, gradient

    def named_groups(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Yield the optimizer's groups, each with the user's names of its parameters."""
        names = {parameter: name for name, parameter in self.updated_parameters()}
        groups = self.optimizer.param_groups
        for parameters, group in zip(self.layout.groups(self.optimizer), groups, strict=True):
            yield [names[parameter] for parameter in parameters if parameter in names], group

    def gradient_norm(self, gradients: list[torch.Tensor]) -> float:
        """Return the norm of the whole model's gradients; if ranks hold only parts of the gradients, every rank must
        call this.
        """
        return self.layout.norm(self.parameters(), gradients)

    def parameters(self) -> list[Any]:
        """Return the parameters that the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def clip(self) -> None:
        """Clip the gradients to the workload's norm, if the workload has one."""
        if self.workload.max_grad_norm is not None and not any(hook.has_clipped for hook in self.hooks):
            self.layout.clip(self.parameters(), self.workload.max_grad_norm)

    @property
    def steps_per_round(self) -> int:
        """Minimum number of consecutive steps that together include every kind of work that a step may do."""
        return max((hook.steps_per_round for hook in self.hooks), default=1)

    @property
    def samples_per_step(self) -> int | None:
        """Number of samples of the largest step so far, over all ranks; None before the first step, and if the batches
        cannot be counted.
        """
        return self._samples * self._world_size() or None

    @property
    def samples_drawn(self) -> int | None:
        """Number of samples that the loader puts into a batch, for all ranks; None if the loader's sampling has no
        batch size.
        """
        sampler = getattr(self.loader, "batch_sampler", None)
        order = getattr(sampler, "batches", None)
        if order:
            return len(order[0])
        size = getattr(sampler, "batch_size", None) or getattr(self.loader, "batch_size", None)
        return None if size is None else int(size) * self._world_size()

    def _world_size(self) -> int:
        import torch.distributed as dist

        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def rate_factors(self) -> tuple[float, ...] | None:
        """Ratio of each group's initial learning rate to the user's; None if a scheduler changes rates without
        recording the initial ones.
        """
        groups = self.optimizer.param_groups
        known = self.scheduler is None or all("initial_lr" in group for group in groups)
        if self._user_rates is None or not known:
            return None
        rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
        return tuple(rate / own for rate, own in zip(rates, self._user_rates, strict=True) if own)

    # --- state --------------------------------------------------------------------------------

    @property
    def skipped_steps(self) -> int:
        """Number of updates that the loss scaler skipped so far, counted on the device; reading this number waits for
        the device.
        """
        return int(self._skipped_steps) + self.runner.skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._skipped_steps = count - self.runner.skipped_steps

    @property
    def loss_scale(self) -> float | None:
        """Scale of the loss, or None without a scaler; reading it waits for the device."""
        return self.scaler.get_scale() if self.scaler else None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the model's state under the user's own key names, in the precision in which it is updated.

        Where ranks hold parts of it, or differ for some steps, every rank must call it, and gets the whole state, or
        the ranks' average.
        """
        model = unwrapped(self.model)
        state = self.layout.state(model)
        for hook in reversed(self.hooks):
            state = hook.state(state, model)
        return state

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in the form in which the user's own optimizer would return it, however the job
        runs the update.

        It has one entry per parameter, the flags of the user's own implementation, step counts on the CPU, and tensors
        in the layout of the user's parameters.

        Where it is sharded across ranks, or differs by rank, every rank must call it, and gets the whole state.
        """
        self.runner.settle()
        state = self.layout.optimizer_state(self.optimizer)
        for hook in reversed(self.hooks):
            state = hook.optimizer_state(state, self.optimizer)
        return self._as_users(*self.layout.whole_optimizer_state(state, self.optimizer, self._optimizer_names))

    def load_optimizer_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an optimizer state from `optimizer_state_dict`, or from the user's own optimizer.

        It may come from a job with other settings. The job's own implementation of the update stays in use.

        Raises:
            WorkloadRejectedError: The state dict has another number of groups.
        """
        self.runner.settle()
        groups = self.optimizer.param_groups
        if len(state_dict["param_groups"]) != len(groups):
            raise WorkloadRejectedError(
                f"the saved optimizer state has {len(state_dict['param_groups'])} parameter groups, but the "
                f"optimizer has {len(groups)}: load the state into an optimizer with the same groups"
            )
        state = self.layout.own_optimizer_state(state_dict, self.optimizer)
        state = in_layouts(state, layouts_of([p for group in groups for p in group["params"]]))
        self.optimizer.load_state_dict(with_flags(state, [implementation_flags(group) for group in groups]))
        for hook in self.hooks:
            hook.optimizer_loaded(self.optimizer)

    def rank_state_dict(self) -> dict[str, Any]:
        """Return the state that a hook keeps for later steps on this rank only; empty where nothing is kept.

        Save it for each rank, in addition to the model's and the optimizer's state, which do not include it.
        """
        keeper = self._keeper()
        kept = {} if keeper is None else keeper.kept(self._names())
        return {**self._place(), "kept": kept} if kept else {}

    def load_rank_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `rank_state_dict` from the same rank of a job with the same number of ranks; load the
        optimizer's state first.

        Raises:
            WorkloadRejectedError: The state belongs to another rank, or to other settings.
        """
        own = self._place()
        for name, value in own.items() if state_dict else ():
            if state_dict.get(name) != value:
                raise WorkloadRejectedError(
                    f"the saved state of this rank has {name} {state_dict.get(name)!r}, but this job has "
                    f"{value!r}: load each rank's own state with the same settings and number of ranks, or do not "
                    "load it"
                )
        keeper = self._keeper()
        if keeper is not None and state_dict:
            keeper.keep(state_dict["kept"], self._names())

    def updated_parameters(self) -> Sequence[tuple[str, torch.nn.Parameter]]:
        """Return names and values of the parameters that the optimizer updates, in the form in which this rank holds
        them.
        """
        named: Named = [(name, p) for name, p in unwrapped(self.model).named_parameters() if p.requires_grad]
        for hook in self.hooks:
            named = hook.updated(named)
        return named

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and whole value of each updated parameter; every rank must iterate over all of them."""
        return self.layout.whole_parameters(unwrapped(self.model), self.updated_parameters())

    def parameters_set(self) -> None:
        """Notify the hooks that the model's parameters were set from outside."""
        for hook in self.hooks:
            hook.parameters_set()

    # --- pieces -------------------------------------------------------------------------------

    def _as_users(self, state: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Return an optimizer's whole state with the flags and layouts of the user's own optimizer."""
        layouts = {number: self._user_layouts[name] for number, name in enumerate(names) if name in self._user_layouts}
        return with_flags(in_layouts(state, layouts), self._user_flags)

    def _names(self) -> dict[Any, str]:
        return {parameter: name for name, parameter in unwrapped(self.model).named_parameters()}

    def _keeper(self) -> StepHook | None:
        return next((hook for hook in self.hooks if hook.method), None)

    def _place(self) -> dict[str, Any]:
        """Return what identifies the owner of a rank's state: method, settings, rank and number of ranks."""
        import torch.distributed as dist

        keeper = self._keeper()
        several = dist.is_available() and dist.is_initialized()
        return {
            "method": None if keeper is None else keeper.method,
            "settings": {} if keeper is None else keeper.settings,
            "rank": dist.get_rank() if several else 0,
            "num_ranks": dist.get_world_size() if several else 1,
        }

    def _step_optimizer(self) -> bool:
        """Run the optimizer's update; return whether the scheduler may step.

        Without a scheduler the device is not waited for, and a skipped update returns True too.
        """
        if self.scaler is None:
            self.optimizer.step()
            return True
        found = sum(self.scaler._found_inf_per_device(self.optimizer).values())
        is_first = not any(self.optimizer.state.values())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if is_first and any(self.optimizer.state.values()) and bool(found):
            self.optimizer.state.clear()  # a skipped first update of fused SGD leaves momentum that nobody has written
        self._skipped_steps = self._skipped_steps + (found > 0)
        return self.scheduler is None or not bool(found)  # else the device need not be waited for


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's own module inside a data-parallel wrapper, or the model itself."""
    return model.module if hasattr(model, "module") and hasattr(model, "no_sync") else model  # type: ignore[return-value]
