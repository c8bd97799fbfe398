"""Optimizer of a job: the user's own, run as the plan asks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.training.captured_step import make_capturable
from steptune.tuner.training.flat_parameters import FlatParameters
from steptune.tuner.training.layouts import in_layouts, is_dense, laid_out_like, layouts_of
from steptune.tuner.training.optimizer_state import implementation_flags
from steptune.tuner.training.sharding import zero_redundancy

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.plan import Plan
    from steptune.tuner.workloads.workload import NamedParameters, Workload


@dataclass(frozen=True, kw_only=True)
class BuiltOptimizer:
    """An optimizer built for a plan, with the user's settings that the plan replaced.

    Attributes:
        flat: The buffers that it runs over, or None.
        user_flags: Implementation flags of each group without the plan, which checkpoints contain.
        names: The user's names of the parameters, in the order of the user's optimizer.
        user_rates: Learning rate of each group without the plan's factor; None where a group has none.
    """

    optimizer: torch.optim.Optimizer
    flat: FlatParameters | None
    user_flags: list[dict[str, Any]]
    names: list[str]
    user_rates: list[float] | None


def build_optimizer(workload: Workload, named: NamedParameters, plan: Plan, device: torch.device) -> BuiltOptimizer:
    """Build the optimizer as the plan requests, in this order: replacing algorithm, implementation, contiguous buffers,
    learning rates, sharding of states.

    Raises:
        UnsupportedError: The optimizer has to be rebuilt but has state that would be lost, or it lacks the
            implementation.
    """
    arguments = plan.optimizer
    optimizer = _with_algorithm(workload, named, plan)
    user_flags = [implementation_flags(group) for group in optimizer.param_groups]
    name_of = {id(parameter): name for name, parameter in named}
    names = [name_of.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]
    flags = _flags(optimizer, arguments.implementation)
    if flags:
        optimizer = _rebuilt(optimizer, optimizer.param_groups, flags)
    flat = FlatParameters(optimizer) if arguments.contiguous else None
    if flat is not None:
        optimizer = _rebuilt(optimizer, flat.buffer_groups, {})
    if arguments.implementation == "fused":
        _check_dense(optimizer)
    rated = all("lr" in group for group in optimizer.param_groups)
    user_rates = [float(group["lr"]) for group in optimizer.param_groups] if rated else None
    if arguments.rate_factor != 1.0:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * arguments.rate_factor
    if arguments.capturable:
        make_capturable(optimizer, device)
    for kernel in arguments.kernels:
        _use_kernel(optimizer, kernel, plan)
    if plan.wrap.shards_optimizer:
        optimizer = zero_redundancy(optimizer)
    else:
        optimizer.register_load_state_dict_pre_hook(_lay_out_loaded)
    if arguments.implementation == "fused" and workload.has_custom_step:
        optimizer.register_step_pre_hook(_lay_out_gradients)  # elsewhere autograd does that
    return BuiltOptimizer(optimizer=optimizer, flat=flat, user_flags=user_flags, names=names, user_rates=user_rates)


def _with_algorithm(workload: Workload, named: NamedParameters, plan: Plan) -> torch.optim.Optimizer:
    """Return the user's optimizer, or its replacement if the plan names another algorithm."""
    arguments = plan.optimizer
    optimizer = workload.optimizer(named)
    again = arguments.algorithm is not None or arguments.implementation is not None or arguments.contiguous
    if again or plan.wrap.shards_optimizer:
        _check_new(optimizer)
    if arguments.algorithm is not None or arguments.rate_factor != 1.0:
        _check_has_rates(optimizer)
    if arguments.algorithm is None:
        return optimizer
    from steptune.tuner.training.optimizers.exchange import exchanged

    return exchanged(optimizer, arguments.algorithm, workload.learning_rates.get(arguments.algorithm))


def check_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float], scheduler: Any) -> None:
    """Refuse a scheduler that ignores the plan's change of the learning rates.

    Args:
        rates: Rate of each group before the scheduler was created, which stores it as `initial_lr`.

    Raises:
        UnsupportedError: The scheduler would not use the plan's rates.
    """
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        first = float(group.get("initial_lr", rate))
        if first != rate:
            raise UnsupportedError(
                f"{type(scheduler).__name__} starts with its own learning rate, {first:g}, instead of the "
                f"optimizer's, {rate:g}, so Steptune cannot change the learning rate: compute the scheduler's "
                "rates from the optimizer's groups, or leave the learning rate unchanged (larger_global_batch: "
                "rule none)"
            )


def _use_kernel(optimizer: torch.optim.Optimizer, name: str, plan: Plan) -> None:
    from steptune.kernels.applying import use_kernel_in_optimizer

    arguments, wrap = plan.optimizer, plan.wrap
    for is_there, what in (
        (
            wrap.shards_optimizer or wrap.shards_parameters or wrap.mesh is not None,
            "an optimizer that is sharded across ranks",
        ),
        (arguments.capturable, "a CUDA graph of the step"),
        (arguments.contiguous, "contiguous parameters, which lose per-parameter norms"),
    ):
        if is_there:
            raise UnsupportedError(f"fused_kernels: {name} does not support {what}")
    try:
        use_kernel_in_optimizer(optimizer, name)
    except ValueError as reason:
        raise UnsupportedError(f"fused_kernels: {reason}") from reason


def _check_has_rates(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        if "lr" not in group:
            held = ", ".join(key for key in group if key != "params")
            raise UnsupportedError(
                f"{type(optimizer).__name__} has a parameter group without lr (it has: {held}), so its learning "
                "rate can be neither scaled nor passed to another optimizer: name the learning rate lr, or leave "
                "out optimizer_algorithm and larger_global_batch"
            )


def _check_new(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer with state or hooks, which would be lost when it is built again."""
    hooks = sorted(name for name, value in vars(optimizer).items() if name.endswith("_hooks") and value)
    # Adagrad makes its state when it is made, at step 0.
    stepped = [values for values in optimizer.state.values() if values and float(values.get("step", 1))]
    lost = [f"state of {len(stepped)} parameters"] if stepped else []
    lost += [f"hooks ({', '.join(hooks)})"] if hooks else []
    if lost:
        raise UnsupportedError(
            f"Workload.optimizer returns {type(optimizer).__name__} with {' and '.join(lost)}, which would be "
            "lost when Steptune rebuilds the optimizer: return a newly constructed optimizer, and load its state "
            "with load_optimizer_state_dict"
        )


def _flags(optimizer: torch.optim.Optimizer, implementation: str | None) -> dict[str, bool]:
    """Return the flags that select an implementation, as documented at https://docs.pytorch.org/docs/stable/optim.html
    ("for-loop, foreach and fused").
    """
    if implementation is None:
        return {}
    offered = inspect.signature(type(optimizer).__init__).parameters
    if implementation != "for_loop" and implementation not in offered:
        raise UnsupportedError(
            f"{type(optimizer).__name__} has no {implementation} implementation: leave out optimizer_implementation"
        )
    return {name: name == implementation for name in ("foreach", "fused") if name in offered}


def _check_dense(optimizer: torch.optim.Optimizer) -> None:
    """Refuse parameters with gaps between their elements in memory; a fused update would not skip the gaps."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if not hasattr(parameter, "to_local") and not is_dense(parameter):
            raise UnsupportedError(
                "a fused update requires parameters without gaps in memory, got one of shape "
                f"{tuple(parameter.shape)} with strides {tuple(parameter.stride())}: copy it (parameter.data = "
                "parameter.data.clone()), or leave out optimizer_implementation"
            )


def _lay_out_loaded(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert a loaded state to the layouts of the optimizer's parameters."""
    return in_layouts(state_dict, layouts_of(p for group in optimizer.param_groups for p in group["params"]))


def _lay_out_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Convert gradients to their parameters' layouts, after a step defined by the workload has computed them."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is not None:
            parameter.grad = laid_out_like(parameter.grad, parameter)


def _rebuilt(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], flags: dict[str, bool]
) -> torch.optim.Optimizer:
    """Rebuild an optimizer with the same class and options, over these groups, with other flags."""
    arguments = inspect.signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in {**optimizer.defaults, **flags}.items() if name in arguments}
    return type(optimizer)([{**group, **flags} for group in groups], **options)
