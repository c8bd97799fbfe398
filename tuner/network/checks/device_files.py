"""Check of the files under /dev/infiniband through which a process uses an RDMA device; containers often lack them."""

from __future__ import annotations

from collections.abc import Iterator

from steptune.tuner.network.finding import NetworkFinding, ok, problem
from steptune.tuner.network.host import Host

NAME = "RDMA device files"
FOLDER = "/dev/infiniband"


def examine(host: Host) -> Iterator[NetworkFinding]:
    if not host.rdma_devices:
        return
    verbs = [name for name in host.tree.names(FOLDER) if name.startswith("uverbs")]
    if len(verbs) >= len(host.rdma_devices):
        yield ok(NAME, f"{len(verbs)} under {FOLDER}")
        return
    yield problem(
        NAME,
        f"{len(verbs)} uverbs under {FOLDER} for {len(host.rdma_devices)} devices",
        effect="NCCL does not see the devices and falls back to TCP sockets",
        fix="start the container with --device /dev/infiniband (Kubernetes: the RDMA device plugin); on the host, "
        "run modprobe ib_uverbs",
    )
