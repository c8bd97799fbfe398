"""Messages between the process that holds a reservation, the study's driver, and the agents of the hosts."""

from __future__ import annotations

from steptune.tuner.records import Record

STRICT_PACK = "STRICT_PACK"
STRICT_SPREAD = "STRICT_SPREAD"


class AgentOrder(Record):
    """Order to the agent of a host; its last three fields are filled in when the host is known."""

    port: int
    secret: str
    folder: str
    patience_s: float
    variables: dict[str, str]
    """Variables of the driver's environment that Ray would change in its own processes."""
    host: int = 0
    address: str = ""
    num_gpus: int = 0


class ReservationRequest(Record):
    """Request to reserve hosts.

    Attributes:
        address: Address of the cluster, as `ray.init` takes it.
        ranks_per_host: GPUs of each host, where the study runs on GPUs; on CPUs it takes whole hosts.
        device: "cpu" or "cuda"; None for CUDA where the driver's node has GPUs.
        timeout_s: Maximum seconds that the cluster may take; None for as long as the driver waits.
        insecure: Whether the cluster may accept clients without a token.
        order: Order for the agents.
    """

    address: str
    num_hosts: int
    ranks_per_host: int
    device: str | None
    timeout_s: float | None
    insecure: bool
    order: AgentOrder

    @property
    def strategy(self) -> str:
        return STRICT_PACK if self.num_hosts == 1 else STRICT_SPREAD


class _Event(Record, tag=True):
    pass


class Waiting(_Event):
    """The hosts are not reserved yet.

    Attributes:
        text: The request, what the cluster has, and whether its nodes can ever meet the request.
        can_be_met: Whether the nodes can meet it.
        cluster: Identity of the cluster: Ray's name of its head's node.
    """

    text: str
    can_be_met: bool
    cluster: str


class Reserved(_Event):
    """The hosts are reserved, and their agents have been started.

    Attributes:
        address: Address of the driver's node, as the others reach it.
        gpus: GPUs of the driver's node, as CUDA_VISIBLE_DEVICES names them; empty on CPUs.
        nodes: Ray's names of the nodes, by number of the host.
        cluster: Identity of the cluster, as in `Waiting`.
    """

    address: str
    gpus: str
    nodes: list[str]
    cluster: str


class Failed(_Event):
    """The reservation failed: no hosts are held.

    Attributes:
        lasting: Whether another attempt is useless.
    """

    reason: str
    lasting: bool = False


Event = Waiting | Reserved | Failed
