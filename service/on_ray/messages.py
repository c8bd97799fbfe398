"""Messages between the process that holds a reservation, the study's driver, and the agents of the hosts."""

from __future__ import annotations

from steptune.tuner.records import Record

STRICT_PACK = "STRICT_PACK"
STRICT_SPREAD = "STRICT_SPREAD"


class AgentOrder(Record):
    """Order to the agent of a host; the last three are known when the host is."""

    port: int
    secret: str
    folder: str
    patience_s: float
    variables: dict[str, str]
    """Environment of the driver that Ray changes in its own processes."""
    host: int = 0
    address: str = ""
    num_gpus: int = 0


class ReservationRequest(Record):
    """Hosts to reserve.

    Attributes:
        address: Of the cluster, as `ray.init` takes it.
        ranks_per_host: GPUs of each host, where the study runs on GPUs; on CPUs it takes whole hosts.
        device: "cpu" or "cuda"; None for CUDA where the driver's node has GPUs.
        timeout_s: How long the cluster may take; None for as long as somebody waits.
        insecure: Whether the cluster may let in who has no token.
        order: For the agents.
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
    """The reservation is not met.

    Attributes:
        text: On what is asked, what the cluster has, and whether its nodes can ever meet it.
        can_be_met: Whether they can.
        cluster: Identity of the cluster: Ray's name of its head's node.
    """

    text: str
    can_be_met: bool
    cluster: str


class Reserved(_Event):
    """The hosts are reserved, and their agents started.

    Attributes:
        address: Of the driver's node, as the others reach it.
        gpus: Of the driver's node, as CUDA_VISIBLE_DEVICES names them; empty on CPUs.
        nodes: Ray's names of the nodes, by number of the host.
        cluster: Identity of the cluster, as in `Waiting`.
    """

    address: str
    gpus: str
    nodes: list[str]
    cluster: str


class Failed(_Event):
    """The reservation failed: it does not exist.

    Attributes:
        lasting: Whether asking again is of no use.
    """

    reason: str
    lasting: bool = False


Event = Waiting | Reserved | Failed
