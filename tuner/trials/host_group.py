"""The driver's side of a study on several hosts: each host has a trial server, and together they act as one.

`SpreadServer` stands where the connection to a single server does: a job that it is given is started on all hosts,
with as many ranks on each, and has ended when it has ended on all. Nothing above the runner knows of hosts.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from steptune._version import __version__
from steptune.tuner.emulation import HOST_VARIABLE
from steptune.tuner.errors import HostsUnavailableError, PlatformError, RunnerError
from steptune.tuner.trials.connection import ServerConnection
from steptune.tuner.trials.host_files import Version, changed, take_back
from steptune.tuner.trials.host_link import (
    Accepted,
    Close,
    FromAgent,
    FromTrials,
    Hello,
    HostLink,
    Leave,
    LinkBrokenError,
    Open,
    Put,
    Refusal,
    ServerEnded,
    ToTrials,
    Welcome,
)
from steptune.tuner.trials.messages import (
    FromServer,
    Kill,
    Preload,
    RankExited,
    RankMessage,
    ServerReady,
    Start,
    decoder_of,
    encode,
)
from steptune.tuner.trials.server import FAILED_RANK_GRACE_S
from steptune.tuner.workloads.reference import parse_reference, source_digest

ANSWER_S = 10.0
GATHER_S = 300.0
"""Maximum time, in seconds, between the starts of the first and the last host."""
HELLO_S = 10.0
"""Maximum time, in seconds, in which a new connection must prove that it knows the secret."""
MAX_STRANGERS = 64
"""Maximum number of connections that have not yet proved that they know the secret; beyond it the oldest is closed."""


@dataclass
class _Spread:
    """State of a job on several hosts."""

    server: SpreadServer
    running: set[int]
    first_exit_s: float | None = None
    killed: bool = False


class Host:
    """Remote host of the study.

    Attributes:
        lost: Reason for which the host is lost; empty while it is connected.
    """

    def __init__(self, link: HostLink, hello: Hello, address: str, group: HostGroup) -> None:
        self.number = hello.host
        self.place = hello.place
        self.lost = ""
        self._link = link
        self._group = group
        self._name = f"host {hello.host} ({address})"
        self._sent: dict[str, Version] = {}
        self._decoder = decoder_of(FromServer)
        self._waiting = os.eventfd(0, os.EFD_NONBLOCK)
        self._poll = select.epoll()
        self._poll.register(link.fileno(), select.EPOLLIN)
        self._poll.register(self._waiting, select.EPOLLIN)

    def fileno(self) -> int:
        """Return a descriptor that is readable while messages wait, including messages that arrived during a `send`."""
        return self._poll.fileno()

    def send(self, message: Any) -> None:
        try:
            self._link.send(message)
        except LinkBrokenError as error:
            self._lose(error)
        if self._link.has_messages:
            os.eventfd_write(self._waiting, 1)

    def send_files(self, directory: Path) -> None:
        """Send the study's files that the host lacks."""
        for part in changed(directory, self._sent):
            self.send(part)

    def take_messages(self) -> list[FromServer]:
        """Return the messages of the host's trial servers.

        Raises:
            RunnerError: The host is lost, or one of its servers has ended.
        """
        if select.select([self._waiting], [], [], 0)[0]:
            os.eventfd_read(self._waiting)
        try:
            messages = self._link.take_messages()
        except LinkBrokenError as error:
            self._lose(error)
        found: list[FromServer] = []
        for message in messages:
            match message:
                case FromTrials(message=text):
                    found += self._group.merged(self.number, self._decoder.decode(text))
                case Put():
                    self._group.take_back(message, self.number)
                case ServerEnded(server=number, reason=reason):
                    self._group.lose_server(number, f"{self._name}: {reason}")
        return found

    def close(self) -> None:
        self._link.close()
        if not self._poll.closed:
            self._poll.close()
            os.close(self._waiting)

    def _lose(self, error: LinkBrokenError) -> Any:
        self.lost = f"{self._name} is lost: {error}"
        raise RunnerError(self.lost)


@dataclass
class HostGroup:
    """All hosts of a study.

    Args:
        address: Address of this host, as the others reach it.
        patience_s: Maximum time for a lost host to come back, in seconds.
        keep: Function that is called while hosts are missing; an exception in it ends the wait.
    """

    num_hosts: int
    ranks_per_host: int
    address: str
    secret: bytes = field(repr=False)
    workload: str
    directory: Path
    port: int = 0
    patience_s: float = 60.0
    keep: Callable[[], None] = lambda: None
    hosts: dict[int, Host] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._jobs: dict[str, _Spread] = {}
        self._servers: dict[int, SpreadServer] = {}
        self._taken_back: dict[Path, None] = {}
        self._gathered = False
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._listener = socket.create_server(
            ("", self.port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=64
        )
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]

    @property
    def places(self) -> list[str]:
        return [host.place for _, host in sorted(self.hosts.items())]

    # --- coming and going -----------------------------------------------------------------------

    def gather(self) -> None:
        """Wait until all hosts are connected.

        Raises:
            RunnerError: Some hosts did not connect.
            HostsUnavailableError: Hosts on which the study had worked before were lost and did not come back.
        """
        patience_s = self.patience_s if self._gathered else GATHER_S
        deadline = time.monotonic() + patience_s
        strangers: dict[HostLink, tuple[str, float]] = {}
        try:
            while missing := [n for n in range(1, self.num_hosts) if n not in self.hosts]:
                if time.monotonic() > deadline:
                    names = " and ".join(f"host {number}" for number in missing)
                    came_text = "reconnect" if self._gathered else "connect"
                    raise (HostsUnavailableError if self._gathered else RunnerError)(
                        f"{names} did not {came_text} within {patience_s:g} s: check the output there, then run "
                        "`steptune resume` with the same launcher to continue"
                    )
                self.keep()
                self._hear(strangers)
        finally:
            for link in strangers:
                link.close()
        self._gathered = True

    def _hear(self, strangers: dict[HostLink, tuple[str, float]]) -> None:
        """Accept new connections, and read from connections that have not identified themselves; close each after its
        time limit.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for link in strangers:
                selector.register(link, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(0.2)}
        for link, (address, until_s) in list(strangers.items()):
            if link in ready:
                with contextlib.suppress(LinkBrokenError):
                    for hello in link.take_messages()[:1]:
                        del strangers[link]
                        host = self._welcomed(link, hello, address)
                        if host is not None:
                            self.hosts[host.number] = host
            if link in strangers and (link.broken or time.monotonic() > until_s):
                del strangers[link]
                link.close()
        if self._listener in ready:
            self._let_in(strangers)

    def _let_in(self, strangers: dict[HostLink, tuple[str, float]]) -> None:
        with contextlib.suppress(BlockingIOError, LinkBrokenError):
            connection, (address, *_) = self._listener.accept()
            link = HostLink(connection, self.secret, FromAgent, drives=True)
            strangers[link] = address, time.monotonic() + HELLO_S
            if len(strangers) > MAX_STRANGERS:
                first = next(iter(strangers))
                del strangers[first]
                first.close()

    def _welcomed(self, link: HostLink, hello: Any, address: str) -> Host | None:
        """Return the host behind a connection that knows the secret; None if its first message is not a valid
        introduction.

        Raises:
            PlatformError: The study cannot use this host.
        """
        with contextlib.ExitStack() as stack, contextlib.suppress(LinkBrokenError):
            stack.callback(link.close)
            if not isinstance(hello, Hello) or hello.host in self.hosts or not 0 < hello.host < self.num_hosts:
                return None
            if hello.version != __version__:
                reason = f"host {hello.host} has steptune {hello.version}, but the first host has {__version__}"
                link.send(Leave(reason=reason))
                raise PlatformError(f"{reason}: install the same version on all hosts")
            address = address.removeprefix("::ffff:")
            link.send(Welcome(workload=self.workload, source_digest=source_digest(parse_reference(self.workload))))
            answer = link.receive(ANSWER_S)
            if isinstance(answer, Refusal):
                raise PlatformError(f"host {hello.host} ({address}) cannot serve the study: {answer.reason}")
            if isinstance(answer, Accepted):
                stack.pop_all()
                return Host(link, hello, address, self)
        return None

    @contextlib.contextmanager
    def closed_with_reason(self) -> Iterator[None]:
        """Tell the hosts, when the context ends, that the study has ended, and the reason if it failed."""
        reason = "it was interrupted"
        try:
            yield
            reason = ""
        except Exception as error:
            reason = str(error) or reason
            raise
        finally:
            self.close(reason)

    def lost(self) -> list[Host]:
        """Remove the lost hosts from the group, and return them."""
        gone = [host for host in self.hosts.values() if host.lost]
        for host in gone:
            del self.hosts[host.number]
        return gone

    def close(self, reason: str = "") -> None:
        """Tell the hosts that the study has ended."""
        for host in self.hosts.values():
            if not host.lost:
                with contextlib.suppress(RunnerError):
                    host.send(Leave(reason=reason))
            host.close()
        self.hosts.clear()
        self._listener.close()

    # --- servers and their jobs -----------------------------------------------------------------

    def spread(self, local: ServerConnection, variables: dict[str, str], preload: Sequence[str]) -> SpreadServer:
        """Start a server on every other host, in addition to the local one.

        Raises:
            RunnerError: A host is lost; then the local server is closed, too.
        """
        number = max(self._servers, default=-1) + 1
        server = self._servers[number] = SpreadServer(local, self, number, tuple(self.hosts.values()))
        try:
            for host in server.others:
                host.send(Open(server=number, variables=variables, preload=list(preload)))
        except RunnerError:
            server.close()
            raise
        return server

    def take_back(self, part: Put, host: int) -> None:
        """Store a part of a file that ranks left on another host."""
        self._taken_back[take_back(self.directory, part, host)] = None

    def lose_server(self, number: int, reason: str) -> None:
        """Record that a server has ended on one of the hosts.

        Raises:
            RunnerError: The server was in use.
        """
        server = self._servers.get(number)
        if server is not None:
            server.ended = reason
            raise RunnerError(reason)

    def forget_server(self, number: int) -> None:
        self._servers.pop(number, None)
        self._jobs = {name: job for name, job in self._jobs.items() if job.server.number != number}

    def begin(self, job: str, server: SpreadServer) -> None:
        self._clear_traces(job)
        self._jobs[job] = _Spread(server=server, running={0, *(host.number for host in server.others)})

    def _clear_traces(self, job: str) -> None:
        """Remove the traces that other hosts sent in an earlier attempt at a job."""
        folder = self.directory / "trials" / job
        for path in [path for path in self._taken_back if path.parent == folder]:
            del self._taken_back[path]
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}.incoming").unlink(missing_ok=True)

    def merged(self, host: int, message: FromServer) -> list[FromServer]:
        """Return the messages to the parent that result from one host's message. The end of a job is passed on once the
        job has ended on all hosts.
        """
        if isinstance(message, ServerReady | RankMessage):
            return [message]
        job = self._jobs.get(message.job)
        if job is None:
            return [message] if host == 0 else []
        if isinstance(message, RankExited):
            if message.code != 0 and job.first_exit_s is None:
                job.first_exit_s = time.monotonic()
            return [message]
        job.running.discard(host)
        if job.running:
            return []
        del self._jobs[message.job]
        return [message]

    def end_what_is_left(self) -> None:
        """End the other hosts' ranks of every job with a failed rank, as a server does with its own ranks."""
        for name, job in list(self._jobs.items()):
            late = job.first_exit_s is not None and time.monotonic() - job.first_exit_s > FAILED_RANK_GRACE_S
            if late and not job.killed:
                job.killed = True
                job.server.send(Kill(job=name))


class SpreadServer:
    """Connection to the trial servers of all hosts, with the same interface as a connection to a single server.

    Attributes:
        ended: Reason for which it counts as ended, unless the local server has ended.
    """

    def __init__(self, local: ServerConnection, group: HostGroup, number: int, others: tuple[Host, ...]) -> None:
        self.number = number
        self.others = others
        self.ended = ""
        self._local = local
        self._group = group

    @property
    def pid(self) -> int:
        return self._local.pid

    @property
    def temporary(self) -> Path:
        return self._local.temporary

    @property
    def has_ended(self) -> bool:
        return bool(self.ended) or self._local.has_ended or any(host.lost for host in self.others)

    def fileno(self) -> int:
        return self._local.fileno()

    def send(self, message: Any) -> None:
        """Send a message to the servers that need it. Rank 0 and the jobs with a single rank are on this host.

        Raises:
            RunnerError: A server or a host is gone.
        """
        if isinstance(message, Start) and message.num_ranks > 1:
            self._start(message)
            return
        self._local.send(message)
        if isinstance(message, Preload):
            for host in self.others:
                host.send_files(self._group.directory)
        if isinstance(message, Preload | Kill):
            for host in self.others:
                host.send(ToTrials(server=self.number, message=encode(message)))

    def _start(self, message: Start) -> None:
        per_host = message.num_ranks // self._group.num_hosts
        meeting = {
            "MASTER_ADDR": self._group.address,
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(message.num_ranks),
            "LOCAL_WORLD_SIZE": str(per_host),
        }
        self._group.begin(message.job, self)

        def part(number: int) -> Start:
            return msgspec.structs.replace(
                message,
                num_ranks=per_host,
                first_rank=number * per_host,
                total_ranks=message.num_ranks,
                variables={**meeting, HOST_VARIABLE: str(number), "GROUP_RANK": str(number)},
            )

        for host in self.others:
            host.send_files(self._group.directory)
            host.send(ToTrials(server=self.number, message=encode(part(host.number))))
        self._local.send(part(0))

    def take_messages(self) -> list[FromServer]:
        return [said for message in self._local.take_messages() for said in self._group.merged(0, message)]

    def close(self) -> None:
        """End the servers and all of their descendants."""
        self._group.forget_server(self.number)
        for host in self.others:
            if not host.lost:
                with contextlib.suppress(RunnerError):
                    host.send(Close(server=self.number))
        self._local.close()


def _free_port() -> int:
    """Return a port that is free now. If another process takes it before its use, the job fails and is repeated."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
