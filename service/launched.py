"""Studies on several hosts, started by torchrun or srun: the role of each process, and how they find each other."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from steptune.service.interrupts import interruptible
from steptune.service.isolation import NONE, Level
from steptune.service.places import host_id
from steptune.service.settings import Settings
from steptune.tuner.emulation import num_emulated_hosts
from steptune.tuner.errors import ChoiceError, IsolationUnavailableError, PlatformError, StoreError
from steptune.tuner.records import Record, Study
from steptune.tuner.trials.host_agent import HostAgent
from steptune.tuner.trials.host_group import HostGroup
from steptune.tuner.trials.launch import SECRET_VARIABLE, Launch, find_launch, wait_for_first, without_launcher
from steptune.tuner.trials.store_exchange import publish, published, withdraw

LAUNCHERS = (
    "torchrun",
    "srun",
    "mpirun",
    "accelerate",
    "deepspeed",
    "torch.distributed.run",
    "torch.distributed.launch",
)
MIN_SECRET_LENGTH = 32
ADVICE = (
    "`torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m steptune tune "
    "my_workload.py:MyWorkload`"
)


class _Meeting(Record):
    """Port and secret that torchrun's rendezvous distributes to the hosts."""

    port: int
    secret: str


def refuse_launcher(arguments: Sequence[str]) -> None:
    """Refuse a launcher in place of a workload, as in `steptune tune torchrun train.py`.

    Raises:
        ChoiceError: A launcher is among the arguments.
    """
    for name in [argument for argument in arguments if Path(argument).name in LAUNCHERS]:
        raise ChoiceError(
            f"{name} cannot be tuned as a workload, because Steptune starts the ranks of its trials itself. "
            f"Start Steptune with the launcher instead: {ADVICE}. To tune a training script as it is, run "
            f"`steptune tune -- {name} …`"
        )


def refuse_several_hosts(command: Sequence[str]) -> None:
    """Refuse a command whose launcher starts ranks on several hosts: trials of a command run on this host only.

    Raises:
        ChoiceError: The command is of this kind.
    """
    for name, following in zip(command, [*command[1:], ""], strict=True):
        option, _, value = name.partition("=")
        most = (value or following).rpartition(":")[2]
        if option in ("--nnodes", "--num_machines", "--num-machines") and most != "1":
            raise ChoiceError(
                f"{option} must be 1, got {value or following}: trials of a command run on this host only. To "
                f"use several hosts, tune a workload, and start Steptune with the launcher: {ADVICE}"
            )


def take_place() -> Launch | None:
    """Return how this process was launched. Remove the launcher's variables and the hosts' secret from the environment
    that child processes inherit.

    Raises:
        PlatformError: The launcher's variables do not allow a study on several hosts.
    """
    launch = find_launch()
    kept = without_launcher(os.environ)
    for name in os.environ.keys() - kept.keys():
        del os.environ[name]
    return launch


def attend(launch: Launch, settings: Settings) -> None:
    """Serve the trials of this host until the study has ended, or wait for the process that serves them.

    Raises:
        RunnerError: The first host is gone, or the study has failed.
    """
    if not launch.serves:
        wait_for_first(launch)
        return
    secret = _own_secret(launch)
    port = launch.port
    if launch.has_store:
        meeting = msgspec.json.decode(published(launch), type=_Meeting)
        port, secret = meeting.port, secret or meeting.secret
    serve_host(
        host=launch.host,
        address=launch.address,
        port=port,
        secret=secret,
        folder=settings.data_directory.absolute() / "hosts",
        patience_s=settings.host_patience_s,
    )


def serve_host(*, host: int, address: str, port: int, secret: str, folder: Path, patience_s: float) -> None:
    """Serve the trials of this host until the study has ended; their files are in a temporary directory in `folder`.

    Raises:
        RunnerError: The first host is gone, or the study has failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with interruptible(), tempfile.TemporaryDirectory(prefix=f"host{host}-", dir=folder) as directory:
        HostAgent(
            host=host,
            address=address,
            port=port,
            secret=secret.encode(),
            directory=Path(directory),
            place=host_id(),
            patience_s=patience_s,
        ).serve()


@contextlib.contextmanager
def hosts_of(launch: Launch | None, study: Study, settings: Settings, level: Level) -> Iterator[HostGroup | None]:
    """Connect all hosts of a study, and yield them; None where it runs on this host alone.

    Raises:
        IsolationUnavailableError: The study's trials are to be isolated.
        RunnerError: Not all hosts connected.
        StoreError: The study was begun on another number of hosts or ranks.
    """
    check_size(launch, study)
    if launch is None or launch.num_hosts == 1:
        yield None
        return
    refuse_isolated(level)
    given = _own_secret(launch)
    secret = given or secrets.token_hex(MIN_SECRET_LENGTH)
    hosts = HostGroup(
        num_hosts=launch.num_hosts,
        ranks_per_host=launch.ranks_per_host,
        address=launch.address,
        secret=secret.encode(),
        workload=study.workload,
        directory=Path(study.directory).absolute(),
        port=0 if launch.has_store else launch.port,
        patience_s=settings.host_patience_s,
    )
    with hosts.closed_with_reason():
        if launch.has_store:
            meeting = _Meeting(port=hosts.port, secret="" if given else secret)
            publish(launch, msgspec.json.encode(meeting).decode())
        hosts.gather()
        if launch.has_store:
            withdraw(launch)
        yield hosts


def refuse_isolated(level: Level) -> None:
    """Refuse to isolate the trials of a study on several hosts.

    Raises:
        IsolationUnavailableError: The trials are to be isolated.
    """
    if level.name != NONE:
        raise IsolationUnavailableError(
            f"isolation {level.name} blocks the network between ranks, which several hosts need: use --isolation {NONE}"
        )


def check_size(launch: Launch | None, study: Study, *, reserved: bool = False) -> None:
    """Refuse to continue a study on another number of hosts or ranks than it began with.

    Args:
        reserved: Whether a cluster reserves as many hosts as the study has.

    Raises:
        StoreError: The numbers differ.
    """
    if launch is not None:
        num_hosts, num_ranks = launch.num_hosts, launch.num_ranks
    else:
        num_hosts = study.settings.num_hosts if reserved else num_emulated_hosts()
        num_ranks = study.settings.num_ranks
    known, asked = study.environment, study.settings.num_hosts
    if known is not None:
        begun_on = known.num_hosts
    else:  # 1 is also what studies of older versions say, and emulated hosts
        begun_on = asked if asked > 1 else num_hosts
    if (begun_on, study.settings.num_ranks) != (num_hosts, num_ranks):
        raise StoreError(
            f"study {study.study_id} began with {study.settings.num_ranks} ranks on {begun_on} hosts, but this "
            f"launch has {num_ranks} on {num_hosts}: resume the study with the launcher options of its first "
            "launch"
        )


def num_ranks_of(launch: Launch | None, asked: int | None) -> int:
    """Return the number of ranks of a trial: as many as were launched, else as many as were asked for, else 1.

    Raises:
        ChoiceError: Another number was asked for.
    """
    if launch is None:
        return asked or 1
    if asked not in (None, launch.num_ranks):
        raise ChoiceError(
            f"--ranks must be {launch.num_ranks}, the number of launched ranks, got {asked}: leave it out"
        )
    return launch.num_ranks


def num_hosts_of(launch: Launch | None, asked: int | None, *, reserved: bool = False) -> int:
    """Return the number of hosts of a study: as many as were launched, or are requested from a cluster; else 1.

    Args:
        reserved: Whether a cluster reserves them.

    Raises:
        ChoiceError: Several were asked for, but neither a launcher nor a cluster provides them.
    """
    if launch is not None:
        if reserved or asked not in (None, launch.num_hosts):
            raise ChoiceError(
                "torchrun or srun started this command and provides the hosts: leave out --runner and "
                "--num-hosts, or start the command without a launcher"
            )
        return launch.num_hosts
    if (asked or 1) > 1 and not reserved:
        raise ChoiceError(
            f"--num-hosts {asked} needs a cluster or a launcher: use --runner ray, or start Steptune with {ADVICE}"
        )
    return asked or 1


def _own_secret(launch: Launch) -> str:
    """Return the hosts' secret from the environment; empty where torchrun's rendezvous distributes one."""
    secret = launch.secret
    if not secret and not launch.has_store:
        raise PlatformError(
            f"{SECRET_VARIABLE} is not set, and only torchrun can distribute a secret to the hosts: add `export "
            f"{SECRET_VARIABLE}=$(openssl rand -hex 32)` to the job's script, before srun"
        )
    if secret and len(secret) < MIN_SECRET_LENGTH:
        raise PlatformError(
            f"{SECRET_VARIABLE} must have at least {MIN_SECRET_LENGTH} characters, got {len(secret)}: set it to "
            "the output of `openssl rand -hex 32`"
        )
    return secret
