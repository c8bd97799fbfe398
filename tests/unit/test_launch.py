"""What a process makes of the variables of its launcher."""

import pytest

from steptune.tuner.errors import PlatformError
from steptune.tuner.trials.launch import find_launch, without_launcher


def torchrun(rank: int, local: int, per_host: int, num_ranks: int, host: int, **others: str) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_host, "WORLD_SIZE": num_ranks}
    place = {"GROUP_RANK": host, "MASTER_PORT": 29400}
    texts = {name: str(number) for name, number in {**numbers, **place}.items()}
    return {**texts, "MASTER_ADDR": "10.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", **others}


def srun(rank: int, local: int, num_ranks: int, num_hosts: int, host: int, **others: str) -> dict[str, str]:
    numbers = {"SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_STEP_NUM_TASKS": num_ranks}
    place = {"SLURM_STEP_NUM_NODES": num_hosts, "SLURM_NODEID": host}
    return {**{name: str(number) for name, number in {**numbers, **place}.items()}, **others}


def test_a_process_started_alone_has_no_place() -> None:
    assert find_launch({}) is None
    assert find_launch(torchrun(0, 0, 1, 1, 0)) is None
    assert find_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}) is None, "a batch script is one process"
    assert find_launch({"RANK": "1", "WORLD_SIZE": "2"}) is None, "of a pod, not of a process"


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
        (srun(0, 0, 3, 2, 0, MASTER_ADDR="a"), "3 tasks on 2 hosts; every host needs as many: give --ntasks-per-node"),
        (srun(1, 0, 4, 2, 1, MASTER_ADDR="a"), "rank 1 of 4 is number 0 of 2 on host 1; .*--distribution=block"),
        (srun(0, 0, 4, 2, 0), "MASTER_ADDR is not set.*scontrol show hostnames"),
        (torchrun(3, 0, 2, 5, 1), "as many on every host: give every host the same --nproc-per-node"),
        (torchrun(0, 0, 2, 4, 0, RANK="first"), "no numbers: RANK='first'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(variables: dict[str, str], reason: str) -> None:
    with pytest.raises(PlatformError, match=reason):
        find_launch(variables)


def test_ranks_of_trials_see_nothing_of_the_launcher() -> None:
    kept = without_launcher(
        {**torchrun(1, 1, 2, 4, 0), "STEPTUNE_HOSTS_SECRET": "s", "PATH": "/bin", "NCCL_DEBUG": "INFO"}
    )
    assert kept == {"PATH": "/bin", "NCCL_DEBUG": "INFO"}
