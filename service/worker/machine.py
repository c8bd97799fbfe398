"""Machine of a worker: its host, its cores and GPUs, and its hardware profile.

The profile comes from a trial server, once for a machine and its versions: it is stored in the data directory, so that
a restarted worker can run studies at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys

import msgspec

from steptune._version import __version__
from steptune.service.isolation import Level
from steptune.service.places import CUDA, VISIBLE_DEVICES, host_id
from steptune.service.queue import WorkerOffer
from steptune.service.running import isolated_runner
from steptune.service.settings import Settings
from steptune.tuner.emulation import refuse_parts
from steptune.tuner.errors import ChoiceError
from steptune.tuner.hardware import torch_version
from steptune.tuner.records import HardwareProfile, new_id
from steptune.tuner.trials.scratch import scratch_directory

NO_GPUS = "none"
WHOLE_GPUS = "workers claim whole GPUs"
NVIDIA_SMI_TIMEOUT_S = 60
"""Timeout of nvidia-smi in seconds; long, because without persistence mode nvidia-smi makes the driver initialise every
device.
"""


def parse_numbers(text: str) -> tuple[int, ...]:
    """Parse numbers of cores or devices: "0-3,6" is 0, 1, 2, 3 and 6.

    Raises:
        ChoiceError: The text is no such list.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ChoiceError(f"{text!r} is not a list of numbers: write it like 0, or 0-3,6")
        numbers.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(numbers))


def use_cores(cores: tuple[int, ...] | None) -> tuple[int, ...]:
    """Bind this process, and all processes that it starts, to these cores; None keeps the present ones.

    Raises:
        ChoiceError: Some of them are not available to this process.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS cannot bind
        if cores is not None:
            raise ChoiceError(f"processes cannot be bound to cores on {sys.platform}: leave --cpus out")
        return tuple(range(os.cpu_count() or 1))
    available = os.sched_getaffinity(0)
    missing = sorted(set(cores or ()) - available)
    if missing:
        raise ChoiceError(f"--cpus must name cores that this process may use ({sorted(available)}), got {missing}")
    chosen = set(cores) if cores is not None else available
    os.sched_setaffinity(0, chosen)
    return tuple(sorted(chosen))


def use_gpus(gpus: str | None) -> None:
    """Show only these GPUs to all processes that this one starts; None shows all, "none" shows none."""
    if gpus is not None:
        os.environ[VISIBLE_DEVICES] = "" if gpus == NO_GPUS else ",".join(str(n) for n in parse_numbers(gpus))


def named_gpus(text: str) -> tuple[int, ...]:
    """Return the numbers of the GPUs that CUDA_VISIBLE_DEVICES names by number or UUID, in the order of that variable,
    which is also their order in the hardware profile.

    Where UUIDs are named, numbers are made to follow the PCI bus for all that this process starts, as the driver's do.

    Raises:
        ChoiceError: A name is not that of a whole GPU of this machine.
    """
    names = [name.strip() for name in text.split(",")]
    names = names[: names.index("-1")] if "-1" in names else names  # CUDA looks no further
    if all(name.isdecimal() for name in names):
        return tuple(map(int, names))
    uuids = _gpu_uuids()
    numbers = []
    for name in names:
        found = [number for number, uuid in uuids.items() if name == str(number) or uuid.startswith(name)]
        if len(found) != 1 or not name:
            raise ChoiceError(
                f"{VISIBLE_DEVICES} names {name!r}, which is not a GPU that nvidia-smi lists on this machine: "
                "name whole GPUs by number or UUID; parts of a GPU (MIG) cannot be claimed"
            )
        numbers += found
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return tuple(numbers)


def _gpu_uuids() -> dict[int, str]:
    """Return the UUIDs of GPUs by number; empty where the driver's tool does not answer."""
    command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    pairs = (line.partition(",") for line in done.stdout.splitlines())
    return {int(number): uuid.strip() for number, _, uuid in pairs}


def offer_of_this_machine(
    settings: Settings,
    level: Level,
    *,
    name: str,
    cores: tuple[int, ...],
    python: str = sys.executable,
    max_hosts: int = 1,
    reserves: bool = False,
) -> WorkerOffer:
    """Return the offer of a worker on these cores, with the visible GPUs.

    Raises:
        ChoiceError: The names of its GPUs are not those of whole GPUs.
        PlatformError: One GPU would count as several.
    """
    refuse_parts(WHOLE_GPUS)
    profile = _known_profile(settings, level, cores, python)
    gpus: tuple[int, ...] = ()
    if profile.device_kind == CUDA:
        visible = os.environ.get(VISIBLE_DEVICES)
        gpus = named_gpus(visible)[: len(profile.devices)] if visible else tuple(range(len(profile.devices)))
    return WorkerOffer(
        worker_id=new_id(),
        name=name,
        host_id=host_id(),
        profile=profile,
        cores=cores,
        gpus=gpus,
        isolation=level.name,
        version=__version__,
        max_hosts=max_hosts,
        reserves=reserves,
    )


def _known_profile(settings: Settings, level: Level, cores: tuple[int, ...], python: str) -> HardwareProfile:
    circumstances = (host_id(), cores, os.environ.get(VISIBLE_DEVICES), python, torch_version(), __version__)
    key = hashlib.sha256(repr(circumstances).encode()).hexdigest()[:16]
    path = settings.data_directory / "hardware" / f"{key}.json"
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=HardwareProfile)
    profile = _described(settings, level, python)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{new_id()}.new")
    fresh.write_bytes(msgspec.json.encode(profile))
    fresh.replace(path)
    return profile


def _described(settings: Settings, level: Level, python: str) -> HardwareProfile:
    """Return the hardware profile from a trial server, because this process does not load torch."""
    with (
        scratch_directory() as folder,
        isolated_runner(
            workload="zoo:synthetic", directory=folder / "describe", settings=settings, level=level, python=python
        ) as runner,
    ):
        return runner.describe().hardware
