"""Device nodes that a sandbox shows: the GPUs of a study, and those that their drivers need."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from steptune.service.places import VISIBLE_DEVICES

NODES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia/gpus")
PATTERNS = ("nvidia*", "nvidia-caps/*", "kfd", "dri/*")
_ONE_GPU = re.compile(r"nvidia(\d+)")


def device_nodes(gpus: Sequence[int] | None) -> Iterator[Path]:
    """Yield the device nodes to bind. Of NVIDIA GPUs, only those with the given numbers are bound; None binds all."""
    minors = None if gpus is None else {minor for number, minor in enumerate(_minors()) if number in gpus}
    for pattern in PATTERNS:
        for path in sorted(NODES.glob(pattern)):
            gpu = _ONE_GPU.fullmatch(path.name)
            if not path.is_dir() and (gpu is None or minors is None or int(gpu[1]) in minors):
                yield path


def device_variables(gpus: Sequence[int] | None) -> dict[str, str]:
    """Return environment variables with which CUDA numbers the GPUs in PCI bus order, from 0, counting only those that
    it can open.
    """
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if gpus is None:
        return order
    return {**order, VISIBLE_DEVICES: ",".join(str(sorted(gpus).index(number)) for number in gpus)}


def visible_gpus(text: str | None) -> tuple[int, ...] | None:
    """Return the GPU numbers in CUDA_VISIBLE_DEVICES; None if it is not set, or has entries other than numbers (such as
    UUIDs).
    """
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")] if text else []
    return tuple(map(int, names)) if all(name.isdecimal() for name in names) else None


def _minors() -> list[int]:
    """Return the device minor numbers of the GPUs that this process can open, in PCI bus order."""
    found = []
    for information in sorted(DRIVER.glob("*/information")):
        minor = re.search(r"^Device Minor:\s*(\d+)", information.read_text(errors="replace"), re.MULTILINE)
        found += [int(minor[1])] if minor else []
    nodes = sorted(int(gpu[1]) for path in NODES.glob("nvidia*") if (gpu := _ONE_GPU.fullmatch(path.name)))
    return [minor for minor in found if minor in nodes] or nodes
