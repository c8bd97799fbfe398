"""Inspection of this machine, of its links between ranks, and of a workload, outside of a study."""

from __future__ import annotations

import tempfile
from pathlib import Path

from steptune.service.described import WORKLOADS
from steptune.service.running import chosen_level, isolated_runner
from steptune.service.settings import Settings
from steptune.tuner.errors import ChoiceError
from steptune.tuner.protocols import ProgressListener, StudyStore
from steptune.tuner.records import Environment, Topology, WorkloadFacts
from steptune.tuner.search.preparation import LONGEST_LINKS_S
from steptune.tuner.workloads.reference import format_reference
from steptune.tuner.workloads.zoo import known_reference


def look_here(workload: str | None, device: str | None) -> tuple[Environment, tuple[WorkloadFacts, ...]]:
    """Inspect the environment and a workload. If no workload is given, use example workloads such that every strategy
    applies to at least one.
    """
    reference = format_reference(known_reference(workload)) if workload else "zoo:synthetic"
    with tempfile.TemporaryDirectory(prefix="steptune-") as folder:
        settings = Settings()
        level = chosen_level(settings)
        with isolated_runner(
            workload=reference, directory=Path(folder), settings=settings, level=level, device=device or ""
        ) as runner:
            environment = runner.describe()
            return environment, (runner.inspect(),) if workload else WORKLOADS


def measure_links(
    store: StudyStore,
    *,
    device: str | None,
    num_ranks: int | None,
    remeasure: bool,
    listener: ProgressListener = lambda progress: None,
) -> Topology:
    """Return the links between ranks on this machine: stored ones after a check, else newly measured and stored.

    Args:
        num_ranks: Number of ranks; None for one on every GPU, or two on a CPU.
        remeasure: Measure again even if the links are known.

    Raises:
        ChoiceError: There would be only one rank, or a rank without a device.
    """
    environment, _ = look_here(None, device)
    hardware = environment.hardware
    num_gpus = len(hardware.devices) if hardware.device_kind == "cuda" else None
    ranks = num_ranks or num_gpus or 2
    if num_gpus is not None and ranks > num_gpus:
        raise ChoiceError(
            f"--ranks {ranks} needs a device for each rank, but this machine has {hardware.label}: use fewer "
            "ranks, or --device cpu"
        )
    if ranks < 2:
        raise ChoiceError(
            "the number of ranks must be at least 2 to measure links: use --ranks 2, with --device cpu on a "
            "machine with one GPU"
        )
    known = None if remeasure else store.topology(hardware, ranks, environment.num_hosts)
    settings = Settings()
    with (
        tempfile.TemporaryDirectory(prefix="steptune-") as folder,
        isolated_runner(
            workload="zoo:synthetic",
            directory=Path(folder),
            settings=settings,
            level=chosen_level(settings),
            device=hardware.device_kind,
            num_ranks=ranks,
            listener=listener,
        ) as runner,
    ):
        topology = runner.measure_topology(hardware, known, LONGEST_LINKS_S)
    assert topology is not None, "a measurement with two or more ranks must return a topology"
    if topology != known:
        store.save_topology(topology)
    return topology
