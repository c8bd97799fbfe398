"""The machine that trains, and what it can do at most."""

from __future__ import annotations

import hashlib

import msgspec

from steptune.tuner.records.base import Record


class Device(Record):
    """A device that trains.

    Attributes:
        name: Of the product.
        memory_bytes: Its memory.
        capability: Of a CUDA device, like "9.0".
    """

    kind: str
    """"cpu" or "cuda"."""
    name: str
    memory_bytes: int
    capability: str | None = None


class HardwareProfile(Record):
    """Hardware and versions that figures depend on. Never host names or addresses.

    Attributes:
        devices: Those that a study may use.
        num_cores: Cores of the processor that may be used.
        cpu_name: Of the product.
        memory_bytes: Of the host.
    """

    devices: tuple[Device, ...]
    num_cores: int
    cpu_name: str
    memory_bytes: int
    links: dict[str, str] = msgspec.field(default_factory=dict)
    """Kind of link between devices: {"0-1": "NV18"}; empty on one device."""
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    """torch, python, and where present cuda, driver, cudnn, nccl."""

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:16]

    @property
    def device_kind(self) -> str:
        return self.devices[0].kind

    @property
    def label(self) -> str:
        if self.device_kind == "cpu":
            return f"{self.cpu_name}, {self.num_cores} cores"
        return f"{len(self.devices)} x {self.devices[0].name}"


class Calibration(Record):
    """Measured ceilings of the device, the floors of the bounds."""

    matmul_flops_per_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Best rate of a square matmul by dtype name ("float32", "bfloat16", ...)."""
    copy_bytes_per_s: float = 0.0
    """Bytes read plus bytes written per second of a large copy."""
