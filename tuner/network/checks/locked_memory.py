"""Check of the limit on locked memory: RDMA registers its buffers, and registered memory is locked."""

from __future__ import annotations

import re
from collections.abc import Iterator

from steptune.tuner.network.finding import NetworkFinding, ok, problem, unknown
from steptune.tuner.network.host import Host

NAME = "locked memory"
LIMITS = "/proc/self/limits"


def examine(host: Host) -> Iterator[NetworkFinding]:
    if not host.rdma_devices:
        return
    text = host.tree.text(LIMITS)
    soft = re.search(r"^Max locked memory\s+(\S+)", text or "", re.MULTILINE)
    if not soft:
        yield unknown(
            NAME,
            f"{LIMITS} does not show the limit on locked memory",
            fix=f"copy {LIMITS} of a process of the job, or run `ulimit -l`",
        )
    elif soft[1] == "unlimited":
        yield ok(NAME, "unlimited")
    else:
        yield problem(
            NAME,
            f"{soft[1]} bytes",
            effect="registering buffers fails: ibv_reg_mr and ibv_create_cq report 'Cannot allocate memory'",
            fix="`* soft memlock unlimited` and `* hard memlock unlimited` in /etc/security/limits.conf, LimitMEMLOCK="
            "infinity for services (slurmd); containers: --ulimit memlock=-1",
        )
