"""Record of the log that NCCL writes under NCCL_DEBUG=INFO.

A log has lines of NCCL 2.4 to 2.27 (logs of these are in the tests), of one rank or of many, with any prefix of a
launcher or logger. Unknown lines are skipped; nothing in a log is an error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from steptune.tuner.network.tree import UnreadableError
from steptune.tuner.records import Record

MAX_LINE = 20_000
"""Maximum number of characters of a line that are parsed; the line of a ring over thousands of ranks is shorter."""
MAX_TEXT = 500
"""Maximum number of characters of a warning that are kept; its meaning is at the beginning."""
MAX_WARNINGS = 50
"""Maximum number of different warnings that are kept; a hang can repeat one with a new address in every line."""


class Transport(StrEnum):
    """Transport between two ranks.

    P2P: from GPU to GPU, over NVLink or PCIe. SHM: through host memory. RDMA: InfiniBand, RoCE or a plug-in's network
    (EFA, …). SOCKET: TCP. COLLNET: reductions in the network's switches.
    """

    P2P = "P2P"
    SHM = "SHM"
    RDMA = "RDMA"
    SOCKET = "socket"
    COLLNET = "CollNet"


class ChannelPath(Record):
    """Connections of one channel that use the same transport.

    Attributes:
        network: NCCL's name of the network ("IB", "Socket", "AWS Libfabric"); empty inside a host.
        way: Method of reaching a GPU inside a host ("CUMEM", "IPC", "direct pointer", "direct").
        gpu_direct: Whether the NIC reads and writes the GPU's memory.
    """

    channel: int
    transport: Transport
    network: str = ""
    way: str = ""
    gpu_direct: bool = False
    num_connections: int = 0


class Nic(Record):
    """NIC chosen by NCCL. `link` is "IB" or "RoCE"; `relaxed_ordering` is what NCCL reports for all NICs together."""

    name: str
    port: int
    link: str
    relaxed_ordering: bool = False


class Distance(Record):
    """A GPU and a NIC that are too far apart for GPUDirect RDMA: more hops than NCCL's limit."""

    gpu: str
    nic: str
    hops: int
    limit: int


class Said(Record):
    """A message and its number of occurrences; addresses and numbers are those of the first occurrence."""

    text: str
    count: int


class NcclLog(Record):
    """The log of one run, from one file or from one file per rank.

    Attributes:
        num_lines: Number of lines from NCCL; if it is 0, nothing else in this record has a meaning.
        versions: Versions of NCCL, such as "2.21.5+cuda12.4".
        num_ranks: Number of ranks in the largest communicator.
        num_nodes: Number of nodes in the largest communicator, where NCCL states it.
        num_hosts: Number of hosts that wrote the log.
        networks: Networks that NCCL chose ("Using network …"): "IB", "Socket", …
        nics: NICs that NCCL found for RDMA.
        interfaces: Interfaces for sockets and set-up.
        settings: Variables, as NCCL read them.
        rings: Order of ranks in each ring of the largest communicator, by channel.
        num_trees: Number of trees of one communicator.
        uses_nvls: Whether NVSwitch computes reductions (NVLS).
        gpu_direct: Whether GPUDirect RDMA is available, by NIC.
        has_no_device, has_no_library: Whether NCCL looked for RDMA and found no device, or no libibverbs.
        is_complete: Whether a communicator became ready.
        warnings: NCCL's warnings, the most frequent first.
        errors: Results of calls that failed, and collectives that timed out.
    """

    num_lines: int = 0
    versions: tuple[str, ...] = ()
    num_ranks: int = 0
    num_nodes: int = 0
    num_hosts: int = 0
    networks: tuple[str, ...] = ()
    nics: tuple[Nic, ...] = ()
    interfaces: tuple[str, ...] = ()
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    paths: tuple[ChannelPath, ...] = ()
    rings: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
    num_trees: int = 0
    uses_nvls: bool = False
    gpu_direct: dict[str, bool] = msgspec.field(default_factory=dict)
    distances: tuple[Distance, ...] = ()
    has_dma_buf: bool = False
    has_no_device: bool = False
    has_no_library: bool = False
    is_complete: bool = False
    warnings: tuple[Said, ...] = ()
    errors: tuple[Said, ...] = ()

    def connections(self, *transports: Transport, gpu_direct: bool | None = None) -> int:
        """Return the number of connections with these transports over all channels. If `gpu_direct` is given, count
        only connections that use GPUDirect RDMA (True) or do not use it (False).
        """
        return sum(
            path.num_connections
            for path in self.paths
            if path.transport in transports and gpu_direct in (None, path.gpu_direct)
        )


def read_log(lines: Iterable[str]) -> NcclLog:
    """Parse log lines, in any order and from any number of ranks, into one record."""
    reader = _Reader()
    for line in lines:
        reader.take(line)
    return reader.log()


def read_logs(paths: Sequence[Path]) -> tuple[NcclLog, list[UnreadableError]]:
    """Return the record of one run's files, and errors for the files that cannot be read."""
    unreadable: list[UnreadableError] = []

    def lines() -> Iterator[str]:
        for path in paths:
            try:
                with path.open("rb") as file:
                    while line := file.readline(MAX_LINE):
                        yield line.decode("utf-8", "replace")
            except OSError as error:
                unreadable.append(UnreadableError(str(path), (error.strerror or str(error)).lower()))

    return read_log(lines()), unreadable


_LINE = re.compile(r"NCCL (INFO|WARN) (.*)")
_HOST = re.compile(r"(?<![^\s:\[\]])([^\s:\[\]]+):\d+:\d+ \[")
_VERSION = re.compile(r"\b[NR]CCL version (\d[\w.+-]*)")
_RANKS = re.compile(r"comm 0x\w+ rank \d+ n[rR]anks (\d{1,9})")
_NODES = re.compile(r"\bnNodes (\d{1,9})")
_SETTING = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.*)")
_NETWORK = re.compile(r"Using (?:internal )?[nN]etwork (.+)")
_NICS = re.compile(r"NET/IB ?: Using (.*)")
_NIC = re.compile(r"(?<![\w.+-])([\w.+-]+):(\d{1,9})/(IB|RoCE)\b")
_SOCKETS = re.compile(r"(?:NET/Socket|Bootstrap) ?: ?Using (.*)")
_INTERFACE = re.compile(r"(?<![\w.@-])([\w.@-]+):\S{1,60}<\d+>")
_CONNECTION = re.compile(
    r"(?:Channel|Ring) (\d{1,9})(?:/\d+)? : -?\d+(?:\[\w+\])? -> -?\d+(?:\[\w+\])? (?:\[(?:send|receive)\] )?via (.+)"
)
_COLLNET = re.compile(r"Coll[Nn]et (\d{1,9})(?:/\d+)? : .* via (COLLNET/.+)")
_OVER_NETWORK = re.compile(r"(?:NET|COLLNET)/(.+?)/\d+(?:\(\d+\))?(.*)")
_RING = re.compile(r"Channel (\d{1,9})(?:/\d+)? ?:((?:\s+\d{1,9})+)\s*")
_TREES = re.compile(r"Trees((?: \[\d+\] \S+)+)")
_GPU_DIRECT = re.compile(r"NET/(?!Socket)\w[^:]* : GPU Direct RDMA (Enabled|Disabled) for HCA \d+ '([^']*)'")
_DISTANCE = re.compile(
    r"(?<!NET/Socket : )GPU Direct RDMA Disabled for GPU (\S+) / HCA (\S+) \(distance (\d{1,9}) >=? (\d{1,9})\)"
)
_ERROR = re.compile(
    r"(nccl(?:System|UnhandledCuda|Internal|Remote)Error|ncclInvalid(?:Usage|Argument)|NCCL failure\b.*"
    r"|Watchdog caught collective operation timeout.*)"
)
_VARYING = re.compile(r"0x[0-9a-f]+|(?<!\d)(?<!error )(?<!status=)\d+|(?<=nccl-)\w+")
"""Parts of a message that vary between repetitions. Error numbers are not among them: 4 and 12 have different causes.
"""


class _Reader:
    """Parser that builds the record from the lines read so far."""

    def __init__(self) -> None:
        self.num_lines = self.num_ranks = self.num_nodes = self.num_trees = 0
        self.hosts: set[str] = set()
        self.versions: dict[str, None] = {}
        self.networks: dict[str, None] = {}
        self.interfaces: dict[str, None] = {}
        self.nics: dict[tuple[str, int], Nic] = {}
        self.settings: dict[str, str] = {}
        self.connections: Counter[ChannelPath] = Counter()
        self.rings: dict[int, tuple[int, ...]] = {}
        self.gpu_direct: dict[str, bool] = {}
        self.distances: dict[Distance, None] = {}
        self.flags: set[str] = set()
        self.warnings = _Sayings()
        self.errors = _Sayings()

    def take(self, line: str) -> None:
        line = line.rstrip("\r\n")[:MAX_LINE]
        if error := _ERROR.search(line):
            self.errors.add(error[1])
        version = _VERSION.search(line)
        if version:
            self.versions[version[1]] = None
        match = _LINE.search(line)
        self.num_lines += bool(match or version)
        if not match:
            return
        if host := _HOST.search(line):
            self.hosts.add(host[1])
        if match[1] == "WARN":
            self.warnings.add(match[2].strip())
        else:
            self._information(match[2].strip())

    def _information(self, text: str) -> None:
        """Parse one line of NCCL INFO; a line holds at most one fact, except for the line with ranks and nodes."""
        if match := _CONNECTION.match(text) or _COLLNET.match(text):
            if path := _channel_path(int(match[1]), match[2]):
                self.connections[path] += 1
        elif match := _RING.fullmatch(text):
            self._ring(int(match[1]), match[2])
        elif match := _TREES.match(text):
            self.num_trees = max(self.num_trees, match[1].count(" ["))
        elif match := _SETTING.match(text):
            self.settings[match[1]] = match[2].strip().removesuffix(".")
        else:
            self._network(text)

    def _network(self, text: str) -> None:
        if match := _NETWORK.match(text):
            self.networks[match[1].strip()] = None
        elif match := _NICS.match(text):
            for name, port, link in _NIC.findall(match[1]):
                number = int(port)
                ordering = "[RO]" in match[1]
                self.nics[name, number] = Nic(name=name, port=number, link=link, relaxed_ordering=ordering)
        elif match := _SOCKETS.match(text):
            self.interfaces.update(dict.fromkeys(_INTERFACE.findall(match[1])))
        elif match := _GPU_DIRECT.search(text):
            self.gpu_direct[match[2]] = match[1] == "Enabled"
        elif match := _DISTANCE.search(text):
            hops, limit = (int(number) for number in match.group(3, 4))
            self.distances[Distance(gpu=match[1], nic=match[2], hops=hops, limit=limit)] = None
        else:
            self._communicator(text)

    def _communicator(self, text: str) -> None:
        if match := _RANKS.search(text):
            self.num_ranks = max(self.num_ranks, int(match[1]))
        if match := _NODES.search(text):
            self.num_nodes = max(self.num_nodes, int(match[1]))
        self.flags.update(flag for flag in _FLAGS if flag in text)

    def _ring(self, channel: int, ranks: str) -> None:
        ring = tuple(int(rank) for rank in ranks.split())
        if len(ring) > 1 and len(ring) >= len(self.rings.get(channel, ())):
            self.rings[channel] = ring

    def log(self) -> NcclLog:
        paths = [msgspec.structs.replace(path, num_connections=count) for path, count in self.connections.items()]
        return NcclLog(
            num_lines=self.num_lines,
            versions=tuple(self.versions),
            num_ranks=self.num_ranks,
            num_nodes=self.num_nodes,
            num_hosts=len(self.hosts),
            networks=tuple(self.networks),
            nics=tuple(self.nics.values()),
            interfaces=tuple(self.interfaces),
            settings=self.settings,
            paths=tuple(sorted(paths, key=lambda path: (path.channel, path.transport, -path.num_connections))),
            rings=self.rings,
            num_trees=self.num_trees,
            uses_nvls="NVLS comm" in self.flags,
            gpu_direct=self.gpu_direct,
            distances=tuple(self.distances),
            has_dma_buf="DMA-BUF is available" in self.flags,
            has_no_device="NET/IB : No device found" in self.flags,
            has_no_library="Failed to open libibverbs" in self.flags,
            is_complete="Init COMPLETE" in self.flags,
            warnings=self.warnings.most_frequent(),
            errors=self.errors.most_frequent(),
        )


_FLAGS = (
    "NVLS comm",
    "DMA-BUF is available",
    "NET/IB : No device found",
    "Failed to open libibverbs",
    "Init COMPLETE",
)


class _Sayings:
    """Messages by text; those that differ only in numbers and addresses count as one."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def add(self, text: str) -> None:
        text = text[:MAX_TEXT]
        key = _VARYING.sub("#", text)
        if key in self._first or len(self._first) < MAX_WARNINGS:
            self._first.setdefault(key, text)
            self._counts[key] += 1

    def most_frequent(self) -> tuple[Said, ...]:
        return tuple(Said(text=self._first[key], count=count) for key, count in self._counts.most_common())


def _channel_path(channel: int, via: str) -> ChannelPath | None:
    """Return the transport of a connection; None where it is not known."""
    via = via.strip()
    if match := _OVER_NETWORK.match(via):
        network = match[1]
        if via.startswith("COLLNET"):
            transport = Transport.COLLNET
        else:
            transport = Transport.SOCKET if network == "Socket" else Transport.RDMA
        return ChannelPath(channel=channel, transport=transport, network=network, gpu_direct="/GDRDMA" in match[2])
    if via.startswith("P2P/"):
        return ChannelPath(channel=channel, transport=Transport.P2P, way=via.split("/")[1])
    if via.startswith("SHM") or via == "direct shared memory":
        return ChannelPath(channel=channel, transport=Transport.SHM)
    return None
