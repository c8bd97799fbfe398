"""Hosts of a study on a Ray cluster, seen from the driver: a separate process holds their reservation and reports on
it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from steptune.service.isolation import Level
from steptune.service.launched import MIN_SECRET_LENGTH, refuse_isolated
from steptune.service.on_ray.actor import CHANGED_BY_RAY, is_of_ray
from steptune.service.on_ray.messages import AgentOrder, Event, Failed, ReservationRequest, Reserved, Waiting
from steptune.service.places import VISIBLE_DEVICES
from steptune.service.settings import Settings
from steptune.tuner.errors import ChoiceError, HostsUnavailableError, MissingDependencyError, PlatformError, RunnerError
from steptune.tuner.records import Study
from steptune.tuner.trials.host_group import HostGroup

AUTH_MODE = "RAY_AUTH_MODE"
RETRY_S = 2.0
CLOSE_S = 30.0
_COMMAND = (sys.executable, "-m", "steptune.service.on_ray.reservation")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The Ray cluster that a command uses.

    Attributes:
        insecure: Whether the cluster may accept clients without a token.
        variables: Ray's environment variables, including its token; for the reservation's process only.
    """

    address: str
    insecure: bool
    variables: Mapping[str, str] = field(repr=False)


def take_cluster(address: str, *, insecure: bool) -> Cluster:
    """Return the cluster to use, and remove Ray's variables, including its token, from this process's environment.

    Raises:
        MissingDependencyError: The extra `ray` is not installed.
        PlatformError: Ray's token authentication is off.
    """
    if importlib.util.find_spec("ray") is None:
        raise MissingDependencyError("--runner ray needs Ray: pip install 'steptune[ray]'")
    if os.environ.get(AUTH_MODE) != "token" and not insecure:
        raise PlatformError(
            f"{AUTH_MODE} must be token, got {os.environ.get(AUTH_MODE, '')!r}: without a token, anyone who can "
            "connect to Ray can run code on its nodes. Start the cluster and this command with "
            f"{AUTH_MODE}=token, or give --insecure-ray if nobody else can reach its network"
        )
    variables = {name: value for name, value in os.environ.items() if is_of_ray(name)}
    for name in variables:
        del os.environ[name]
    return Cluster(address=address, insecure=insecure, variables=variables)


class Reservation:
    """The hosts of one study, held by a separate process until this object is closed.

    Args:
        on_text: Function that takes a status line while the study waits.
        log: Function that takes the output of that process.
        check: Called while the study waits, and when it has its hosts; what it raises ends the wait.

    Attributes:
        lack: What the cluster lacks at this moment, or why it cannot be asked; empty where it lacks nothing.
        can_be_met: Whether the cluster has said that its present nodes can give the hosts.
        cluster: Identity of the cluster, the same for all that ask it; empty until it has answered.
        address: Address of the driver's node, once reserved.
        gpus: The study's GPUs on the driver's node, as CUDA_VISIBLE_DEVICES names them; empty on CPUs.
    """

    def __init__(
        self,
        cluster: Cluster,
        request: ReservationRequest,
        log: Path,
        on_text: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.lack = ""
        self.can_be_met = False
        self.cluster = ""
        self.address = ""
        self.gpus = ""
        self._cluster = cluster
        self._request = request
        self._log = log
        self._on_text = on_text
        self._check = check
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._retry_s = 0.0
        self._visible_before = os.environ.get(VISIBLE_DEVICES)

    def reserve(self) -> None:
        """Wait until the hosts are reserved.

        Raises:
            HostsUnavailableError: The cluster cannot be reached.
            RunnerError: The study cannot have the hosts, or has not got them in time.
        """
        self._start()
        while not self.address:
            self._check()
            for event in self._events(timeout_s=0.5):
                if isinstance(event, Failed):
                    raise (RunnerError if event.lasting else HostsUnavailableError)(self._text(event))
                self._take(event)
        self._check()

    def keep(self) -> None:
        """Reserve the hosts again if the reservation is lost, for instance because the cluster's head node failed.
        Called while hosts are missing.

        Raises:
            RunnerError: Another attempt is useless.
        """
        self._check()
        if self._process is None and time.monotonic() >= self._retry_s:
            self._start()
        for event in self._events(timeout_s=0.0):
            if isinstance(event, Failed):
                if event.lasting:
                    raise RunnerError(self._text(event))
                self.lack = self._text(event)
                self._on_text(f"{self.lack}; asking again")
                self._retry_s = time.monotonic() + RETRY_S
                self._end()
                return
            self._take(event)

    def check(self) -> None:
        """Raise an error if the reservation is lost. This check is for a study on one host.

        Raises:
            RunnerError: The reservation is lost.
        """
        for event in self._events(timeout_s=0.0):
            if isinstance(event, Failed):
                raise RunnerError(f"{self._text(event)}; continue the study with `steptune resume`")
            self._take(event)

    def close(self) -> None:
        """Release the hosts."""
        self._end()
        os.environ.pop(VISIBLE_DEVICES, None)
        if self._visible_before is not None:
            os.environ[VISIBLE_DEVICES] = self._visible_before

    # --- the process ----------------------------------------------------------------------------

    def _start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._buffer = b""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self._cluster.variables},
                start_new_session=True,  # Ctrl-C is the driver's, which gives the hosts back
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(self._request) + b"\n")
            self._process.stdin.flush()

    def _events(self, timeout_s: float) -> list[Event]:
        """Return the events that the reservation's process has reported. The end of that process counts as a failure,
        unless the process has reported one itself.
        """
        if self._process is None:
            return []
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return []
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        if not data:
            code = self._process.wait()
            printed = self._log.read_text("utf-8", "replace").strip().rpartition("\n")[2]
            return [Failed(reason=f"the process that holds the reservation exited with status {code} ({printed})")]
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [msgspec.json.decode(line, type=Event) for line in lines]

    def _take(self, event: Event) -> None:
        if isinstance(event, Waiting):
            self.lack, self.can_be_met, self.cluster = event.text, event.can_be_met, event.cluster
            self._on_text(f"waiting for Ray: {event.text}")
        elif isinstance(event, Reserved):
            self.lack, self.can_be_met, self.cluster = "", True, event.cluster
            self.address, self.gpus = event.address, event.gpus
            os.environ[VISIBLE_DEVICES] = self.gpus  # of all that this process starts from now on
            names = " and ".join(node[:8] for node in event.nodes)
            self._on_text(f"reserved by Ray: {'node' if len(event.nodes) == 1 else 'nodes'} {names}")

    def _text(self, event: Failed) -> str:
        return f"Ray at {self._cluster.address}: {event.reason}"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@contextlib.contextmanager
def reserved_hosts(
    cluster: Cluster,
    study: Study,
    settings: Settings,
    level: Level,
    on_text: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
    check_waiting: Callable[[Reservation], None] = lambda reservation: None,
    *,
    timeout_s: float | None,
) -> Iterator[tuple[HostGroup | None, Callable[[], None]]]:
    """Reserve the hosts of a study on a cluster for as long as it runs, and yield them; None if there is only one.

    Also yields the runner's check, which extends `check` by the hosts.

    Args:
        on_text: Function that takes a status line while the study waits.
        check: The runner's check of other conditions, which the yielded one calls too.
        check_waiting: Called some times a second while the study waits and no trial runs, and once when it has its
            hosts; an exception ends the wait.
        timeout_s: Maximum seconds for the cluster to reserve the hosts; None for as long as `check_waiting` permits.

    Raises:
        IsolationUnavailableError: The study has several hosts, and its trials are to be isolated.
        HostsUnavailableError: The cluster cannot be reached, or has not replaced a host that was lost.
        RunnerError: The study cannot have the hosts, or has not got them in time.
    """
    secret = secrets.token_hex(MIN_SECRET_LENGTH)
    with contextlib.ExitStack() as stack:
        group = None
        if study.settings.num_hosts > 1:
            refuse_isolated(level)
            group = _host_group(study, settings, secret)
        request = _request(cluster, study, settings, group, secret, timeout_s)
        log = Path(study.directory).absolute() / "logs" / "ray.log"
        reservation = Reservation(cluster, request, log, on_text, lambda: check_waiting(reservation))
        stack.callback(reservation.close)
        if group is not None:
            stack.enter_context(group.closed_with_reason())
        reservation.reserve()

        def look() -> None:
            check()
            if group is None:
                reservation.check()

        try:
            if group is not None:
                group.address = reservation.address
                group.keep = reservation.keep
                group.gather()
            yield group, look
        except RunnerError as error:
            if reservation.lack:
                raise HostsUnavailableError(f"{error}; {reservation.lack}") from error
            raise


def _host_group(study: Study, settings: Settings, secret: str) -> HostGroup:
    return HostGroup(
        num_hosts=study.settings.num_hosts,
        ranks_per_host=ranks_of_each(study),
        address="",
        secret=secret.encode(),
        workload=study.workload,
        directory=Path(study.directory).absolute(),
        patience_s=settings.ray_timeout_s,
    )


def _request(
    cluster: Cluster, study: Study, settings: Settings, group: HostGroup | None, secret: str, timeout_s: float | None
) -> ReservationRequest:
    order = AgentOrder(
        port=group.port if group else 0,
        secret=secret,
        folder=str(settings.data_directory.absolute() / "hosts"),
        patience_s=settings.host_patience_s,
        variables={name: os.environ[name] for name in CHANGED_BY_RAY if name in os.environ},
    )
    return ReservationRequest(
        address=cluster.address,
        num_hosts=study.settings.num_hosts,
        ranks_per_host=ranks_of_each(study),
        device=study.settings.device,
        timeout_s=timeout_s,
        insecure=cluster.insecure,
        order=order,
    )


def ranks_of_each(study: Study) -> int:
    """Return the number of ranks on each host.

    Raises:
        ChoiceError: The ranks cannot be spread evenly.
    """
    ranks, hosts = study.settings.num_ranks, study.settings.num_hosts
    if ranks % hosts:
        raise ChoiceError(f"the number of ranks must be a multiple of the number of hosts ({hosts}), got {ranks}")
    return ranks // hosts
