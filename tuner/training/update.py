"""Update of a job's parameters by the user's optimizer, changed as the plan requests, and by the user's scheduler."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.training.communication import attach as attach_hook
from steptune.tuner.training.communication import step_hook_of
from steptune.tuner.training.job import unwrapped
from steptune.tuner.training.master_weights import MasterWeights
from steptune.tuner.training.optimizer import BuiltOptimizer, build_optimizer, check_rates
from steptune.tuner.training.parameter_layout import ParameterLayout
from steptune.tuner.training.sharded_layout import ShardedOptimizerStates, ShardedParameters

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.plan import Plan
    from steptune.tuner.training.step_hook import Named, StepHook
    from steptune.tuner.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Update:
    """Update of a job's parameters by its optimizer and scheduler.

    Attributes:
        scheduler: The user's scheduler, or None.
        layout: Layout of the parameters that the optimizer updates.
        hooks: Techniques that take part in a step, in the order of an update.
    """

    built: BuiltOptimizer
    scheduler: Any
    layout: ParameterLayout
    hooks: tuple[StepHook, ...]


def build_update(
    model: torch.nn.Module, workload: Workload, plan: Plan, device: torch.device, layout: ParameterLayout | None = None
) -> Update:
    """Build the update over the parameters of a wrapped model.

    DDP's communication hook is attached afterwards, because it may read the optimizer.

    Args:
        layout: Layout that wrapping has given to the parameters; None where it has not changed theirs.

    Raises:
        WorkloadRejectedError: No parameter is trained; the optimizer's or scheduler's step needs arguments.
        UnsupportedError: The user's optimizer or scheduler cannot be run as the plan requires.
    """
    from torch.nn.parallel import DistributedDataParallel

    from steptune.tuner.training.ignored_parameters import IgnoredParameters

    named: Named = [(name, p) for name, p in unwrapped(model).named_parameters() if p.requires_grad]
    if not named:
        raise WorkloadRejectedError(f"{type(workload).__name__}.model() has no parameter that requires a gradient")
    hooks: list[StepHook] = []
    if plan.wrap.ignores_parameters:
        hooks.append(IgnoredParameters(named))
        named = hooks[-1].updated(named)
    masters = MasterWeights(named) if plan.optimizer.master_weights else None
    built = build_optimizer(workload, masters.updated(named) if masters else named, plan, device)
    if masters:
        masters.check(built.optimizer)
    scheduler = _scheduler(built.optimizer, workload, plan)
    if not workload.has_custom_step:
        _check_step(built.optimizer, "once after every backward pass")
        _check_step(scheduler, "after every update")
    if isinstance(model, DistributedDataParallel):
        attach_hook(model, built.optimizer, scheduler, plan.wrap, workload.max_grad_norm)
    # Models are averaged before their masters are rounded back.
    hooks += [hook for hook in (step_hook_of(model), masters) if hook is not None]
    return Update(built=built, scheduler=scheduler, layout=layout or built.flat or _layout_of(plan), hooks=tuple(hooks))


def _layout_of(plan: Plan) -> ParameterLayout:
    if plan.wrap.shards_parameters:
        assert plan.wrap.sharding is not None
        return ShardedParameters(reduce_each=plan.wrap.sharding.reduce_each)
    return ShardedOptimizerStates() if plan.wrap.shards_optimizer else ParameterLayout()


def _scheduler(optimizer: torch.optim.Optimizer, workload: Workload, plan: Plan) -> Any:
    """Build the scheduler. If the plan has changed the learning rates, refuse a scheduler that ignores the change."""
    if plan.optimizer.rate_factor == 1.0 and plan.optimizer.algorithm not in workload.learning_rates:
        return workload.scheduler(optimizer)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    scheduler = workload.scheduler(optimizer)
    check_rates(optimizer, rates, scheduler)
    return scheduler


def _check_step(subject: Any, when: str) -> None:
    """Refuse an optimizer, or a scheduler if there is one, with a `step` that needs arguments.

    Torch's schedulers wrap the optimizer's `step`, which then shows `self`.
    """
    if subject is None:
        return
    parameters = inspect.signature(subject.step).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variadic]
    wanted = [name for name in needed if name != "self"]
    if wanted:
        raise WorkloadRejectedError(
            f"{type(subject).__name__}.step requires the arguments {', '.join(wanted)}, but Steptune calls it "
            f"{when} without arguments: return an optimizer or scheduler whose step requires none, or define "
            "training_step and pass the arguments there"
        )
