"""Minutes on two and on four GPUs, as a model: as fast as what an expert would set by hand."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from gpu_model import by_hand, searched
from gpu_steps import CONVOLUTIONS, LARGE_LANGUAGE_MODEL, VISION
from predictions import GPT2_LARGE, MANY_SOCKETS, RESNET_50, SOCKETS, VIT_LARGE
from ranks_model import RanksStep, on_ranks

from steptune.tuner.records import Choice, Numerics

BUDGET_S = 270.0
SHORT_S = 156.0
ONE_EACH = msgspec.structs.replace(SOCKETS, bytes_per_s=3.5e9)
MANY_ONE_EACH = msgspec.structs.replace(MANY_SOCKETS, bytes_per_s=8.1e9)
"""Between two emulated hosts of one H200 each: ViT-L's gradients took 0.34 s of a step with DDP, and 0.15 s with 4 x 4
sockets (`benchmarks/results/multi_gpu.jsonl`)."""
TODAY: dict[str, Choice] = {
    "precision": {"level": "O1", "dtype": "bfloat16"},
    "optimizer_implementation": {"implementation": "fused"},
}
O2: Choice = {"level": "O2", "dtype": "bfloat16"}


def vision(num_hosts: int, num_ranks: int = 2) -> RanksStep:
    """A large vision transformer on half the images, whose gradients are 1.2 GB."""
    return on_ranks(VISION, VIT_LARGE, batch=0.5, current=TODAY, num_ranks=num_ranks, num_hosts=num_hosts)


def convolutions(num_hosts: int, num_ranks: int = 2) -> RanksStep:
    """A ResNet-50 on four times the images, whose gradients are 0.1 GB."""
    return on_ranks(CONVOLUTIONS, RESNET_50, batch=4.0, current=TODAY, num_ranks=num_ranks, num_hosts=num_hosts)


def language(num_hosts: int, num_ranks: int = 2) -> RanksStep:
    """GPT-2 large, whose gradients are 3.1 GB."""
    return on_ranks(
        LARGE_LANGUAGE_MODEL, GPT2_LARGE, batch=1.0, current=TODAY, num_ranks=num_ranks, num_hosts=num_hosts
    )


def columns(step: RanksStep, *, lossy: bool) -> list[dict[str, Choice]]:
    """Choices that experts set: buckets, sockets, sharding, compression; two levels where hosts have several ranks."""
    layout: dict[str, Choice] = {"memory_format": {"layout": "channels_last"}} if step.channels_last else {}
    exact: list[dict[str, Choice]] = [
        {},
        {"ddp_buckets": {"bucket_cap_mb": 200}},
        {"nccl_settings": {"socket_threads": 4, "sockets_per_thread": 4}},
        *({"precision": O2, "sharding": {"mode": mode, "wrap": "block"}} for mode in ("full", "grad_op")),
    ]
    compressed: list[dict[str, Choice]] = [
        {"gradient_compression": {"method": "bf16"}},
        {"gradient_compression": {"method": "powersgd", "rank": 4}},
    ]
    if step.num_hosts > 1 and step.num_ranks > step.num_hosts:
        levels: dict[str, Choice] = {"hierarchical_allreduce": {"levels": 2}}
        hybrid: dict[str, Choice] = {"precision": O2, "sharding": {"mode": "hybrid", "wrap": "block", "reshard": False}}
        exact += [levels, hybrid, {**hybrid, "nccl_settings": {"socket_threads": 4, "sockets_per_thread": 4}}]
        compressed += [{**both, "gradient_compression": {"method": "bf16"}} for both in (levels, hybrid)]
    return [{**TODAY, **layout, **more} for more in (exact + compressed if lossy else exact)]


@pytest.mark.parametrize("lossy", [False, True], ids=["exact", "lossy"])
@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("workload", [vision, convolutions, language])
def test_finds_within_minutes_what_an_expert_sets_by_hand(
    workload, num_ranks: int, num_hosts: int, lossy: bool
) -> None:
    step = workload(num_hosts, num_ranks)
    answer, runner, driver = searched(step, budget_s=BUDGET_S, start_s=3.0, allow=(Numerics.LOSSY,) * lossy)
    found = by_hand(step, driver, **answer.candidate.choices)
    best = min(by_hand(step, driver, **choices) for choices in columns(step, lossy=lossy))
    assert found <= 1.03 * best, answer.candidate.label
    assert runner.now_s <= 1.05 * BUDGET_S


@pytest.mark.parametrize("lossy", [False, True], ids=["exact", "lossy"])
@pytest.mark.parametrize("workload", [vision, convolutions, language])
def test_over_slow_sockets_two_and_a_half_minutes_do(workload, lossy: bool) -> None:
    """Where starts take 5 s."""
    step = replace(workload(2), between=ONE_EACH, many_sockets=MANY_ONE_EACH)
    answer, _, driver = searched(step, budget_s=SHORT_S, start_s=5.0, allow=(Numerics.LOSSY,) * lossy)
    best = min(by_hand(step, driver, **choices) for choices in columns(step, lossy=lossy))
    assert by_hand(step, driver, **answer.candidate.choices) <= 1.03 * best, answer.candidate.label


@pytest.mark.parametrize(("lossy", "times"), [(False, 3.2), (True, 3.5)], ids=["exact", "lossy"])
@pytest.mark.parametrize("budget_s", [SHORT_S, BUDGET_S])
def test_over_sockets_it_beats_plain_ddp_by_what_the_network_held_it_up(
    budget_s: float, lossy: bool, times: float
) -> None:
    """First come more sockets, and with consent fewer bytes: not views of buckets, which send as much as before."""
    step = replace(vision(2), between=ONE_EACH, many_sockets=MANY_ONE_EACH)
    answer, _, driver = searched(step, budget_s=budget_s, start_s=4.0, allow=(Numerics.LOSSY,) * lossy)
    today = by_hand(step, driver, **TODAY)
    assert today >= times * by_hand(step, driver, **answer.candidate.choices), answer.candidate.label
