"""Place of a measurement: a machine, with its cores and GPUs, as hashes and numbers without names."""

from __future__ import annotations

import hashlib
import os
import platform
import uuid
from collections.abc import Iterable
from pathlib import Path

from steptune.tuner.hardware import allowed_cores
from steptune.tuner.records import Record

CORE = "core"
CUDA = "cuda"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Slot(Record):
    """A core or a device of a host, by its number on the host."""

    kind: str
    number: int


def place_of(host: str, slots: Iterable[Slot], others: str = "") -> str:
    """Return a place as text: "3f2a91c07b1d core 0,1 cuda 0"."""
    numbers: dict[str, list[int]] = {}
    for slot in slots:
        numbers.setdefault(slot.kind, []).append(slot.number)
    devices = [f"{kind} {','.join(str(n) for n in sorted(found))}" for kind, found in sorted(numbers.items())]
    return " ".join(part for part in (host, *devices, others) if part)


def this_place() -> str:
    """Return the place of this process's measurements: the machine, and the cores and GPUs that it may use."""
    visible = os.environ.get(VISIBLE_DEVICES)
    cores = [Slot(kind=CORE, number=core) for core in allowed_cores()]
    return place_of(host_id(), cores, f"{CUDA} {visible}" if visible else "")


def host_id() -> str:
    """Return the hashed identity of this machine. All containers of a host have the same identity, because they share
    its cores.
    """
    try:
        identity = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        identity = f"{platform.node()}-{uuid.getnode()}"
    return hashlib.sha256(f"steptune host {identity}".encode()).hexdigest()[:12]
