"""Hardware on which a training runs, and its measured peak rates."""

from __future__ import annotations

import hashlib

import msgspec

from steptune.tuner.records.base import Record


class Device(Record):
    """Device on which a training runs.

    Attributes:
        name: Product name.
        memory_bytes: Memory of the device.
        capability: Compute capability of a CUDA device, such as "9.0".
    """

    kind: str
    """Kind of device: "cpu" or "cuda"."""
    name: str
    memory_bytes: int
    capability: str | None = None


class HardwareProfile(Record):
    """Hardware and software versions that figures depend on; never holds host names or addresses.

    Attributes:
        devices: Devices that a study may use.
        num_cores: CPU cores that may be used.
        cpu_name: Product name of the CPU.
        memory_bytes: Memory of the host.
    """

    devices: tuple[Device, ...]
    num_cores: int
    cpu_name: str
    memory_bytes: int
    links: dict[str, str] = msgspec.field(default_factory=dict)
    """Kind of link between each pair of devices, such as {"0-1": "NV18"}; empty with one device."""
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    """Versions of torch and Python and, where present, CUDA, driver, cuDNN and NCCL."""

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:16]

    @property
    def device_kind(self) -> str:
        return self.devices[0].kind

    @property
    def label(self) -> str:
        if self.device_kind == "cpu":
            return f"{self.cpu_name}, {self.num_cores} core{'s' * (self.num_cores != 1)}"
        return f"{len(self.devices)} x {self.devices[0].name}"


class Calibration(Record):
    """Measured peak rates of the device, from which the lower limits of step times are computed."""

    matmul_flops_per_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Highest measured rate of a square matmul, by dtype name ("float32", "bfloat16", ...)."""
    copy_bytes_per_s: float = 0.0
    """Bytes read plus bytes written per second of a large copy."""
