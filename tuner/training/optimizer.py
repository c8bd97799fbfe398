"""The optimizer of a job: the user's own, as the plan wants it run."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from tuner.training.captured_step import make_capturable
from tuner.training.flat_parameters import FlatParameters
from tuner.training.sharding import zero_redundancy

if TYPE_CHECKING:
    import torch

    from tuner.training.plan import OptimizerArguments, Plan
    from tuner.workloads.workload import NamedParameters, Workload


def build_optimizer(
    workload: Workload, named: NamedParameters, plan: Plan, device: torch.device
) -> tuple[torch.optim.Optimizer, FlatParameters | None]:
    """Another algorithm first, then how it runs, then the buffers that it runs over, its rates, and what ranks share.

    Returns:
        The optimizer, and the buffers where the plan has them.
    """
    arguments = plan.optimizer
    optimizer = workload.optimizer(named)
    if arguments.algorithm is not None:
        from tuner.training.optimizers.exchange import exchanged

        optimizer = exchanged(optimizer, arguments.algorithm, workload.learning_rates.get(arguments.algorithm))
    flags = _flags(arguments)
    if flags:
        optimizer = _rebuilt(optimizer, optimizer.param_groups, flags)
    flat = FlatParameters(optimizer) if arguments.contiguous else None
    if flat is not None:
        optimizer = _rebuilt(optimizer, flat.groups, {})
    for group in optimizer.param_groups:
        if arguments.rate_factor != 1.0:
            group["lr"] = group["lr"] * arguments.rate_factor
    if arguments.capturable:
        make_capturable(optimizer, device)
    if plan.wrap.shards_optimizer:
        optimizer = zero_redundancy(optimizer)
    return optimizer, flat


def _flags(arguments: OptimizerArguments) -> dict[str, bool]:
    """Source: https://docs.pytorch.org/docs/stable/optim.html ("for-loop, foreach and fused")."""
    name = arguments.implementation
    return {} if name is None else {"foreach": name == "foreach", "fused": name == "fused"}


def _rebuilt(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], flags: dict[str, bool]
) -> torch.optim.Optimizer:
    """The same class with the same options, over these groups, with other flags."""
    arguments = inspect.signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in {**optimizer.defaults, **flags}.items() if name in arguments}
    return type(optimizer)([{**group, **flags} for group in groups], **options)
