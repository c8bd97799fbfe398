"""NCCL's choices in its log: the algorithm and protocol of collectives, channels, sockets.

`NCCL_DEBUG=INFO` with the subsystems below logs the algorithm and protocol of every collective ("AllReduce: 4000 Bytes
-> Algo RING proto SIMPLE channel{Lo..Hi}={0..1}", since NCCL 2.23) and, where a variable restricts the choice, those
that remain ("Enabled NCCL Func/Proto/Algo Matrix"). A variable that was set proves nothing: NCCL ignores what it cannot
do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from steptune.tuner.records import Record

VARIABLES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,TUNING"}
"""Environment variables that make NCCL log its choices; NCCL_DEBUG_FILE is set separately."""

_COLLECTIVE = re.compile(r"(\w+): \d+ Bytes -> Algo (\w+) proto (\w+)")
_CHANNELS = re.compile(r"(\d+) coll channels")
_SOCKETS = re.compile(r"NET/Socket: Using (\d+) threads and (\d+) sockets per thread")
_ALL_REDUCE = re.compile(r"^ *AllReduce \|([ 0-9]+)\|([ 0-9]+)$")
_PROTOCOLS = ("ll", "ll128", "simple")
_ALGORITHMS = ("tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")


class NcclChoices(Record):
    """NCCL's choices in one process.

    Attributes:
        algorithms: Algorithms of all-reduces that ran; where the log does not record these, the algorithms that NCCL
            could choose from.
        protocols: Protocols of all collectives that ran, or else those that NCCL could choose from.
        channels: Channels of the communicator with the fewest, and of that with the most; None where the log does not
            record them.
        sockets: Distinct pairs of threads and sockets per thread; empty where no connection uses sockets.
    """

    algorithms: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()
    channels: tuple[int, int] | None = None
    sockets: tuple[tuple[int, int], ...] = ()


def read_choices(lines: Iterable[str]) -> NcclChoices:
    """Read NCCL's choices from the log of one process."""
    algorithms: set[str] = set()
    protocols: set[str] = set()
    left: tuple[set[str], set[str]] = (set(), set())
    channels: set[int] = set()
    sockets: set[tuple[int, int]] = set()
    for line in lines:
        if found := _COLLECTIVE.search(line):
            protocols.add(found[3].lower())
            if found[1] == "AllReduce":
                algorithms.add(found[2].lower())
        elif found := _CHANNELS.search(line):
            channels.add(int(found[1]))
        elif found := _SOCKETS.search(line):
            sockets.add((int(found[1]), int(found[2])))
        elif found := _ALL_REDUCE.match(line.rstrip()):
            left = (_enabled(found[2], _ALGORITHMS), _enabled(found[1], _PROTOCOLS))
    return NcclChoices(
        algorithms=tuple(sorted(algorithms if protocols else left[0])),
        protocols=tuple(sorted(protocols or left[1])),
        channels=(min(channels), max(channels)) if channels else None,
        sockets=tuple(sorted(sockets)),
    )


def _enabled(columns: str, names: tuple[str, ...]) -> set[str]:
    return {name for name, flag in zip(names, columns.split(), strict=False) if flag != "0"}
