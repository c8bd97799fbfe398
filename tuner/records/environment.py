"""Environment of a study: hardware, links and software."""

from __future__ import annotations

from steptune.tuner.records.base import Record
from steptune.tuner.records.hardware import Calibration, HardwareProfile
from steptune.tuner.records.topology import Topology


class Environment(Record):
    """Facts that strategies may rely on: the hardware, and the software beside it.

    Attributes:
        hardware: What figures depend on.
        calibration: Its measured ceilings.
        num_ranks: Processes of the training.
        num_hosts: That they are on.
        start_methods: How processes can be started: "fork", "spawn".
        free_disk_bytes: When the study began.
        free_memory_bytes: When the study began.
    """

    hardware: HardwareProfile
    calibration: Calibration = Calibration()
    compiler: str | None = None
    """Path of a C++ compiler that torch.compile can use."""
    num_ranks: int = 1
    num_hosts: int = 1
    topology: Topology | None = None
    """The links between the ranks; None with one rank, and where they were not measured."""
    start_methods: tuple[str, ...] = ("fork",)
    free_disk_bytes: int = 0
    free_memory_bytes: int = 0
