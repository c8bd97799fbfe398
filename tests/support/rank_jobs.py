"""Training jobs that ranks run in tests on a CPU, and what they show. See `ranks.Ranks.run`."""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from steptune.tuner.emulation import HOSTS_VARIABLE
from steptune.tuner.records import Choice
from steptune.tuner.strategies import STRATEGIES
from steptune.tuner.strategies.combine import make_plan
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.trials.rank_device import rank_device
from steptune.tuner.workloads.batches import EndlessBatches, draw_batches
from steptune.tuner.workloads.workload import Workload

DEFAULTS: dict[str, Choice] = {s.name: dict(s.defaults) for s in STRATEGIES}


_ALONE: dict[tuple[Callable[[], Workload], str, int], Trained] = {}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Outcome of a few steps on one rank.

    Attributes:
        losses: Of every step, averaged over the ranks.
        state: Of the model at the end, under the user's key names.
        evidence: Of every strategy.
        effects: Whether each choice took effect.
    """

    losses: list[float]
    state: dict[str, torch.Tensor]
    evidence: dict[str, dict[str, Any]]
    effects: dict[str, tuple[bool, str]]


def complete(choices: Mapping[str, Choice]) -> dict[str, Choice]:
    return {name: {**defaults, **choices.get(name, {})} for name, defaults in DEFAULTS.items()}


def device_of(rank: int) -> torch.device:
    """Device of the rank's group, the CPU without one."""
    on_device = dist.is_initialized() and "cuda:nccl" in distributed_c10d.get_backend_config()
    return rank_device("cuda" if on_device else "cpu", rank)


def build(rank: int, workload: Workload, choices: Mapping[str, Choice]) -> TrainingJob:
    """Alone where there is no group; the model is the same on all ranks, which share every batch."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    order = draw_batches(workload, workload.dataset(), seed=0, limit=32)
    torch.manual_seed(0)
    return assemble(
        workload,
        make_plan(complete(choices)),
        device=device_of(rank),
        rank=rank,
        num_ranks=num_ranks,
        batch_sampler=EndlessBatches(order, rank, num_ranks),
    )


def train(
    rank: int, make_workload: Callable[[], Workload], choices: Mapping[str, Choice], num_steps: int = 20
) -> Trained:
    job = build(rank, make_workload(), choices)
    losses = torch.stack([job.step(batch) for batch in itertools.islice(job.loader, num_steps)]).double()
    if dist.is_initialized():
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    evidence = {s.name: s.evidence(job) for s in STRATEGIES}
    found = complete(choices)
    effects = {s.name: s.took_effect({**evidence[s.name], "operators": ()}, found[s.name]) for s in STRATEGIES}
    return Trained(
        losses=losses.tolist(),
        state={name: value.cpu() for name, value in job.state_dict().items()},
        evidence=evidence,
        effects={name: (effect.took, effect.detail) for name, effect in effects.items()},
    )


def train_alone(
    make_workload: Callable[[], Workload], choices: Mapping[str, Choice] | None = None, num_steps: int = 20
) -> Trained:
    """Train in this process, the whole batch at once; computed once for all who compare with it."""
    key = (make_workload, json.dumps(choices or {}, sort_keys=True), num_steps)
    if key not in _ALONE:
        _ALONE[key] = train(0, make_workload, choices or {}, num_steps)
    return copy.deepcopy(_ALONE[key])


def emulated(rank: int, num_hosts: int, function: Any, *args: Any) -> Any:
    """Result of a rank on this many emulated hosts."""
    os.environ[HOSTS_VARIABLE] = str(num_hosts)
    try:
        return function(rank, *args)
    finally:
        del os.environ[HOSTS_VARIABLE]
