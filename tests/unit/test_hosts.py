"""Hosts that are emulated on one machine: which ranks share one, and what NCCL is told of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from steptune.tuner.emulation import DEVICES_VARIABLE, HOSTS_VARIABLE
from steptune.tuner.training.hosts import HOST_ID, OVER_LOOPBACK, emulate_for_nccl, emulation_of
from steptune.tuner.trials.coordination import Coordinator


def told(rank: int, num_ranks: int, **variables: str) -> dict[str, str]:
    emulate_for_nccl(rank, num_ranks, variables=variables)
    return variables


class TestEmulation:
    def test_ranks_get_the_id_of_their_host_in_their_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(HOSTS_VARIABLE, "2")
        ids = [told(rank, 4)[HOST_ID] for rank in range(4)]
        assert ids == ["steptune-host-0", "steptune-host-0", "steptune-host-1", "steptune-host-1"]

    def test_what_crosses_them_goes_through_sockets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(HOSTS_VARIABLE, "2")
        assert told(1, 2) == {HOST_ID: "steptune-host-1", **OVER_LOOPBACK}

    def test_the_users_own_way_between_hosts_stays_but_no_other_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(HOSTS_VARIABLE, "2")
        found = told(0, 2, NCCL_SOCKET_IFNAME="veth0", NCCL_HOSTID="mine")
        assert found == {**OVER_LOOPBACK, "NCCL_SOCKET_IFNAME": "veth0", HOST_ID: "steptune-host-0"}

    def test_ranks_that_share_a_device_are_on_hosts_of_their_own_for_nccl(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(HOSTS_VARIABLE, raising=False)
        variables: list[dict[str, str]] = [{} for _ in range(4)]
        for rank, found in enumerate(variables):
            emulate_for_nccl(rank, 4, per_device=2, variables=found)
        assert [found[HOST_ID] for found in variables] == [f"steptune-host-0-{rank}" for rank in range(4)]
        assert all(OVER_LOOPBACK.items() <= found.items() for found in variables)

    def test_one_host_is_left_as_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(HOSTS_VARIABLE, raising=False)
        assert told(0, 2) == {}
        assert emulation_of({"NCCL_NET": "Socket"}) == {}

    @pytest.mark.parametrize(
        ("device", "parts", "seen"),
        [
            ("cuda", "1", {HOST_ID: "steptune-host-1", **OVER_LOOPBACK}),
            ("cuda", "2", {HOST_ID: "steptune-host-1-1", **OVER_LOOPBACK}),
            ("cpu", "1", {}),
        ],
    )
    def test_is_set_before_nccl_begins(
        self, device: str, parts: str, seen: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """The group of the ranks sets it, whoever joins it: NCCL reads its variables once."""
        found: dict[str, str] = {}
        monkeypatch.setenv(DEVICES_VARIABLE, parts)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setenv(HOSTS_VARIABLE, "2")
        for name in (HOST_ID, *OVER_LOOPBACK):
            monkeypatch.setenv(name, "")  # so that it is taken away again at the end
            monkeypatch.delenv(name)
        monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: found.update(emulation_of(os.environ)))
        monkeypatch.setattr(dist, "new_group", lambda **_: None)
        channel: Any = None
        Coordinator(1, 2, channel, tmp_path, torch.device(device))
        assert found == seen
