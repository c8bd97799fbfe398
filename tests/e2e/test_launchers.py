"""`steptune tune` started by a launcher, or around one."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from command import ROOT, TUNED, Ended, Steptune

Inside = Callable[..., Ended]
SECRET = "0123456789abcdef0123456789abcdef"
QUICK = ("--budget", "3m", "--trials", "1", "--only", "ddp_buckets", "--foreign-load", "100")
"""The baseline alone: its trial runs on all ranks."""


def srun(number: int, **others: str) -> dict[str, str]:
    """Variables that srun sets for a task of two, one on each of two hosts."""
    return {
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NODEID": str(number),
        "MASTER_ADDR": "127.0.0.1",
        **others,
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ("torchrun", "--nnodes", "2", "train.py"),
        ("python", "-m", "torch.distributed.run", "--nnodes", "2", "train.py"),
    ],
)
def test_a_launcher_in_place_of_a_workload_is_refused_with_the_command_that_works(
    inside: Inside, arguments: tuple[str, ...]
) -> None:
    error = inside("tune", *arguments, status=2).error
    assert "cannot be tuned as a workload" in error
    assert "torchrun --nnodes 2 --nproc-per-node 8" in error
    assert "-m steptune tune my_workload.py:MyWorkload" in error


@pytest.mark.parametrize("option", [("--nnodes", "2"), ("--nnodes=1:4",), ("--num_machines", "2")])
def test_a_command_over_several_hosts_is_refused_with_the_command_that_works(
    inside: Inside, option: tuple[str, ...]
) -> None:
    error = inside("tune", "--", "torchrun", *option, "train.py", status=2).error
    assert "trials of a command run on this host only" in error
    assert "-m steptune tune my_workload.py:MyWorkload" in error


def test_an_argument_too_many_is_a_mistake_of_use(inside: Inside) -> None:
    assert "Got unexpected extra argument (more)" in inside("tune", TUNED, "more", status=2).err


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        (srun(0, STEPTUNE_HOSTS_SECRET="short"), "STEPTUNE_HOSTS_SECRET must have at least 32 characters, got 5"),
        (srun(0, STEPTUNE_HOSTS_SECRET=SECRET, MASTER_ADDR=""), "MASTER_ADDR is not set"),
    ],
)
def test_hosts_that_cannot_find_or_trust_each_other_are_refused(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], reason: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert reason in inside("tune", TUNED, status=2).error
    assert inside("list", "--json").json == []


def test_another_number_of_ranks_than_was_launched_is_refused(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in srun(0, STEPTUNE_HOSTS_SECRET=SECRET).items():
        monkeypatch.setenv(name, value)
    error = inside("tune", TUNED, "--ranks", "3", status=2).error
    assert "--ranks must be 2, the number of launched ranks, got 3" in error


def test_two_tasks_of_srun_are_one_study(steptune: Steptune, inside: Inside, free_port: int) -> None:
    """srun's variables, and two tasks of this machine on loopback."""
    told = {"STEPTUNE_HOSTS_SECRET": SECRET, "MASTER_PORT": str(free_port), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "steptune", "tune", TUNED, *QUICK]
    other = subprocess.Popen(
        command,
        cwd=steptune.folder,
        env=steptune.environment(srun(1, **told)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        ended = steptune("tune", TUNED, *QUICK, "--json", variables=srun(0, **told))
        said, _ = other.communicate(timeout=600)
    finally:
        other.kill()
        other.wait()
    assert other.returncode == 0, said
    assert SECRET not in said + ended.out + ended.err
    study = inside("show", "last", "--json").json
    assert study["study"]["environment"]["num_hosts"] == 2
    error = inside("resume", "last", "--budget", "30s", status=2).error
    assert "2 ranks on 2 hosts" in error


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_torchrun_on_one_host_is_a_study_of_its_ranks(steptune: Steptune, inside: Inside) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "steptune", "tune", TUNED, *QUICK],
        cwd=steptune.folder,
        env=steptune.environment({"PYTHONPATH": os.pathsep.join([str(ROOT / "src")])}),
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    environment = inside("show", "last", "--json").json["study"]["environment"]
    assert (environment["num_ranks"], environment["num_hosts"]) == (2, 1)
