"""Known NCCL warnings by their text, with the meaning and the remedy of each.

From NCCL's troubleshooting guide and from public threads with these warnings in them, named with the logs in
tests/nccl_logs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from steptune.tuner.network.finding import Level


@dataclass(frozen=True, kw_only=True)
class KnownWarning:
    """A known warning of NCCL.

    Attributes:
        pattern: Regular expression to search for in the warning, ignoring case.
    """

    subject: str
    pattern: str
    effect: str
    fix: str
    level: Level = Level.PROBLEM

    def says(self, text: str) -> bool:
        return re.search(self.pattern, text, re.IGNORECASE) is not None


KNOWN_WARNINGS = (
    KnownWarning(
        subject="locked memory",
        pattern=r"ibv_(reg|create)_\w+ failed.*cannot allocate memory",
        effect="RDMA buffers cannot be registered, which ends the run",
        fix="set ulimit -l unlimited for the job (limits.conf, LimitMEMLOCK of slurmd; containers: --ulimit "
        "memlock=-1)",
    ),
    KnownWarning(
        subject="shared memory",
        pattern=r"failed to extend /dev/shm|creating shared memory segment|posix_fallocate failed",
        effect="/dev/shm is full, which ends the run",
        fix="start the container with --shm-size=1g (Kubernetes: an emptyDir of medium Memory at /dev/shm), and remove "
        "stale /dev/shm/nccl-* files",
    ),
    KnownWarning(
        subject="shared memory",
        pattern=r"attaching to shared memory segment|unlink shared memory|call to (shm_)?open failed",
        effect="another rank's memory segment has been removed or is in another container, which ends the run",
        fix="run all ranks of a host in one container (or use --ipc=host); with systemd, set RemoveIPC=no in "
        "logind.conf",
    ),
    KnownWarning(
        subject="socket interfaces",
        pattern=r"no (socket )?interface found|no NCCL_SOCKET_IFNAME interface",
        effect="ranks cannot find each other, which ends the run",
        fix="set NCCL_SOCKET_IFNAME to an interface that is up and has an address (`ip -br addr`), or unset it",
    ),
    KnownWarning(
        subject="RDMA connection",
        pattern=r"ibv_modify_qp failed",
        effect="two NICs cannot reach each other, which ends the run",
        fix="RoCE: the same routable RoCE v2 GID on all hosts (unset NCCL_IB_GID_INDEX with NCCL 2.21 or newer); rails "
        "that do not meet: NCCL_CROSS_NIC=0; test with ib_write_bw",
    ),
    KnownWarning(
        subject="RDMA time-out",
        pattern=r"got completion .*(error|status=) ?12\b",
        effect="packets are not acknowledged; the run ends, or hangs until the watchdog ends it",
        fix="if it fails at once, check for a wrong GID (NCCL_IB_GID_INDEX) or a switch that drops RoCE; if it "
        "fails later, check for lost packets (PFC, ECN, cables: `perfquery`, `ethtool -S`); test with ib_write_bw",
    ),
    KnownWarning(
        subject="GPUDirect RDMA",
        pattern=r"got completion .*(error|status=) ?4\b",
        effect="the NIC was denied access to GPU memory, which ends the run",
        fix="turn off PCIe ACS and the IOMMU's translation, and load nvidia-peermem again after the RDMA drivers; "
        "NCCL_NET_GDR_LEVEL=LOC shows whether GPUDirect RDMA is the cause",
    ),
    KnownWarning(
        subject="NVLink",
        pattern=r"P2P is disabled between",
        effect="GPUs of one host communicate through host memory",
        fix="start nvidia-fabricmanager in the same version as the driver; leave MIG off",
    ),
    KnownWarning(
        subject="device",
        pattern=r"duplicate GPU detected",
        effect="two ranks use the same GPU, which ends the run",
        fix="call torch.cuda.set_device(local_rank) before the process group is created",
    ),
    KnownWarning(
        subject="device memory",
        pattern=r"cuda failure.*out of memory",
        effect="NCCL's buffers do not fit into device memory, which ends the run",
        fix="leave about 1 GiB of device memory free, or use fewer channels (NCCL_MAX_NCHANNELS)",
    ),
    KnownWarning(
        subject="IOMMU",
        pattern=r"iommu=pt",
        effect="direct traffic between GPUs and NICs is translated by the IOMMU, or hangs",
        fix="boot with iommu=pt",
    ),
    KnownWarning(
        subject="NUMA balancing",
        pattern=r"NUMA auto balancing enabled",
        effect="the kernel moves pages while NCCL uses them, so step times vary",
        fix="sysctl kernel.numa_balancing=0",
        level=Level.NOTE,
    ),
    KnownWarning(
        subject="sockets",
        pattern=r"connection (closed by remote peer|refused|reset)|connect to .* failed|connect(ion)? timed out"
        r"|socket recv failed|failed to execute operation",
        effect="another rank has ended or cannot be reached",
        fix="look for the first warning of the other ranks; if there is none, check for a firewall between the "
        "hosts or the wrong interface (NCCL_SOCKET_IFNAME)",
    ),
)
"""Known warnings in order of precedence: a cause that ends a run comes before its consequences."""
