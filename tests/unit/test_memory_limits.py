"""Limit on what a rank may use: of the device that it trains on, and of nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from steptune.tuner.trials import memory
from steptune.tuner.trials.memory import limit_device_memory, limit_host_memory

GB = 10**9


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, torch.device]]:
    """Memory fractions that a device of 96 GB was told."""
    told: list[tuple[float, torch.device]] = []
    properties = SimpleNamespace(total_memory=96 * GB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: told.append(given))
    return told


@pytest.mark.parametrize(("limit", "share"), [(24 * GB, 0.25), (200 * GB, 1.0)])
def test_a_rank_on_a_device_is_held_to_its_share_of_it(
    limit: int, share: float, shares: list[tuple[float, torch.device]]
) -> None:
    limit_device_memory(limit, torch.device("cuda", 1))
    assert shares == [(share, torch.device("cuda", 1))]


def test_without_a_limit_the_whole_device_can_be_used(shares: list[tuple[float, torch.device]]) -> None:
    limit_device_memory(None, torch.device("cuda", 0))
    limit_device_memory(GB, torch.device("cpu"))
    assert shares == []


@pytest.mark.parametrize(("kind", "limit", "wanted"), [("cpu", GB, [GB]), ("cuda", GB, []), ("cpu", None, [])])
def test_the_hosts_memory_is_limited_where_it_is_what_trains(
    kind: str, limit: int | None, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training on a device may keep data in the host's memory to save the device's."""
    told: list[int] = []
    monkeypatch.setattr(memory, "limit_data", told.append)
    limit_host_memory(limit, kind)
    assert told == wanted
