"""Entry point of a forked (or spawned) rank: runs the requested entry and reports how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from steptune.tuner.records import Environment, Failure, FailureKind, Phase, Record, TrialSpec
from steptune.tuner.trials.messages import Channel, Failed, TaskDone, encode


class DescribeRequest(Record):
    """Request of the parent for a description of the environment. An empty device lets torch choose."""

    study_directory: str
    device: str = ""
    num_ranks: int = 1
    run_id: str = ""


def run_rank(entry: str, payload: bytes, rank: int, num_ranks: int, channel: Channel) -> int:
    """Run the requested entry (a trial or another task) as one rank.

    Returns:
        The exit status: 0, or 1 after a failure that was reported.
    """
    if entry == "trial":
        return _run_trial(payload, rank, channel)
    try:
        answer = _TASKS[entry](payload, rank, num_ranks, channel)
        channel.send(TaskDone(result=msgspec.Raw(encode(answer))))
        return 0
    except BaseException as error:
        return _report(error, Phase.BUILD, rank, channel)


def _run_trial(payload: bytes, rank: int, channel: Channel) -> int:
    from steptune.tuner.trials.trial import TrialRun

    run = TrialRun(msgspec.msgpack.decode(payload, type=TrialSpec), rank, channel)
    try:
        try:
            run.run()
            return 0
        finally:
            # torch raises the death of a loader worker from a signal handler, wherever that finds the
            # interpreter; not while the failure is being reported. It does so once for each loader.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except BaseException as error:
        return _report(error, run.phase, rank, channel, worker_code=run.crashed_worker(error))


def _report(error: BaseException, phase: Phase, rank: int, channel: Channel, worker_code: int | None = None) -> int:
    from steptune.tuner.trials.failures import failure_of, is_of_the_group

    with contextlib.suppress(OSError):  # the log may be on the disk whose being full is the failure
        traceback.print_exc()
    failure = failure_of(error, phase, rank)
    if worker_code is not None:
        end = f"was killed by signal {-worker_code}" if worker_code < 0 else f"exited with status {worker_code}"
        failure = Failure(
            kind=FailureKind.CRASH,
            phase=phase,
            rank=rank,
            signal=-worker_code if worker_code < 0 else None,
            message=f"a loader worker {end}: {failure.message}",
            traceback=failure.traceback,
        )
    with contextlib.suppress(OSError):
        channel.send(Failed(failure=failure, consequence=worker_code is None and is_of_the_group(error)))
    return 1


# --- entries that are not trials --------------------------------------------------------------


def _inspect(payload: bytes, rank: int, num_ranks: int, channel: Channel) -> Any:
    from steptune.tuner.trials.inspection import InspectRequest, inspect_workload

    return inspect_workload(msgspec.msgpack.decode(payload, type=InspectRequest), rank, num_ranks, channel)


def _check(payload: bytes, rank: int, num_ranks: int, channel: Channel) -> Any:
    from steptune.tuner.trials.inspection import CheckRequest, check_workload

    return check_workload(msgspec.msgpack.decode(payload, type=CheckRequest), channel)


def _describe(payload: bytes, rank: int, num_ranks: int, channel: Channel) -> Any:
    from steptune.tuner.hardware import checked_device, describe_environment
    from steptune.tuner.trials.host_networks import check_host_networks

    check_host_networks()
    request = msgspec.msgpack.decode(payload, type=DescribeRequest)
    device = checked_device(request.device)
    directory = Path(request.study_directory)
    environment = describe_environment(device, directory, request.num_ranks)
    return environment if num_ranks == 1 else _of_all_hosts(environment, request, rank, num_ranks, channel)


def _of_all_hosts(
    environment: Environment, request: DescribeRequest, rank: int, num_hosts: int, channel: Channel
) -> Environment:
    """Return the first host's environment on every host.

    Raises:
        PlatformError: The hosts differ.
    """
    import torch

    from steptune.tuner.errors import PlatformError
    from steptune.tuner.hardware import first_difference
    from steptune.tuner.trials.coordination import Coordinator
    from steptune.tuner.trials.study_files import StudyFiles

    directory = StudyFiles(Path(request.study_directory)).trial_directory(request.run_id)
    coordinator = Coordinator(rank, num_hosts, channel, directory, torch.device("cpu"))
    profiles = coordinator.gather(environment.hardware)
    found = (first_difference(profiles[0], other) for other in profiles[1:])
    differing = [f"host {n} has {what}" for n, what in enumerate(found, start=1) if what]
    if differing := coordinator.agree(differing):
        raise PlatformError(f"the hosts differ: {'; '.join(differing)}. A study requires hosts of the same kind")
    agreed: Environment = coordinator.agree(msgspec.structs.replace(environment, num_hosts=num_hosts))
    return agreed


def _reference(payload: bytes, rank: int, num_ranks: int, channel: Channel) -> Any:
    from steptune.tuner.trials.reference import ReferenceRequest, make_reference

    return make_reference(msgspec.msgpack.decode(payload, type=ReferenceRequest), rank, num_ranks, channel)


def _train(payload: bytes, rank: int, num_ranks: int, channel: Channel) -> Any:
    from steptune.tuner.trials.training_run import TrainRequest, train

    return train(msgspec.msgpack.decode(payload, type=TrainRequest), rank, num_ranks, channel)


def _topology(payload: bytes, rank: int, num_ranks: int, channel: Channel) -> Any:
    from steptune.tuner.trials.topology import TopologyRequest, measure_topology

    return measure_topology(msgspec.msgpack.decode(payload, type=TopologyRequest), rank, num_ranks, channel)


_TASKS: dict[str, Callable[[bytes, int, int, Channel], Any]] = {
    "check": _check,
    "inspect": _inspect,
    "describe": _describe,
    "reference": _reference,
    "train": _train,
    "topology": _topology,
}


def main() -> None:
    """Run a rank in a fresh interpreter, where forking a process that has torch loaded is not safe (macOS)."""
    from steptune.tuner.trials.processes import die_with_parent, redirect_output

    entry, descriptor, rank, num_ranks, server_pid, log = sys.argv[1:7]
    die_with_parent(int(server_pid))
    redirect_output(log)
    channel = Channel.from_descriptor(int(descriptor))
    payload = channel.receive()
    code = 70 if payload is None else run_rank(entry, payload, int(rank), int(num_ranks), channel)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
