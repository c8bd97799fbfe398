"""The launch that a process finds in its variables."""

import os
from pathlib import Path

import pytest

from steptune.service.launched import num_ranks_of, take_place
from steptune.tuner.errors import ChoiceError, PlatformError
from steptune.tuner.trials.connection import NO_SANDBOX, server_environment
from steptune.tuner.trials.launch import find_launch, num_lone_tasks, without_launcher


def torchrun(rank: int, local: int, per_host: int, num_ranks: int, host: int, **others: str) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_host, "WORLD_SIZE": num_ranks}
    place = {"GROUP_RANK": host, "MASTER_PORT": 29400}
    texts = {name: str(number) for name, number in {**numbers, **place}.items()}
    return {**texts, "MASTER_ADDR": "10.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", **others}


def srun(rank: int, local: int, num_ranks: int, num_hosts: int, host: int, **others: str) -> dict[str, str]:
    numbers = {"SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_STEP_NUM_TASKS": num_ranks}
    place = {"SLURM_STEP_NUM_NODES": num_hosts, "SLURM_NODEID": host}
    asked = {"STEPTUNE_HOSTS_SECRET": "s"}
    return {**{name: str(number) for name, number in {**numbers, **place}.items()}, **asked, **others}


def test_a_process_started_alone_has_no_place() -> None:
    assert find_launch({}) is None
    assert find_launch(torchrun(0, 0, 1, 1, 0)) is None
    assert find_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}) is None, "a batch script is one process"
    assert find_launch({"RANK": "1", "WORLD_SIZE": "2"}) is None, "of a pod, not of a process"


def test_a_shell_that_srun_has_opened_changes_nothing() -> None:
    """`srun -n 4 --pty bash`: task 0 of four, and nobody asks for one study of them."""
    shell = {n: v for n, v in srun(0, 0, 4, 1, 0).items() if n != "STEPTUNE_HOSTS_SECRET"}
    assert find_launch(shell) is None
    assert without_launcher(shell) == shell
    assert num_lone_tasks(shell) == 4
    assert num_lone_tasks(srun(0, 0, 4, 1, 0)) == num_lone_tasks({}) == 1


@pytest.mark.parametrize("launched", [True, False])
def test_a_number_of_ranks_is_kept_or_refused(launched: bool) -> None:
    launch = find_launch(torchrun(0, 0, 2, 2, 0)) if launched else None
    assert num_ranks_of(launch, None) == (2 if launched else 1)
    assert num_ranks_of(launch, 2) == 2
    if launched:
        with pytest.raises(ChoiceError, match="--ranks must be 2, the number of launched ranks, got 1"):
            num_ranks_of(launch, 1)


@pytest.mark.parametrize("address", [{}, {"MASTER_ADDR": "10.0.0.1"}])
def test_the_first_rank_drives_the_first_of_other_hosts_serve_and_others_wait(address: dict[str, str]) -> None:
    for number in range(4):
        host, local = divmod(number, 2)
        for variables in (
            torchrun(number, local, 2, 4, host),
            srun(number, local, 4, 2, host, MASTER_ADDR="10.0.0.1"),
        ):
            launch = find_launch(variables)
            assert launch is not None
            assert (launch.drives, launch.serves) == (number == 0, number == 2)
            assert (launch.num_hosts, launch.num_ranks, launch.ranks_per_host) == (2, 4, 2)
            assert launch.address == "10.0.0.1"


def test_torchruns_store_hands_out_what_hosts_need_and_srun_has_none() -> None:
    first, restarted = (find_launch(torchrun(0, 0, 1, 2, 0, TORCHELASTIC_RESTART_COUNT=n)) for n in "01")
    assert first is not None
    assert restarted is not None
    assert first.has_store
    assert first.attempt != restarted.attempt
    started = find_launch(srun(0, 0, 2, 2, 0, MASTER_ADDR="a"))
    assert started is not None
    assert not started.has_store


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        (
            srun(0, 0, 3, 2, 0, MASTER_ADDR="a"),
            "3 tasks on 2 hosts, but every host must run the same number: set --ntasks-per-node",
        ),
        (srun(1, 0, 4, 2, 1, MASTER_ADDR="a"), "rank 1 of 4 is number 0 of 2 on host 1, .*--distribution=block"),
        (srun(0, 0, 4, 2, 0), "MASTER_ADDR is not set.*scontrol show hostnames"),
        (torchrun(3, 0, 2, 5, 1), "same number of ranks on every host: give every host the same --nproc-per-node"),
        (torchrun(0, 0, 2, 4, 0, RANK="first"), "must be whole numbers, got RANK='first'"),
        (torchrun(0, 0, 0, 2, 0), "torchrun set 2 ranks and 0 ranks per host, .* unset its variables"),
        (torchrun(0, 0, 2, 4, 0, MASTER_PORT="abc"), "MASTER_PORT='abc' is not a port: set it to a number"),
        (torchrun(0, 0, 2, 4, 0, MASTER_PORT="70000"), "MASTER_PORT='70000' is not a port"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(variables: dict[str, str], reason: str) -> None:
    with pytest.raises(PlatformError, match=reason):
        find_launch(variables)


def test_ranks_of_trials_see_nothing_of_the_launcher() -> None:
    plain = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7"}
    under_both = {**srun(0, 0, 4, 2, 0), "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}
    for variables in (torchrun(1, 1, 2, 4, 0), torchrun(0, 0, 2, 2, 0), torchrun(0, 0, 1, 1, 0), under_both):
        assert without_launcher({**variables, "STEPTUNE_HOSTS_SECRET": "s", **plain}) == plain
    assert without_launcher({"STEPTUNE_HOSTS_SECRET": "s", "RANK": "0", **plain}) == {"RANK": "0", **plain}


@pytest.mark.parametrize("variables", [torchrun(0, 0, 2, 2, 0), srun(0, 0, 2, 1, 0), {}])
def test_what_the_command_starts_inherits_no_secret(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on one host, and where nothing was launched."""
    for name, value in {**variables, "STEPTUNE_HOSTS_SECRET": "s"}.items():
        monkeypatch.setenv(name, value)
    launch = take_place()
    assert launch is None or launch.secret == "s"
    assert not {"STEPTUNE_HOSTS_SECRET", *variables} & os.environ.keys()


def test_a_trial_server_inherits_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPTUNE_HOSTS_SECRET", "s")
    assert "STEPTUNE_HOSTS_SECRET" not in server_environment(NO_SANDBOX, tmp_path)
