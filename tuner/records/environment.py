"""Environment of a study: hardware, links and software."""

from __future__ import annotations

from steptune.tuner.records.base import Record
from steptune.tuner.records.hardware import Calibration, HardwareProfile
from steptune.tuner.records.topology import Topology


class Environment(Record):
    """Facts about the hardware and the software that strategies may rely on.

    Attributes:
        hardware: Hardware profile.
        calibration: Measured peak rates of the hardware.
        num_ranks: Processes of the training.
        num_hosts: Number of hosts on which the processes run.
        start_methods: Ways to start processes that the platform supports: "fork", "spawn".
        free_disk_bytes: Free disk space when the study began.
        free_memory_bytes: Free memory when the study began.
    """

    hardware: HardwareProfile
    calibration: Calibration = Calibration()
    compiler: str | None = None
    """Path of a C++ compiler that torch.compile can use."""
    num_ranks: int = 1
    num_hosts: int = 1
    topology: Topology | None = None
    """Links between the ranks; None with one rank, and where they were not measured."""
    start_methods: tuple[str, ...] = ("fork",)
    free_disk_bytes: int = 0
    free_memory_bytes: int = 0
