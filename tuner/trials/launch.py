"""How this process was launched: by itself, or as one of the ranks of several hosts by torchrun or srun.

torchrun gives every process RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK and a rendezvous; srun gives it
SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID and the size of its step. The first rank of all drives a study, the first
rank of every other host serves its trials there, and the others wait for the first rank of their host.

Sources: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables , https://slurm.schedmd.com/srun.html
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from steptune.tuner.errors import PlatformError

SECRET_VARIABLE = "STEPTUNE_HOSTS_SECRET"
"""Shared by the hosts of a job; where it is not set, torchrun's rendezvous hands out one made for the job."""
DEFAULT_PORT = 29500
"""As torchrun's, where a launch names none."""
SIBLING_S = 30.0
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_NODEID")
OF_LAUNCHERS = ("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", SECRET_VARIABLE)
"""Variables that are of the launched process and not of the ranks of a trial; beside these, all of torchelastic."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The place of this process among those that were launched together.

    Attributes:
        rank: Among all processes.
        local_rank: Among those of its host.
        host: Number of its host.
        address: Of the first host, as the others reach it; empty where there is one host.
        port: Of torchrun's store, or the one to listen on under srun.
        attempt: Distinguishes restarts of the same launch.
        has_store: Whether torchrun's store is at that port.
    """

    rank: int
    local_rank: int
    ranks_per_host: int
    host: int
    num_hosts: int
    address: str = ""
    port: int = DEFAULT_PORT
    attempt: str = ""
    has_store: bool = False

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @property
    def drives(self) -> bool:
        return self.rank == 0

    @property
    def serves(self) -> bool:
        return self.local_rank == 0 and not self.drives


def find_launch(variables: Mapping[str, str] = os.environ) -> Launch | None:
    """Return the place that torchrun or srun gave this process; None where it was started alone.

    Raises:
        PlatformError: Hosts have different numbers of ranks, or ranks are not numbered host by host.
    """
    if all(name in variables for name in _TORCHRUN):
        rank, local_rank, num_ranks, per_host, host = _numbers(_TORCHRUN, variables)
        has_store = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = f"{variables.get('TORCHELASTIC_RUN_ID', '')}/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    elif all(name in variables for name in _SRUN):
        rank, local_rank, num_ranks, num_hosts, host = _numbers(_SRUN, variables)
        per_host, rest = divmod(num_ranks, max(1, num_hosts))
        if rest:
            raise PlatformError(
                f"srun started {num_ranks} tasks on {num_hosts} hosts; every host needs as many: give --ntasks-per-node"
            )
        has_store, attempt = False, ""
    else:
        return None
    if num_ranks == 1:
        return None
    if num_ranks % per_host or rank != host * per_host + local_rank:
        raise PlatformError(
            f"rank {rank} of {num_ranks} is number {local_rank} of {per_host} on host {host}; ranks need to be "
            "numbered host by host, as many on every host: give every host the same --nproc-per-node (under srun "
            "--ntasks-per-node and --distribution=block)"
        )
    return Launch(
        rank=rank,
        local_rank=local_rank,
        ranks_per_host=per_host,
        host=host,
        num_hosts=num_ranks // per_host,
        address=_address(variables) if num_ranks > per_host else "",
        port=int(variables.get("MASTER_PORT", DEFAULT_PORT)),
        attempt=attempt,
        has_store=has_store,
    )


def _numbers(names: tuple[str, ...], variables: Mapping[str, str]) -> list[int]:
    try:
        return [int(variables[name]) for name in names]
    except ValueError:
        found = ", ".join(f"{name}={variables[name]!r}" for name in names)
        raise PlatformError(f"the launcher's variables are no numbers: {found}") from None


def _address(variables: Mapping[str, str]) -> str:
    address = variables.get("MASTER_ADDR", "")
    if not address:
        raise PlatformError(
            "MASTER_ADDR is not set, so that the hosts cannot find the first one: under srun, "
            '`export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)` before the command'
        )
    return address


def without_launcher(variables: Mapping[str, str]) -> dict[str, str]:
    """An environment without what describes the launched process, for the ranks of trials."""
    names = {*OF_LAUNCHERS, *_TORCHRUN, "MASTER_ADDR", "MASTER_PORT"}
    return {n: v for n, v in variables.items() if n not in names and not n.startswith("TORCHELASTIC_")}


def wait_for_first(launch: Launch) -> None:
    """Wait until the first rank of this host has ended: torchrun and srun end a job in which ranks end apart."""
    first = _first_of_host(launch)
    if first is not None:
        first.wait()


def _first_of_host(launch: Launch) -> psutil.Process | None:
    """The process that the same parent started as the first rank; None where it is gone already, or not visible."""
    name = "LOCAL_RANK" if "LOCAL_RANK" in os.environ else "SLURM_LOCALID"
    deadline = time.monotonic() + SIBLING_S
    parent = psutil.Process().parent()
    while parent is not None and time.monotonic() < deadline:
        for sibling in parent.children():
            with contextlib.suppress(psutil.Error):
                if sibling.environ().get(name) == "0" and sibling.pid != os.getpid():
                    return sibling
        time.sleep(0.5)
    return None
