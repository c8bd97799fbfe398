"""Models laid over CUDA devices by products, layers or experts, over NCCL: they train as on one device."""

from __future__ import annotations

from typing import Any

import pytest
from device_ranks import TOLERANCE, needs
from mesh_workloads import PIPELINE, SCHEDULES, Bert, Experts, Gpt2, Vit, mesh
from rank_jobs import Trained, train
from ranks import Ranks

from steptune.tuner.strategies.parallel_mesh.choice import ParallelMeshSetting

pytestmark = pytest.mark.xdist_group("meshes_on_device")

O1: dict[str, Any] = {"precision": {"level": "O1", "dtype": "bfloat16"}}


def check(ranks: Ranks, workload: type, choice: dict[str, Any], **others: Any) -> None:
    """Against the same without a mesh on one device; in bfloat16 within some of its roundings."""
    alone: Trained = ranks.run(1, train, workload, others)[0]
    num_ranks = ParallelMeshSetting(**choice).model_ranks
    for trained in ranks.run(num_ranks, train, workload, mesh(**choice) | others):
        took, detail = trained.effects["parallel_mesh"]
        assert took, detail
        assert trained.losses == pytest.approx(alone.losses, rel=5 * 2.0**-8 if others else TOLERANCE)


@pytest.mark.parametrize("workload", [Gpt2, Bert, Vit])
@pytest.mark.parametrize("choice", [{"tensor": 2}, PIPELINE], ids=["tensor", "pipeline"])
def test_two_ranks_train_as_one_device_does(one_host: Ranks, workload: type, choice: dict[str, Any]) -> None:
    check(one_host, workload, choice)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda choice: choice["schedule"])
def test_every_schedule_trains_so(one_host: Ranks, schedule: dict[str, Any]) -> None:
    check(one_host, Gpt2, {"pipeline": 2, **schedule})


@pytest.mark.parametrize("choice", [{"tensor": 2}, PIPELINE], ids=["tensor", "pipeline"])
def test_under_autocast_they_train_so_too(one_host: Ranks, choice: dict[str, Any]) -> None:
    check(one_host, Gpt2, choice, **O1)


def test_experts_on_two_devices_train_as_on_one(one_host: Ranks) -> None:
    check(one_host, Experts, {"expert": 2})


@pytest.mark.parametrize("choice", [{"pipeline": 2, "tensor": 2, "micro_batches": 4}, {"tensor": 4}], ids=str)
def test_four_ranks_train_as_one_device_does(one_host: Ranks, choice: dict[str, Any]) -> None:
    needs(4)
    check(one_host, Gpt2, choice)
