"""Detection of how this process was launched: alone, or by torchrun or srun as one of the ranks on several hosts.

torchrun gives every process RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK and a rendezvous; srun gives it
SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID and the size of its step. A shell that srun has opened has these, too, so that
tasks of srun are one study only where STEPTUNE_HOSTS_SECRET asks for it. The first rank of all drives a study, the
first rank of every other host serves its trials there, and the others wait for the first rank of their host.

Sources: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables , https://slurm.schedmd.com/srun.html
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from steptune.tuner.errors import PlatformError

SECRET_VARIABLE = "STEPTUNE_HOSTS_SECRET"
"""Environment variable for the secret that a job's hosts share. If it is unset, torchrun's rendezvous distributes a
generated secret.
"""
DEFAULT_PORT = 29500
"""Default port of a launch, the same as torchrun's."""
SIBLING_S = 30.0
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_NODEID")
_OF_TORCHRUN = ("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "SLURM_NTASKS", "SLURM_STEP_NUM_")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Position of this process among the processes launched together with it.

    Attributes:
        rank: Rank among all processes.
        local_rank: Rank among the processes of its host.
        host: Number of its host.
        address: Address of the first host, as the others reach it; empty with a single host.
        port: Port of torchrun's store, or to listen on under srun.
        attempt: Distinguishes restarts of the same launch.
        has_store: Whether torchrun's store is at that port.
        local_rank_variable: Environment variable that distinguishes the processes of a host.
        secret: Secret of the hosts, from the environment; empty if torchrun's rendezvous distributes one.
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
    local_rank_variable: str = "LOCAL_RANK"
    secret: str = field(default="", repr=False)

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
    """Return this process's position as torchrun or srun gave it; None if it was started alone.

    Raises:
        PlatformError: Hosts have different numbers of ranks, or ranks are not numbered host by host.
    """
    launcher = _launcher(variables)
    if launcher == "torchrun":
        rank, local_rank, num_ranks, per_host, host = _numbers(_TORCHRUN, variables)
        has_store = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = f"{variables.get('TORCHELASTIC_RUN_ID', '')}/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    elif launcher == "srun":
        rank, local_rank, num_ranks, num_hosts, host = _numbers(_SRUN, variables)
        per_host, rest = divmod(num_ranks, max(1, num_hosts))
        if rest:
            raise PlatformError(
                f"srun started {num_ranks} tasks on {num_hosts} hosts, but every host must run the same number: set "
                "--ntasks-per-node"
            )
        has_store, attempt = False, ""
    else:
        return None
    if num_ranks == 1:
        return None
    if num_ranks < 1 or per_host < 1:
        raise PlatformError(
            f"{launcher} set {num_ranks} ranks and {per_host} ranks per host, but both must be at least 1: start "
            "Steptune with the launcher itself, or unset its variables"
        )
    if num_ranks % per_host or rank != host * per_host + local_rank:
        raise PlatformError(
            f"rank {rank} of {num_ranks} is number {local_rank} of {per_host} on host {host}, but ranks must be "
            "numbered host by host, with the same number of ranks on every host: give every host the same "
            "--nproc-per-node (under srun: --ntasks-per-node and --distribution=block)"
        )
    return Launch(
        rank=rank,
        local_rank=local_rank,
        ranks_per_host=per_host,
        host=host,
        num_hosts=num_ranks // per_host,
        address=_address(variables) if num_ranks > per_host else "",
        port=_port(variables),
        attempt=attempt,
        has_store=has_store,
        local_rank_variable="LOCAL_RANK" if launcher == "torchrun" else "SLURM_LOCALID",
        secret=variables.get(SECRET_VARIABLE, ""),
    )


def _launcher(variables: Mapping[str, str]) -> str | None:
    if all(name in variables for name in _TORCHRUN):
        return "torchrun"
    if variables.get(SECRET_VARIABLE) and all(name in variables for name in _SRUN):
        return "srun"
    return None


def _numbers(names: tuple[str, ...], variables: Mapping[str, str]) -> list[int]:
    try:
        return [int(variables[name]) for name in names]
    except ValueError:
        found = ", ".join(f"{name}={variables[name]!r}" for name in names)
        raise PlatformError(
            f"the launcher's variables must be whole numbers, got {found}: start Steptune with the launcher "
            "itself, or unset them"
        ) from None


def _port(variables: Mapping[str, str]) -> int:
    port = variables.get("MASTER_PORT", str(DEFAULT_PORT))
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise PlatformError(f"MASTER_PORT={port!r} is not a port: set it to a number from 1 to 65535, or unset it")
    return int(port)


def _address(variables: Mapping[str, str]) -> str:
    address = variables.get("MASTER_ADDR", "")
    if not address:
        raise PlatformError(
            "MASTER_ADDR is not set, so the hosts cannot find the first one: under srun, run `export "
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)` before the command'
        )
    return address


def without_launcher(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for the ranks of trials, without the secret and without the variables of a launcher."""
    names = {SECRET_VARIABLE}
    prefixes: tuple[str, ...] = ()
    if _launcher(variables) is not None:
        names |= {*_TORCHRUN, *_OF_TORCHRUN, *_SRUN}
        prefixes = _PREFIXES
    return {n: v for n, v in variables.items() if n not in names and not n.startswith(prefixes)}


def num_lone_tasks(variables: Mapping[str, str] = os.environ) -> int:
    """Return the number of tasks in this process's srun step, if they were not launched as one study; else return 1."""
    tasks = variables.get("SLURM_STEP_NUM_TASKS", "1")
    return int(tasks) if _launcher(variables) is None and tasks.isdecimal() else 1


def wait_for_first(launch: Launch) -> None:
    """Wait until the first rank of this host has ended, because torchrun and srun end a job whose ranks end at
    different times.
    """
    first = _first_of_host(launch)
    if first is not None:
        first.wait()


def _first_of_host(launch: Launch) -> psutil.Process | None:
    """Return the process of this host's first rank, which has the same parent as this process; None if it is gone or
    not visible.
    """
    deadline = time.monotonic() + SIBLING_S
    parent = psutil.Process().parent()
    while parent is not None and time.monotonic() < deadline:
        for sibling in parent.children():
            with contextlib.suppress(psutil.Error):
                if sibling.environ().get(launch.local_rank_variable) == "0" and sibling.pid != os.getpid():
                    return sibling
        time.sleep(0.5)
    return None
