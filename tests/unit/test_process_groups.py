"""Process groups: their ranks, and over how many hosts they reach."""

from pathlib import Path
from typing import Any

import pytest
from trace_events import Event, kernel, launched, operator, step, trace_of

from steptune.tuner.profiling.analysis import analyse_trace
from steptune.tuner.profiling.process_groups import hosts_of, process_groups, reach
from steptune.tuner.profiling.trace import Trace
from steptune.tuner.trace_records import ProcessGroup

SHARDS = {"pg_name": "1", "pg_desc": "mesh_shard", "pg_size": 8, "ranks": list(range(8, 16))}
REPLICAS = {"pg_name": "2", "pg_desc": "mesh_replicate", "pg_size": 2, "ranks": [1, 9]}


def trace(directory: Path, *, rank: int = 9, devices: int = 8, ranks: int = 16, groups: Any = None) -> Trace:
    described = [{"pg_name": "0", "pg_size": ranks, "ranks": []}, SHARDS, REPLICAS] if groups is None else groups
    return trace_of(
        directory,
        [operator("aten::mm", 0, 5)],
        deviceProperties=[{"id": number, "name": "H100"} for number in range(devices)],
        distributedInfo={"backend": "nccl", "rank": rank, "world_size": ranks, "pg_config": described},
    )


def test_groups_are_told_from_where_launchers_put_ranks(tmp_path: Path) -> None:
    """Rank 9 of 16 on the second of 8 devices: two hosts of 8 ranks each."""
    assert process_groups(trace(tmp_path), (1,)) == (
        ProcessGroup(name="0", ranks=tuple(range(16)), num_hosts=2),
        ProcessGroup(name="1", ranks=tuple(range(8, 16)), num_hosts=1),
        ProcessGroup(name="2", ranks=(1, 9), num_hosts=2),
    )


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({}, 3),  # rank 9 is not on the device that the rule gives it
        ({"devices": 1}, 0),  # each process sees its own device only
        ({"rank": 0, "ranks": 2, "groups": [{"pg_name": "0", "pg_size": 2, "ranks": [0, 1]}]}, 0),  # one rank a host?
    ],
)
def test_hosts_are_not_guessed(tmp_path: Path, options: dict[str, Any], device: int) -> None:
    groups = process_groups(trace(tmp_path, **options), (device,))
    assert groups
    assert [group.num_hosts for group in groups] == [None] * len(groups)


@pytest.mark.parametrize("groups", ["all", [3], [{"pg_name": 0, "ranks": ["a"]}], [{}]])
def test_descriptions_of_another_form_do_no_harm(tmp_path: Path, groups: Any) -> None:
    assert all(group.ranks == () for group in process_groups(trace(tmp_path, groups=groups), (1,)))


def test_the_farthest_of_the_groups_of_a_name_counts() -> None:
    groups = [ProcessGroup(name="1", ranks=(0, 1), num_hosts=1), ProcessGroup(name="1", ranks=(2, 9), num_hosts=2)]
    assert reach(hosts_of(groups, "1")) == "across 2 hosts"
    assert reach(hosts_of(groups, "3")) == ""


def test_a_finding_says_which_groups_hold_compute_up(tmp_path: Path) -> None:
    events: list[Event] = []
    for number in range(3):
        begin, ids = 100 * number, {"External id": 1000 + number}
        said = {"Collective name": "allreduce", "Group size": 2, "Process Group Name": "2", "dtype": "Float"}
        said |= {"In msg nelems": 1000, "Out msg nelems": 1000}
        comms = operator("record_param_comms", begin + 10, begin + 14)
        comms["args"] = {**said, **ids}
        reduce = kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", begin + 40, begin + 90, 2 * number + 1, device=1)
        reduce["args"] |= ids
        computes = launched("gemm", begin + 1, begin + 5, begin + 40, 2 * number + 2)
        computes[1]["args"]["device"] = 1
        calls = launched("", begin + 11, 0, 1, 2 * number + 1)[:1]
        events += [step(number, begin, begin + 95), *computes, comms, *calls, reduce]
    described = {"backend": "nccl", "rank": 9, "world_size": 16, "pg_config": [SHARDS, REPLICAS]}
    devices = [{"id": number, "name": "H100"} for number in range(8)]
    analysis, _, _ = analyse_trace(
        trace_of(tmp_path, events, deviceProperties=devices, distributedInfo=described), "trace"
    )
    found = next(finding for finding in analysis.findings if finding.rule == "exposed_communication")
    assert found.evidence["at_1"] == "all_reduce of 2 ranks across 2 hosts: 0.15 ms exposed in 3 calls"
