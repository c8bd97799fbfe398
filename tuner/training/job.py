"""The assembled training: what a trial measures and what `steptune.apply` gives to a user's script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.training.communication import compression_of, local_sgd_of, momentum_of
from steptune.tuner.training.forward_contexts import forward_contexts
from steptune.tuner.training.layouts import Layout, in_layouts, layouts_of
from steptune.tuner.training.micro_batch import batch_length
from steptune.tuner.training.optimizer_state import implementation_flags, with_flags
from steptune.tuner.training.seen_formats import SeenFormats
from steptune.tuner.training.sharding import consolidated, laid_out, whole
from steptune.tuner.training.structure import moved

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.flat_parameters import FlatParameters
    from steptune.tuner.training.ignored_parameters import IgnoredParameters
    from steptune.tuner.training.master_weights import MasterWeights
    from steptune.tuner.training.mesh.mesh import Mesh
    from steptune.tuner.training.plan import Plan
    from steptune.tuner.training.step_runner import StepRunner
    from steptune.tuner.workloads.workload import Workload


class TrainingJob:
    """A model, its optimizer and its loader, and the step that the plan asks for.

    Attributes:
        model: The user's model, transformed and wrapped.
        optimizer: The user's optimizer (over FP32 masters or contiguous buffers where the plan has them).
        loader: Iterable over batches.
        masters: FP32 copies of 16-bit parameters, where the plan has them.
        ignored: Parameters that sharding leaves out, where the plan has them.
        scaler: Of the loss, where the plan has one.
        mesh: What lays the model over several ranks, where the plan has that.
        runner: How a step is run.
        local_sgd: What makes ranks step alone, where the plan has it.
        formats: What was seen of the number formats of its products.
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
        masters: MasterWeights | None,
        loader: Any,
        make_runner: Callable[[TrainingJob], StepRunner],
        flat: FlatParameters | None = None,
        ignored: IgnoredParameters | None = None,
        user_flags: Sequence[Mapping[str, Any]] | None = None,
        user_layouts: Mapping[str, Layout] | None = None,
        names: Sequence[str] = (),
        user_rates: Sequence[float] | None = None,
        mesh: Mesh | None = None,
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
        self.masters = masters
        self.mesh = mesh
        self.scaler = torch.amp.GradScaler(device.type) if plan.step.loss_scaler else None
        self.formats = SeenFormats()
        self._flat = flat
        self.ignored = ignored
        self._user_flags = user_flags or [implementation_flags(group) for group in optimizer.param_groups]
        self._user_layouts = user_layouts or {}
        self._optimizer_names = names
        self._user_rates = user_rates
        self._samples = 0
        self.local_sgd = local_sgd_of(model)
        self._skipped_steps: Any = 0
        """A number, or a tensor on the device."""
        self.runner = make_runner(self)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    @property
    def scheduler(self) -> Any:
        """The user's scheduler or None, after every step that was due."""
        self.runner.settle()
        return self._scheduler

    # --- one step -----------------------------------------------------------------------------

    def step(self, batch: Any) -> torch.Tensor:
        """One update from one batch as the loader gives it.

        Returns:
            The loss, detached, still on the device (reading it synchronises).
        """
        self._samples = max(self._samples, batch_length(batch) or 0)
        batch = self.to_device(batch)
        for begin in self.plan.step.beginnings:
            begin()
        return self.runner.step(batch)

    def to_device(self, batch: Any) -> Any:
        """Moves a batch to the device and applies the batch transforms."""
        if self.device.type != "cpu":
            batch = moved(batch, self.device, non_blocking=self.plan.loader.pin_memory)
        batch = self.workload.batch_transform(batch)
        for transform in self.plan.batch:
            batch = transform(batch)
        return self.mesh.gathered(batch) if self.mesh else batch

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of a batch that is on the device, in the plan's precision."""
        with forward_contexts(self.plan, self.device, cache_casts=self.runner.cache_casts):
            loss = self.workload.loss(self.model, batch)
            self.formats.look(loss, self.device)
            return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates gradients, scaled where the plan has a loss scaler."""
        with ExitStack() as stack:
            for context in self.plan.step.contexts:
                stack.enter_context(context())
            (self.scaler.scale(loss) if self.scaler else loss).backward()

    def update(self) -> None:
        """Clips, updates, clears the gradients and steps the scheduler."""
        self.finish_gradients()
        if self.on_gradients:
            self.on_gradients(self.gradients())
        self.clip()
        stepped = self._step_optimizer()
        self.optimizer.zero_grad(set_to_none=True)
        if self.local_sgd:
            self.local_sgd.stepped(self.parameters())
        if self.masters:
            self.masters.write_back()
        if self.scheduler is not None and stepped:
            self.scheduler.step()

    # --- what a step consists of --------------------------------------------------------------

    def finish_gradients(self) -> None:
        """Brings gradients to the parameters that the optimizer updates, in their own scale."""
        if self.mesh:
            self.mesh.finish_gradients(self.parameters())
        if self.ignored:
            self.ignored.take_gradients()
        if self.masters:
            self.masters.take_gradients()
        if self._flat:
            self._flat.take_gradients()
        if self.scaler:
            self.scaler.unscale_(self.optimizer)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gradients by the user's name of the parameter, between `finish_gradients` and the update."""
        own = self._flat.gradients_by_parameter() if self._flat else {}
        for name, parameter in self.master_parameters():
            gradient = own.get(parameter, parameter.grad)
            if gradient is not None:
                yield name, gradient

    def named_groups(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Groups of the optimizer, each with the user's names of its parameters."""
        names = {parameter: name for name, parameter in self.master_parameters()}
        groups = self.optimizer.param_groups
        held = self._flat.order if self._flat else [group["params"] for group in groups]
        for parameters, group in zip(held, groups, strict=True):
            yield [names[parameter] for parameter in parameters if parameter in names], group

    def gradient_norm(self, gradients: list[torch.Tensor]) -> float:
        """Norm of the whole model's gradients; where ranks have parts of them, every rank calls it.

        Summed in FP64: a CPU's FP32 sum of millions of squares is 0.1 % off, and otherwise where they lie otherwise.
        """
        import torch

        if self.mesh:
            return float(self.mesh.total_norm(self.parameters(), torch.float64))
        if not gradients:
            return 0.0
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        return float(whole(torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))))

    def parameters(self) -> list[Any]:
        """Parameters that the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def clip(self) -> None:
        """Clips the gradients to the workload's norm, where it has one."""
        compression = self.plan.wrap.compression
        if compression is not None and compression.method == "dgc":
            return  # it clipped before it sent
        if self.workload.max_grad_norm is not None:
            if self.mesh:
                self.mesh.clip(self.parameters(), self.workload.max_grad_norm)
                return
            import torch

            gradients = self._flat.gradients() if self._flat else self.gradients()
            norm = torch.nn.utils.get_total_norm(gradients)
            torch.nn.utils.clip_grads_with_norm_(self.parameters(), self.workload.max_grad_norm, norm)

    @property
    def steps_per_round(self) -> int:
        """After so many steps everything that a step does was done: not every one averages the models of ranks."""
        return self.local_sgd.every if self.local_sgd else 1

    @property
    def samples_per_step(self) -> int | None:
        """Samples of the largest step so far, over all ranks; None before the first, and for batches that cannot be
        counted.
        """
        return self._samples * self._world_size() or None

    @property
    def samples_drawn(self) -> int | None:
        """Samples that the loader puts into a batch, for all ranks; None where its sampling does not say."""
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
        """Factor by which the learning rate of each group began larger than the user's; None where a scheduler changes
        rates and does not say what it began with.
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
        """Updates that the loss scaler skipped so far, counted on the device: reading the number waits for it."""
        return int(self._skipped_steps) + self.runner.skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._skipped_steps = count - self.runner.skipped_steps

    @property
    def loss_scale(self) -> float | None:
        """Scale of the loss, or None without a scaler; reading it waits for the device."""
        return self.scaler.get_scale() if self.scaler else None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state under the user's own key names, masters in FP32 where there are any.

        Where parameters are laid over ranks, or are each rank's own for a while, every rank calls it and gets all of
        them, whole, or their averages.
        """
        if self.mesh:
            return self.mesh.whole_state(unwrapped(self.model))
        state: dict[str, torch.Tensor] = whole(dict(unwrapped(self.model).state_dict()))
        if self.masters:
            state.update(self.masters.state_of(unwrapped(self.model)))
        return self.local_sgd.averaged(state) if self.local_sgd else state

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's state as the user's own optimizer has it: one entry a parameter, the flags of the user's own
        implementation, step counts on the CPU, tensors in the layout of the user's own parameters, whatever it runs
        over and however.

        Where it is laid over ranks, or is each rank's own, every rank calls it and gets all of it, whole.
        """
        self.runner.settle()
        if self.plan.wrap.shards_optimizer:
            return self._as_users(consolidated(self.optimizer), self._optimizer_names)
        if self.mesh:
            return self._as_users(*self.mesh.whole_optimizer_state(self.optimizer))
        state = self.optimizer.state_dict()
        momentum = momentum_of(self.model)
        if momentum is not None:
            state = momentum.give_momentum(state, self.optimizer)
        if self.local_sgd:
            state = self.local_sgd.averaged_optimizer(state)
        return self._as_users(self._flat.split(state) if self._flat else whole(state), self._optimizer_names)

    def load_optimizer_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `optimizer_state_dict` gave, here or in a job of other settings, or a state dict of the user's own
        optimizer. It runs on as it does here.

        Raises:
            WorkloadRejectedError: It has another number of groups.
        """
        self.runner.settle()
        groups = self.optimizer.param_groups
        if len(state_dict["param_groups"]) != len(groups):
            raise WorkloadRejectedError(
                f"the optimizer's state has {len(state_dict['param_groups'])} groups, and the optimizer {len(groups)}: "
                "load it into one with the same groups"
            )
        if self.mesh:
            state = self.mesh.own_optimizer_state(state_dict, self.optimizer)
        else:
            state = self._flat.join(state_dict) if self._flat else laid_out(state_dict, self.parameters())
        state = in_layouts(state, layouts_of([p for group in groups for p in group["params"]]))
        self.optimizer.load_state_dict(with_flags(state, [implementation_flags(group) for group in groups]))
        momentum = momentum_of(self.model)
        if momentum is not None:
            momentum.take_momentum(self.optimizer)

    def rank_state_dict(self) -> dict[str, Any]:
        """State that this rank keeps for later reductions of gradients, and no other rank has: what compression has not
        sent yet, and the momentum of `dgc`; of `local_sgd` the count of steps. Empty where nothing is kept.

        Save it for each rank beside the model's and the optimizer's state, which have nothing of it.
        """
        keeper = self._keeper()
        kept = {} if keeper is None else keeper.kept(self._names())
        return {**self._place(), "kept": kept} if kept else {}

    def load_rank_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what `rank_state_dict` gave on this rank of a job with as many; after the optimizer's state.

        Raises:
            WorkloadRejectedError: It is of another rank, or of other settings.
        """
        own = self._place()
        for name, value in own.items() if state_dict else ():
            if state_dict.get(name) != value:
                raise WorkloadRejectedError(
                    f"the state of a rank has {name} {state_dict.get(name)!r}, and this job {value!r}: give every rank "
                    "its own, on as many ranks with the same settings, or do not load it"
                )
        keeper = self._keeper()
        if keeper is not None and state_dict:
            keeper.keep(state_dict["kept"], self._names())

    def master_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Name and value of what the optimizer updates."""
        if self.masters:
            return self.masters.named()
        return [(name, p) for name, p in unwrapped(self.model).named_parameters() if p.requires_grad]

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole value of what is updated, one after the other; every rank goes through all of them."""
        if self.mesh:
            yield from self.mesh.whole_parameters(unwrapped(self.model))
            return
        for name, parameter in self.master_parameters():
            yield name, whole(parameter.detach())

    def reload_masters(self) -> None:
        """Takes the masters anew from the model's parameters, after those were set from outside."""
        if self.masters:
            self.masters.reload()

    # --- pieces -------------------------------------------------------------------------------

    def _as_users(self, state: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """An optimizer's whole state with the flags and in the layouts of the user's own."""
        layouts = {number: self._user_layouts[name] for number, name in enumerate(names) if name in self._user_layouts}
        return with_flags(in_layouts(state, layouts), self._user_flags)

    def _names(self) -> dict[Any, str]:
        return {parameter: name for name, parameter in unwrapped(self.model).named_parameters()}

    def _keeper(self) -> Any:
        """Object that keeps something from step to step beside the optimizer, or None."""
        return self.local_sgd or compression_of(self.model)

    def _place(self) -> dict[str, Any]:
        """Whose a rank's state is."""
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
        """Say whether the update was made. Where nothing depends on it at once, the device is not waited for."""
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
    """The user's own module under a data-parallel wrapper."""
    return model.module if hasattr(model, "module") and hasattr(model, "no_sync") else model  # type: ignore[return-value]
