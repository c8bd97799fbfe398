"""The process that holds a study's hosts on a Ray cluster, for as long as its standard input is open.

A process of its own: the driver of a study has neither Ray's threads nor its memory, Ray's signals stay here, and
when the cluster's head is lost, this process is lost, and not the study. Ray does the scheduling: one placement group
for the study's life, one actor for each host, started anew by Ray where a node is lost.

    python -m steptune.service.on_ray.reservation  < a ReservationRequest as a line of JSON, then nothing until the end

Sources: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html ,
https://docs.ray.io/en/latest/ray-core/fault_tolerance/actors.html
"""

from __future__ import annotations

import importlib
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from steptune.service.on_ray.actor import RayHost
from steptune.service.on_ray.messages import Event, Failed, ReservationRequest, Reserved, Waiting
from steptune.tuner.errors import PlatformError
from steptune.tuner.wording import counted

HEAD = "node:__internal_head__"
"""Resource that Ray gives to the head node of a cluster, and to no other node."""
LOOK_S = 0.5
ACTOR_START_S = 120.0
LEAVE_S = 10.0
"""Maximum seconds for agents to remove their files after the study; twice as many if the driver did not report the end
of the study.
"""
STRANGER_S = 60.0
CONNECTED, REFUSED = 0, 3
_STRANGER = f"""
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(sys.argv[1])
except AuthenticationError:
    sys.exit({REFUSED})
"""
Tell = Callable[[Event], None]


class Reservation:
    """A Ray placement group and its actors.

    Args:
        tell: Function that sends events.
        given_up: Function that says whether the reservation is no longer wanted.
    """

    def __init__(self, request: ReservationRequest, tell: Tell, given_up: Callable[[], bool]) -> None:
        self._ray: Any = importlib.import_module("ray")
        self._util: Any = importlib.import_module("ray.util")
        self._request = request
        self._tell = tell
        self._given_up = given_up
        self._group: Any = None
        self._actors: list[Any] = []
        self._last: Event | None = None

    def hold(self) -> None:
        """Reserve hosts, start the actors, and hold them until they are no longer wanted.

        Raises:
            PlatformError: The reservation cannot be met.
        """
        address = self._request.address
        self._ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="steptune")
        try:
            if not self._request.insecure:
                require_token(self._ray.get_runtime_context().gcs_address)
            self._reserve()
            if self._group is None:
                return
            self._start_actors()
            while not self._given_up():
                self._look()
        finally:
            self._release()

    # --- reserving ------------------------------------------------------------------------------

    def _reserve(self) -> None:
        me = self._ray.get_runtime_context().get_node_id()
        bundle = self._bundle(me)
        hosts = self._request.num_hosts
        selectors = [{"ray.io/node-id": me}, *[{}] * (hosts - 1)]  # the driver's ranks are on its own node
        group = self._util.placement_group(
            [bundle] * hosts, strategy=self._request.strategy, bundle_label_selector=selectors
        )
        timeout_s = self._request.timeout_s
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not group.wait(LOOK_S):
            lack = self._lack(bundle)
            if self._given_up():
                self._util.remove_placement_group(group)
                return
            if time.monotonic() > deadline:
                self._util.remove_placement_group(group)
                raise PlatformError(
                    f"Ray has not reserved the hosts within {timeout_s:g} s: {lack.text}. Request less, free "
                    "the cluster, add nodes, or wait longer with STEPTUNE_RAY_TIMEOUT_S"
                )
            self._tell_once(lack)
        self._group, self._resources = group, bundle

    def _bundle(self, me: str) -> dict[str, float]:
        """Return the resources of one host.

        Raises:
            PlatformError: The driver's node can never provide them.
        """
        [here] = [node["Resources"] for node in self._ray.nodes() if node["NodeID"] == me]
        gpus, ranks = int(here.get("GPU", 0)), self._request.ranks_per_host
        if self._request.device == "cpu" or (self._request.device is None and not gpus):
            # A rank uses every core that is its own, so that a study shares none: it takes whole hosts.
            cpus = float(here.get("CPU", 0))
            if not cpus:
                raise PlatformError(
                    "the node of this process has no CPU in Ray, but the ranks of the first host run there: "
                    "start `steptune` on a node with CPUs"
                )
            return {"CPU": cpus}
        if gpus < ranks:
            raise PlatformError(
                f"each host needs {ranks} GPUs, but the node of this process, where the ranks of the first host "
                f"run, has {gpus} in Ray: start `steptune` on a node with enough GPUs"
            )
        return {"GPU": float(ranks), "CPU": float(ranks)}

    def _lack(self, bundle: dict[str, float]) -> Waiting:
        """Compare the request with the cluster's resources, and return what is lacking and whether waiting can help."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        able = sum(all(node.get(name, 0) >= number for name, number in bundle.items()) for node in nodes)
        free = self._ray.available_resources()
        asked = " and ".join(f"{number:g} {name}" for name, number in bundle.items())
        has = " and ".join(
            f"{free.get(name, 0):g} of {sum(node.get(name, 0) for node in nodes):g} {name}" for name in bundle
        )
        several = self._request.num_hosts > 1
        can_be_met = able >= self._request.num_hosts
        text = (
            f"the study needs {counted(self._request.num_hosts, 'host')} with "
            f"{asked}{' each' if several else ''}{' on separate nodes' if several else ''}; the cluster has "
            f"{counted(len(nodes), 'node')}, {able} of them large enough, and {has} free: "
            f"{_prospect(can_be_met)}"
        )
        return Waiting(text=text, can_be_met=can_be_met, cluster=self._cluster())

    def _cluster(self) -> str:
        """Return the identity of the cluster, the same on all of its nodes; empty while its head node is not known."""
        heads = [node["NodeID"] for node in self._ray.nodes() if node["Alive"] and HEAD in node["Resources"]]
        return heads[0] if heads else ""

    def _tell_once(self, event: Event) -> None:
        if event != self._last:
            self._last = event
            self._tell(event)

    # --- actors ---------------------------------------------------------------------------------

    def _start_actors(self) -> None:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        address = self._util.get_node_ip_address()
        for number in range(self._request.num_hosts):
            order = None
            if number:
                order = msgspec.structs.replace(
                    self._request.order,
                    host=number,
                    address=address,
                    num_gpus=int(self._resources.get("GPU", 0)),
                )
            options = {
                "num_cpus": self._resources["CPU"],
                "num_gpus": self._resources.get("GPU", 0),
                "max_restarts": -1,
                "max_task_retries": -1,
                "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=number
                ),
            }
            self._actors.append(self._ray.remote(RayHost).options(**options).remote(order))
        self._gpus = self._ray.get([actor.gpus.remote() for actor in self._actors], timeout=ACTOR_START_S)

    def _reserved(self) -> Reserved:
        table = self._util.placement_group_table(self._group)
        nodes = [table["bundles_to_node_id"][number] for number in range(self._request.num_hosts)]
        gpus = self._gpus[0] if "GPU" in self._resources else ""
        return Reserved(address=self._util.get_node_ip_address(), gpus=gpus, nodes=nodes, cluster=self._cluster())

    def _look(self) -> None:
        """Report a lost host, and its replacement by Ray."""
        if self._util.placement_group_table(self._group)["state"] == "CREATED":
            self._tell_once(self._reserved())
        else:
            self._tell_once(self._lack(self._resources))

    def _release(self) -> None:
        try:
            left = [actor.leave.remote(LEAVE_S) for actor in self._actors]
            self._ray.wait(left, num_returns=len(left), timeout=2 * LEAVE_S) if left else None
            for actor in self._actors:
                self._ray.kill(actor)
            if self._group is not None:
                self._util.remove_placement_group(self._group)
        finally:
            self._ray.shutdown()


def _prospect(possible: bool) -> str:
    if possible:
        return "the study starts once other users release enough hosts"
    return "the cluster's current nodes can never meet this request: add nodes, or request less"


def main() -> None:
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # Ray prints, and what the driver reads are events

    def tell(event: Event) -> None:
        events.write(msgspec.json.encode(event) + b"\n")

    def given_up() -> bool:
        return bool(select.select([0], [], [], LOOK_S)[0]) and not os.read(0, 1)

    request = msgspec.json.decode(_line(), type=ReservationRequest)
    try:
        Reservation(request, tell, given_up).hold()
    except PlatformError as error:
        tell(Failed(reason=str(error), lasting=True))
    except Exception as error:
        tell(Failed(reason=_reason(error)))
        raise


def require_token(address: str) -> None:
    """Refuse a cluster that accepts clients without a token.

    Raises:
        PlatformError: The cluster does so, or that cannot be determined.
    """
    open_to_all = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    command = [sys.executable, "-c", _STRANGER, address]
    done = subprocess.run(command, env=open_to_all, capture_output=True, text=True, timeout=STRANGER_S, check=False)
    if done.returncode == CONNECTED:
        raise PlatformError(
            "the cluster accepts clients without a token, so that anyone who can connect to it can run code on "
            "its nodes: start the whole cluster with RAY_AUTH_MODE=token, or give --insecure-ray if nobody "
            "else can reach its network"
        )
    if done.returncode != REFUSED:
        said = done.stderr.strip().rpartition("\n")[2]
        raise PlatformError(
            f"Steptune cannot determine whether the cluster requires a token ({said}): give --insecure-ray to "
            "trust the cluster"
        )


def _reason(error: BaseException) -> str:
    """Return an error's message, with the last line of its cause."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    text = str(error).strip().partition("\n")[0]
    origin = str(first).strip().rpartition("\n")[2]
    return f"{type(error).__name__}: {text}" + (f" ({origin})" if origin != text else "")


def _line() -> bytes:
    """Read the first line of standard input, and no byte more, because `select` must see the end of input."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


if __name__ == "__main__":
    main()
    sys.stdout.flush()
