"""Ray clusters of tests: nodes that are processes of this machine, with token authentication, ended by their ids."""

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from steptune.service.isolation import choose
from steptune.service.on_ray import hosts as on_ray
from steptune.service.on_ray.hosts import Reservation
from steptune.service.on_ray.messages import AgentOrder, ReservationRequest
from steptune.service.settings import Settings
from steptune.tuner.records import Study, StudySettings
from steptune.tuner.trials.host_group import HostGroup

ROOT = Path(__file__).parents[2]
OBJECT_STORE_BYTES = 80_000_000
START_S = 60.0
QUICK_LOSS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
"""A node that is gone is lost after a few seconds."""


def require_ray() -> None:
    """Skips the test where Ray is not installed; CI installs it."""
    if importlib.util.find_spec("ray") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("Ray is not installed: `make install` installs the extra `ray`")
        pytest.skip("Ray is not installed: pip install 'steptune[ray]'")


class Node:
    """A node of a cluster, in a session of its own."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str], log: Path, network: Path | None) -> None:
        self.log = log
        within = ["nsenter", f"--net={network}", "--"] if network else []
        command = [*within, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def processes(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def kill(self) -> None:
        """Kills it with all that runs on it, as a machine that loses its power."""
        found = self.processes()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        self.process.wait()


class Cluster:
    """A head and other nodes on this machine.

    Args:
        cpus: Of each node, as it says; the head first.
        num_gpus: Likewise, of all.
        networks: Of the nodes; without them, all are in that of the test.

    Attributes:
        variables: By which a command finds the cluster and is let in.
    """

    def __init__(
        self, folder: Path, cpus: Sequence[int], *, num_gpus: int, with_token: bool, networks: Sequence[Path]
    ) -> None:
        self._folder = folder
        self._cpus = cpus
        self._num_gpus = num_gpus
        self._networks = networks
        self._num_starts = 0
        self.address = f"{'10.77.0.1' if networks else '127.0.0.1'}:{_free_port()}"
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if with_token else {}
        self.nodes: list[Node] = []

    def start(self) -> None:
        """Starts all nodes, again where they were closed: a cluster that knows nothing of the one before."""
        self._num_starts += 1
        session = self._folder / str(self._num_starts)
        session.mkdir()
        port = self.address.rpartition(":")[2]
        head, *others = self._cpus
        self._add("--head", "--port", port, "--include-dashboard", "false", "--temp-dir", str(session), cpus=head)
        for number in others:
            self._add("--address", self.address, cpus=number)

    def _add(self, *arguments: str, cpus: int) -> None:
        """Adds a node and waits until the cluster has it."""
        number = len(self.nodes)
        size = ("--num-cpus", str(cpus), "--num-gpus", str(self._num_gpus))
        memory = ("--object-store-memory", str(OBJECT_STORE_BYTES))
        place = ("--node-ip-address", f"10.77.0.{number + 1}" if self._networks else "127.0.0.1")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("STEPTUNE_", "RAY_"))},
            **self.variables,
            **QUICK_LOSS,
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(ROOT / "src"),
            "GLOO_SOCKET_IFNAME": f"link{number}" if self._networks else "lo",
        }
        network = self._networks[number] if self._networks else None
        node = Node((*arguments, *size, *memory, *place), environment, self._folder / f"node{number}.log", network)
        self.nodes.append(node)
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in node.log.read_text():
            assert node.process.poll() is None, node.log.read_text()
            assert time.monotonic() < deadline, node.log.read_text()
            time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        return [process for node in self.nodes for process in node.processes()]

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.kill()
        self.nodes = []


@contextmanager
def ray_cluster(
    *cpus: int, num_gpus: int = 0, with_token: bool = True, networks: Sequence[Path] = ()
) -> Iterator[Cluster]:
    """A cluster whose nodes have so many CPUs, the head first, and say that they have GPUs."""
    require_ray()
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a socket's path may have 107 bytes
    cluster = Cluster(folder, cpus, num_gpus=num_gpus, with_token=with_token, networks=networks)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def reserved_by_ray(cluster: Cluster, workload: str, directory: Path, **settings: Any) -> Iterator[HostGroup | None]:
    """The hosts of a study that the cluster reserves."""
    study = Study(
        study_id="study",
        workload=workload,
        settings=StudySettings(device="cpu", **settings),
        created_at="",
        directory=str(directory),
    )
    service = Settings(data_directory=directory / "data", ray_timeout_s=60.0)
    variables = {**cluster.variables, "PYTHONPATH": str(ROOT / "src")}
    known = on_ray.Cluster(address=cluster.address, insecure=False, variables=variables)
    level = choose("none", sys.executable)
    with on_ray.reserved_hosts(known, study, service, level, print, timeout_s=60.0) as (hosts, _):
        yield hosts


@contextmanager
def reservation(
    cluster: Cluster,
    directory: Path,
    *,
    num_hosts: int = 1,
    ranks: int = 1,
    device: str = "cpu",
    timeout_s: float = 60.0,
    token: str = "",
) -> Iterator[tuple[Reservation, list[str]]]:
    """A reservation that is still to be made, and what it says to people."""
    order = AgentOrder(port=0, secret="", folder=str(directory / "hosts"), patience_s=1.0, variables={})
    request = ReservationRequest(
        address=cluster.address,
        num_hosts=num_hosts,
        ranks_per_host=ranks,
        device=device,
        timeout_s=timeout_s,
        insecure=False,
        order=order,
    )
    variables = {**cluster.variables, "PYTHONPATH": str(ROOT / "src")}
    if token:
        variables["RAY_AUTH_TOKEN"] = token
    said: list[str] = []
    known = on_ray.Cluster(address=cluster.address, insecure=False, variables=variables)
    made = Reservation(known, request, directory / "ray.log", said.append)
    try:
        yield made, said
    finally:
        made.close()
