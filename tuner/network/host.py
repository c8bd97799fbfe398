"""Facts about one host that the checks share; each is read on first use."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from steptune.tuner.network.pci import Function, Pci
from steptune.tuner.network.rdma import DEVICES as RDMA_DEVICES
from steptune.tuner.network.rdma import Port, read_ports
from steptune.tuner.network.settings import read_settings
from steptune.tuner.network.tree import Tree


class Host:
    """A host, represented by the files under a directory.

    Every member raises `UnreadableError` where something that it needs is there but cannot be read.
    """

    def __init__(self, root: Path) -> None:
        self.tree = Tree(root)

    @cached_property
    def pci(self) -> Pci:
        return Pci(self.tree)

    @cached_property
    def ports(self) -> list[Port]:
        return read_ports(self.tree)

    @cached_property
    def settings(self) -> dict[str, str]:
        return read_settings(self.tree)

    @property
    def active_ports(self) -> list[Port]:
        return [port for port in self.ports if port.is_active]

    @property
    def rdma_devices(self) -> list[str]:
        return self.tree.names(RDMA_DEVICES)

    @property
    def nics(self) -> dict[str, Function | None]:
        """PCI function of each RDMA device, by the device's name; None if the host's files do not show it."""
        functions = self.pci.functions
        found = {}
        for device in self.rdma_devices:
            real = self.tree.real(f"{RDMA_DEVICES}/{device}/device") or ""
            found[device] = functions.get(real.rpartition("/")[2])
        return found

    @property
    def gpu_directories(self) -> list[str]:
        """Names of the GPUs' directories in the NVIDIA driver's part of /proc, which exists even where a container
        hides PCI devices.
        """
        return self.tree.names("/proc/driver/nvidia/gpus")

    @property
    def has_gpu(self) -> bool:
        return bool(self.gpu_directories or self.pci.gpus)

    @property
    def endpoints(self) -> list[Function]:
        """GPUs and RDMA NICs, which should be able to transfer data to each other directly."""
        return [*self.pci.gpus, *(nic for nic in self.nics.values() if nic is not None)]

    @property
    def hides_pci(self) -> bool:
        """True if the host has more devices than its PCI tree shows, as in containers and incomplete copies."""
        num_gpus = max(len(self.gpu_directories), len(self.pci.gpus))
        return len(self.endpoints) < num_gpus + len(self.rdma_devices)
