"""Agent that runs trial servers on its host as the driver instructs it: the first rank of every host except the
driver's.

It starts the same server and ranks as on one machine, in a directory of its own, relays messages, and sends back the
files that the ranks left. When the driver is gone, the agent ends everything that it started.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from steptune._version import __version__
from steptune.tuner.errors import PlatformError, RunnerError, SteptuneError
from steptune.tuner.trials.connection import ServerConnection, default_start_method
from steptune.tuner.trials.host_files import of_job, put
from steptune.tuner.trials.host_link import (
    Accepted,
    Close,
    FromDriver,
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
from steptune.tuner.trials.messages import Exit, JobEnded, Preload, Start, ToServer, decoder_of, encode
from steptune.tuner.trials.server_pool import compile_caches
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.workloads.reference import parse_reference, source_digest

RETRY_S = 1.0
FIRST_PATIENCE_S = 300.0
"""Time limit, in seconds, for connecting to the first host, which may start later than this one."""


class HostAgent:
    """Server of one study's trials on this host.

    Args:
        directory: Empty directory that belongs to this host alone.
        patience_s: Maximum time without a connection to the driver, in seconds.
    """

    def __init__(
        self,
        *,
        host: int,
        address: str,
        port: int,
        secret: bytes,
        directory: Path,
        place: str = "",
        python: str = sys.executable,
        patience_s: float = 60.0,
    ) -> None:
        self._host = host
        self._address = address
        self._port = port
        self._secret = secret
        self._files = StudyFiles(directory)
        self._place = place
        self._python = python
        self._patience_s = patience_s
        self._servers: dict[int, ServerConnection] = {}
        self._logs: dict[str, str] = {}
        self._decoder = decoder_of(ToServer)

    def serve(self) -> None:
        """Serve until the study has ended.

        Raises:
            RunnerError: The driver is gone or never answered, or the study has failed.
        """
        patience_s, broken = FIRST_PATIENCE_S, "nothing listens there"
        given_up_s = time.monotonic() + patience_s
        while time.monotonic() < given_up_s:
            try:
                link = self._connected()
            except (OSError, LinkBrokenError) as error:
                broken = str(error)
                time.sleep(RETRY_S)
                continue
            try:
                self._serve(link)
                return
            except LinkBrokenError as error:
                patience_s, broken = self._patience_s, str(error)
                given_up_s = time.monotonic() + patience_s
            finally:
                link.close()
                for number in list(self._servers):
                    self._close(number)
        raise RunnerError(
            f"the first host has been unreachable at {self._address}:{self._port} for {patience_s:g} s ({broken}): "
            "check its output, then run `steptune resume` on all hosts to continue the study"
        )

    def _connected(self) -> HostLink:
        connection = socket.create_connection((self._address, self._port), timeout=10.0)
        link = HostLink(connection, self._secret, FromDriver, drives=False)
        link.send(Hello(host=self._host, version=__version__, place=self._place))
        return link

    def _serve(self, link: HostLink) -> None:
        while True:
            with selectors.DefaultSelector() as selector:
                selector.register(link, selectors.EVENT_READ, None)
                for number, server in self._servers.items():
                    selector.register(server, selectors.EVENT_READ, number)
                ready = [key.data for key, _ in selector.select(0 if link.has_messages else None)]
            for number in [number for number in ready if number is not None]:
                self._relay(link, number)
            for message in link.take_messages() if None in ready or link.has_messages else ():
                if isinstance(message, Leave):
                    if message.reason:
                        raise RunnerError(f"the study has ended on the first host: {message.reason}")
                    return
                self._obey(link, message)

    # --- from the driver ------------------------------------------------------------------------

    def _obey(self, link: HostLink, message: Any) -> None:
        match message:
            case Welcome():
                self._check(link, message)
            case Put():
                put(self._files.directory, message)
            case Open():
                self._open(link, message)
            case Close(server=number):
                self._close(number)
            case ToTrials(server=number, message=text):
                self._tell(link, number, text)

    def _check(self, link: HostLink, message: Welcome) -> None:
        """Refuse the study if this host does not have the same workload."""
        try:
            found = source_digest(parse_reference(message.workload))
            if found != message.source_digest:
                raise PlatformError(
                    f"{message.workload} differs from the first host's file: every host needs the same code"
                )
        except (SteptuneError, OSError) as error:
            link.send(Refusal(reason=str(error)))
            raise PlatformError(str(error)) from None
        link.send(Accepted())

    def _open(self, link: HostLink, message: Open) -> None:
        self._files.make_folders()
        self._files.data.mkdir(exist_ok=True)
        try:
            self._servers[message.server] = ServerConnection(
                python=self._python,
                variables={**compile_caches(self._files.compile_cache), **message.variables},
                preload=message.preload,
                imports=self._files.imports,
                log=self._files.logs / f"server{message.server}.log",
                start_method=default_start_method(),
            )
        except RunnerError as error:
            link.send(ServerEnded(server=message.server, reason=str(error)))

    def _tell(self, link: HostLink, number: int, text: bytes) -> None:
        server, message = self._servers.get(number), self._decoder.decode(text)
        if server is None:
            return
        if isinstance(message, Start):
            message = self._here(message)
        elif isinstance(message, Preload):
            message = Preload(path=str(self._files.imports))
        try:
            server.send(message)
        except RunnerError as error:
            self._lose(link, number, str(error))

    def _here(self, message: Start) -> Start:
        """Return the start message with the paths of this host."""
        payload: dict[str, Any] = msgspec.msgpack.decode(message.payload)
        payload["study_directory"] = str(self._files.directory)
        self._logs[message.job] = Path(message.log).name
        log = str(self._files.logs / self._logs[message.job])
        return msgspec.structs.replace(message, payload=msgspec.Raw(encode(payload)), log=log)

    # --- from the trials ------------------------------------------------------------------------

    def _relay(self, link: HostLink, number: int) -> None:
        try:
            messages = self._servers[number].take_messages()
        except RunnerError as error:
            self._lose(link, number, str(error))
            return
        for message in messages:
            if isinstance(message, JobEnded):
                self._send_back(link, message.job)
            link.send(FromTrials(message=encode(message)))

    def _send_back(self, link: HostLink, job: str) -> None:
        for path, content in of_job(self._files, job, self._logs.pop(job, "")):
            for part in content:
                link.send(part)
            path.unlink(missing_ok=True)

    def _lose(self, link: HostLink, number: int, reason: str) -> None:
        self._close(number)
        link.send(ServerEnded(server=number, reason=reason))

    def _close(self, number: int) -> None:
        server = self._servers.pop(number, None)
        if server is not None:
            with contextlib.suppress(RunnerError):
                server.send(Exit())
            server.close()
