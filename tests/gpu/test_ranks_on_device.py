"""Ranks on CUDA devices, over NCCL: every way to share a training is that of one device, on one host and on two.

Needs two devices, some of it four. NCCL meets over the loopback interface, so that a host without a network will do;
two hosts are emulated by a NCCL_HOSTID each, between which NCCL uses sockets. With STEPTUNE_EMULATED_DEVICES=4 fewer
devices do: ranks share them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from builders import sample_environment, sample_facts
from device_ranks import TOLERANCE, needs, num_devices
from rank_jobs import Trained, emulated, train
from ranks import Ranks
from tiny_workloads import Everything, TinyViT
from torch import nn

from steptune.tuner.records import Candidate, Choice, Numerics
from steptune.tuner.strategies import Supported, strategy_named
from steptune.tuner.strategies.combine import conflict

pytestmark = pytest.mark.xdist_group("ranks_on_device")


class Wide(Everything):
    def model(self) -> nn.Module:
        return TinyViT(width=64)


class Clipped(Wide):
    max_grad_norm = 0.01


class Momentum(Wide):
    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.02, momentum=0.9, weight_decay=0.01)


@pytest.fixture(scope="module")
def alone(one_host: Ranks) -> Trained:
    trained: Trained = one_host.run(1, train, Wide, {})[0]
    return trained


def choices(num_ranks: int, num_hosts: int) -> list[Any]:
    """Choices of each strategy that shares a training that so many can try; on several hosts, those that need them."""
    environment = sample_environment(num_ranks=num_ranks, num_hosts=num_hosts)
    facts = sample_facts(current={}, custom_step=False)
    flat = sample_environment(num_ranks=num_ranks, num_hosts=1)
    found = []
    for name in ("sharding", "gradient_compression", "hierarchical_allreduce", "local_sgd"):
        strategy = strategy_named(name)
        for choice in strategy.choices(environment, facts):
            deep = choice.get("wrap") == "size" or choice.get("prefetch", 1) != 1  # for larger models than ours
            known = num_hosts > 1 and strategy.supports(choice, flat, facts) == Supported()
            if deep or known or choice == strategy.defaults:
                continue
            if strategy.supports(choice, environment, facts) == Supported():
                label = "-".join(str(value) for value in choice.values())
                found.append(pytest.param(name, choice, id=f"{name}-{label}"))
    return found


def check(name: str, choice: Choice, trained: Trained, alone: Trained) -> None:
    strategy = strategy_named(name)
    took, detail = trained.effects[name]
    assert took, detail
    assert all(math.isfinite(loss) for loss in trained.losses)
    if strategy.numerics(choice) is Numerics.ROUNDING:
        assert trained.losses == pytest.approx(alone.losses, rel=TOLERANCE)
    else:
        assert sum(trained.losses[-4:]) < sum(trained.losses[:4])


@pytest.mark.parametrize(("name", "choice"), choices(2, 1))
def test_two_ranks_train_as_one_device_does(one_host: Ranks, alone: Trained, name: str, choice: Choice) -> None:
    for trained in one_host.run(2, train, Wide, {name: choice}):
        check(name, choice, trained, alone)


@pytest.mark.parametrize(("name", "choice"), choices(4, 2))
def test_two_hosts_of_two_train_as_one_device_does(two_hosts: Ranks, alone: Trained, name: str, choice: Choice) -> None:
    needs(4)
    for trained in two_hosts.run(4, emulated, 2, train, Wide, {name: choice}):
        check(name, choice, trained, alone)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"sharding": {"mode": "full", "wrap": "block"}},
        {"gradient_compression": {"method": "int8"}},
        {"gradient_compression": {"method": "powersgd", "rank": 2}},
    ],
    ids=lambda choices: str(next(iter(choices.values()), "ddp")),
)
def test_two_ranks_on_two_hosts_train_over_sockets(two_hosts: Ranks, alone: Trained, choices: dict[str, Any]) -> None:
    for trained in two_hosts.run(2 if num_devices() < 4 else 4, train, Wide, choices):
        if "gradient_compression" in choices:
            assert sum(trained.losses[-4:]) < sum(trained.losses[:4])
        else:
            assert trained.losses == pytest.approx(alone.losses, rel=TOLERANCE)


@pytest.mark.parametrize("choice", [{"cpu_offload": True}, {"ignored": "norms"}, {}], ids=str)
def test_parts_are_clipped_by_one_norm_wherever_they_are(one_host: Ranks, choice: dict[str, Any]) -> None:
    """Offloaded ones by reductions on the CPU."""
    sharded = {"sharding": {"mode": "full", "wrap": "block", **choice}}
    plain: Trained = one_host.run(1, train, Clipped, {})[0]
    trained: Trained = one_host.run(2, train, Clipped, sharded)[0]
    assert trained.losses == pytest.approx(plain.losses, rel=TOLERANCE)
    assert trained.effects["sharding"][0], trained.effects["sharding"][1]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "sharding",
    [{}, {"mode": "full", "wrap": "block"}, {"mode": "full", "wrap": "block", "ignored": "norms"}],
    ids=["ddp", "full", "without norms"],
)
def test_sixteen_bits_over_two_ranks_are_those_of_one_device(
    one_host: Ranks, level: str, dtype: str, sharding: dict[str, Any]
) -> None:
    """Within some roundings of the format; float16 with a loss scaler, and with DDP at O2 added up in FP32."""
    precision = {"precision": {"level": level, "dtype": dtype}}
    sharded = {"sharding": sharding}
    assert conflict(Candidate(choices={**precision, **sharded}), sample_environment(), sample_facts(current={})) is None
    plain: Trained = one_host.run(1, train, Wide, precision, 5)[0]
    trained: Trained = one_host.run(2, train, Wide, {**precision, **sharded}, 5)[0]
    roundoff = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    assert trained.losses == pytest.approx(plain.losses, rel=5 * roundoff)
    for name in ("precision", "sharding"):
        assert trained.effects[name][0], trained.effects[name][1]


def test_deep_gradient_compression_that_sends_all_is_sgd(one_host: Ranks) -> None:
    whole = {"gradient_compression": {"method": "dgc", "ratio": 1.0, "warm_up_steps": 0}}
    dense: Trained = one_host.run(2, train, Momentum, {})[0]
    compressed: Trained = one_host.run(2, train, Momentum, whole)[0]
    assert compressed.losses == pytest.approx(dense.losses, rel=TOLERANCE)


def test_deep_gradient_compression_trains(one_host: Ranks) -> None:
    choices = {"gradient_compression": {"method": "dgc", "ratio": 0.1, "warm_up_steps": 4}}
    trained: Trained = one_host.run(2, train, Momentum, choices)[0]
    assert sum(trained.losses[-4:]) < sum(trained.losses[:4])
    assert trained.effects["gradient_compression"][0], trained.effects["gradient_compression"][1]
