"""Findings of the checks of a host's network on hosts in order and on hosts with one thing amiss."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from host_trees import (
    DRIVER,
    GPU,
    LIMITS,
    NIC,
    SWITCH,
    add_function,
    add_gids,
    add_gpu,
    add_interface,
    add_nic,
    config_space,
    healthy_host,
    write,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steptune.tuner.errors import ChoiceError
from steptune.tuner.network.checks import CHECKS
from steptune.tuner.network.checks.affinity import parse_topology
from steptune.tuner.network.examine import examine_host
from steptune.tuner.network.finding import Level, NetworkFinding
from steptune.tuner.network.pci import parse_lspci, read_control
from steptune.tuner.network.settings import COSTLY, read_settings
from steptune.tuner.network.tree import Tree, UnreadableError

LINK_LOCAL = "fe80:0000:0000:0000:9cbb:b7ff:feb3:937a"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a0c:0015"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return healthy_host(tmp_path / "host")


@pytest.fixture
def roce(host: Path) -> Path:
    """RoCE instead of InfiniBand, with an interface of large frames and a routable address."""
    write(host, f"/sys/devices/{NIC}/infiniband/mlx5_0/ports/1/link_layer", "Ethernet\n")
    add_interface(host, "eth1", speed=400_000)
    add_gids(host, {0: (LINK_LOCAL, "IB/RoCE v1"), 1: (LINK_LOCAL, "RoCE v2"), 3: (IPV4, "RoCE v2")})
    return host


def of(root: Path, subject: str) -> list[NetworkFinding]:
    return [finding for finding in examine_host(root) if finding.subject == subject]


def the_problem(root: Path, subject: str) -> NetworkFinding:
    """The only one of this check that is not in order; with what it does and the way out."""
    [finding] = [finding for finding in of(root, subject) if finding.level is not Level.OK]
    assert finding.effect
    assert finding.fix
    return finding


class TestHealthyHost:
    def test_all_is_in_order(self, host: Path) -> None:
        findings = examine_host(host)
        assert {finding.level for finding in findings} == {Level.OK}, findings
        assert {finding.subject for finding in findings} == {check.name for check in CHECKS} - {"MTU", "RoCE GID"}

    def test_so_it_is_with_roce(self, roce: Path) -> None:
        findings = examine_host(roce)
        assert {finding.level for finding in findings} == {Level.OK}, findings
        assert {finding.subject for finding in findings} == {check.name for check in CHECKS}

    def test_a_host_without_any_of_it_has_no_problem(self, tmp_path: Path) -> None:
        (tmp_path / "sys").mkdir()
        findings = examine_host(tmp_path)
        assert {finding.level for finding in findings} <= {Level.OK, Level.NOTE}
        assert of(tmp_path, "RDMA ports")[0].effect == "hosts communicate through TCP sockets"

    def test_what_is_no_directory_is_refused_with_the_way_out(self, tmp_path: Path) -> None:
        with pytest.raises(ChoiceError, match="not a directory: give a directory with copies of a host's /sys, /proc"):
            examine_host(tmp_path / "missing")

    def test_a_directory_that_holds_no_host_is_not_taken_for_one_without_anything(self, tmp_path: Path) -> None:
        with pytest.raises(ChoiceError, match="contains no sys: give a directory with copies of a host's /sys, /proc"):
            examine_host(tmp_path)


class TestPeerMemory:
    @pytest.mark.parametrize(
        "path", ["/sys/kernel/mm/memory_peers/nv_mem/version", "/sys/kernel/mm/memory_peers/nv_mem_nc/version"]
    )
    def test_the_older_module_will_do(self, host: Path, path: str) -> None:
        remove_modules(host)
        write(host, path, "1.3-0")
        [finding] = of(host, "GPUDirect RDMA")
        assert finding.level is Level.OK
        assert "nv_peer_mem" in finding.found

    @pytest.mark.parametrize("path", ["/proc/modules", "/lsmod.txt"])
    def test_a_list_of_modules_will_do(self, host: Path, path: str) -> None:
        remove_modules(host)
        write(host, path, "Module                  Size  Used by\nnvidia_peermem         16384  0\n")
        [finding] = of(host, "GPUDirect RDMA")
        assert finding.found == "nvidia_peermem is loaded"

    def test_the_nics_driver_may_have_a_way_of_its_own(self, host: Path) -> None:
        remove_modules(host)
        write(host, f"/sys/devices/{NIC}/p2p", "NVIDIA\n")
        [finding] = of(host, "GPUDirect RDMA")
        assert (finding.level, finding.found) == (
            Level.OK,
            "the driver of mlx5_0 accesses GPU memory by its own mechanism",
        )

    def test_a_module_that_only_another_one_uses_is_not_loaded(self, host: Path) -> None:
        remove_modules(host)
        write(host, "/proc/modules", "ib_core 471040 9 nvidia_peermem, Live 0x0\n")
        assert the_problem(host, "GPUDirect RDMA").level is Level.PROBLEM

    def test_dma_buf_will_do(self, host: Path) -> None:
        remove_modules(host)
        open_driver(host)
        [finding] = of(host, "GPUDirect RDMA")
        assert finding.level is Level.OK
        assert "DMA-BUF" in finding.found

    @pytest.mark.parametrize(
        ("path", "text", "why"),
        [
            ("/proc/sys/kernel/osrelease", "5.11.22-generic\n", "Linux 5.11 is older than 5.12"),
            ("/proc/sys/kernel/osrelease", "odd\n", "the version of the kernel is unknown"),
            ("/proc/self/environ", b"NCCL_DMABUF_ENABLE=0\0", "NCCL_DMABUF_ENABLE=0"),
            ("/proc/driver/nvidia/version", DRIVER.format(kind="Kernel Module", version="580.65.06"), "proprietary"),
            ("/proc/driver/nvidia/version", DRIVER.format(kind="Open Kernel Module", version="510.39.01"), "than 515"),
        ],
    )
    def test_without_a_module_dma_buf_needs_all_of(self, host: Path, path: str, text: str, why: str) -> None:
        remove_modules(host)
        open_driver(host)
        write(host, path, text)
        finding = the_problem(host, "GPUDirect RDMA")
        assert finding.level is Level.PROBLEM
        assert why in finding.found
        assert "modprobe nvidia-peermem" in finding.fix


def remove_modules(host: Path) -> None:
    (host / "sys/module/nvidia_peermem/version").unlink()
    write(host, "/proc/modules", "ib_core 471040 9 mlx5_ib, Live 0x0\n")


def open_driver(host: Path) -> None:
    write(host, "/proc/driver/nvidia/version", DRIVER.format(kind="Open Kernel Module", version="580.65.06"))


class TestPorts:
    @pytest.mark.parametrize("state", ["1: DOWN", "2: INIT", "3: ARMED"])
    def test_a_port_that_is_not_active(self, host: Path, state: str) -> None:
        write(host, f"/sys/devices/{NIC}/infiniband/mlx5_0/ports/1/state", f"{state}\n")
        finding = the_problem(host, "RDMA ports")
        assert finding.level is Level.PROBLEM
        assert finding.found == f"mlx5_0:1: {state[3:]}, InfiniBand, 400 Gb/sec (4X NDR)"

    def test_an_unplugged_ethernet_port_beside_an_active_one_is_a_note(self, roce: Path) -> None:
        add_nic(roce, "mlx5_1", f"{SWITCH}/0000:02:01.0/0000:04:00.1", state="1: DOWN", link_layer="Ethernet")
        assert the_problem(roce, "RDMA ports").level is Level.NOTE

    def test_a_slow_link_is_named(self, host: Path) -> None:
        add_nic(host, "mlx5_1", f"{SWITCH}/0000:02:01.0/0000:04:00.1", rate="100 Gb/sec (4X EDR)")
        finding = the_problem(host, "RDMA ports")
        assert finding.found == "mlx5_1:1 at 100 Gb/s; others at 400 Gb/s"

    def test_a_device_without_ports(self, host: Path) -> None:
        for file in (host / f"sys/devices/{NIC}/infiniband/mlx5_0/ports/1").iterdir():
            file.unlink()
        (host / f"sys/devices/{NIC}/infiniband/mlx5_0/ports/1").rmdir()
        assert the_problem(host, "RDMA ports").found == "mlx5_0 without ports"


def test_a_container_without_device_files(host: Path) -> None:
    (host / "dev/infiniband/uverbs0").unlink()
    finding = the_problem(host, "RDMA device files")
    assert finding.level is Level.PROBLEM
    assert "--device /dev/infiniband" in finding.fix


class TestAffinity:
    @pytest.mark.parametrize(
        ("path", "place"),
        [
            ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:06:00.0", "PIX"),
            ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:06:00.0/0000:07:00.0/0000:08:00.0", "PXB"),
        ],
    )
    def test_a_gpu_behind_the_same_switches(self, tmp_path: Path, path: str, place: str) -> None:
        healthy_host(tmp_path)
        add_gpu(tmp_path, path)
        [finding] = of(tmp_path, "GPU-NIC affinity")
        assert finding.level is Level.OK
        assert f"{path[-12:]} {place} mlx5_0" in finding.found

    @pytest.mark.parametrize(
        ("path", "node", "place"),
        [
            ("pci0000:00/0000:00:02.0/0000:06:00.0", "0", "PHB"),
            ("pci0000:80/0000:80:01.0/0000:81:00.0", "0", "NODE"),
            ("pci0000:80/0000:80:01.0/0000:81:00.0", "1", "SYS"),
            ("pci0000:80/0000:80:01.0/0000:81:00.0", "-1", "SYS"),
        ],
    )
    def test_a_gpu_beyond_the_processor_does_without(self, host: Path, path: str, node: str, place: str) -> None:
        add_gpu(host, path)
        write(host, f"/sys/devices/{path}/numa_node", f"{node}\n")
        finding = the_problem(host, "GPU-NIC affinity")
        assert finding.level is Level.PROBLEM
        assert finding.found.startswith(f"{path[-12:]} {place} mlx5_0")

    @pytest.mark.parametrize(("level", "expected"), [("PHB", Level.NOTE), ("3", Level.NOTE), ("PIX", Level.PROBLEM)])
    def test_a_level_that_allows_it_is_a_note(self, host: Path, level: str, expected: Level) -> None:
        add_gpu(host, "pci0000:00/0000:00:02.0/0000:06:00.0")
        write(host, "/proc/self/environ", f"NCCL_NET_GDR_LEVEL={level}\0")
        assert the_problem(host, "GPU-NIC affinity").level is expected

    def test_the_drivers_own_table_goes_first(self, host: Path) -> None:
        write(host, "/nvidia-smi-topo.txt", TOPOLOGY)
        finding = the_problem(host, "GPU-NIC affinity")
        assert finding.found.startswith("GPU1 NODE mlx5_0")

    def test_the_drivers_table(self) -> None:
        """With a legend, without one, and between GPUs only."""
        assert parse_topology(TOPOLOGY) == {
            "GPU0": {"mlx5_0": "PIX", "mlx5_1": "SYS"},
            "GPU1": {"mlx5_0": "NODE", "mlx5_1": "SYS"},
        }
        assert parse_topology(TOPOLOGY.partition("NIC Legend")[0])["GPU0"] == {"NIC0": "PIX", "NIC1": "SYS"}
        assert parse_topology("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-31\nGPU1\tNV18\t X \t0-31\n") == {}

    def test_a_copy_without_places_is_not_fine(self, host: Path) -> None:
        for entry in (host / "sys/bus/pci/devices").iterdir():
            entry.unlink()
        assert the_problem(host, "GPU-NIC affinity").level is Level.UNKNOWN


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\tSYS\t0-31,64-95\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tSYS\t0-31,64-95\t0\t\tN/A
NIC0\tPIX\tNODE\t X \tSYS
NIC1\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
"""After https://github.com/NVIDIA/nccl/issues/1737."""


class TestAcs:
    @pytest.mark.parametrize(("value", "flags"), [(0x01, "SrcValid"), (0x1D, "CmpltRedir ReqRedir SrcValid")])
    def test_a_bridge_that_redirects(self, host: Path, value: int, flags: str) -> None:
        write(host, f"/sys/devices/{SWITCH}/0000:02:00.0/config", config_space(acs=value))
        finding = the_problem(host, "PCIe ACS")
        assert finding.level is Level.PROBLEM
        assert finding.found == f"on, on 1 of 4 bridges: 0000:02:00.0 {flags}"

    def test_translation_blocking_alone_redirects_nothing(self, host: Path) -> None:
        write(host, f"/sys/devices/{SWITCH}/0000:02:00.0/config", config_space(acs=0x02))
        assert [finding.level for finding in of(host, "PCIe ACS")] == [Level.OK]

    def test_a_bridge_above_other_devices_does_not_matter(self, host: Path) -> None:
        add_function(host, "pci0000:00/0000:00:1c.0", kind="0x060400", config=config_space(acs=0x1D))
        assert [finding.level for finding in of(host, "PCIe ACS")] == [Level.OK]

    def test_registers_that_only_root_sees_are_not_fine(self, host: Path) -> None:
        """The kernel shows the first 64 bytes to others."""
        write(host, f"/sys/devices/{SWITCH}/0000:02:00.0/config", config_space(acs=0x1D)[:64])
        finding = the_problem(host, "PCIe ACS")
        assert finding.level is Level.UNKNOWN
        assert "1 of 4 bridges" in finding.found

    def test_they_are_taken_from_lspci_then(self, host: Path) -> None:
        write(host, f"/sys/devices/{SWITCH}/0000:02:00.0/config", config_space(acs=0x1D)[:64])
        write(host, "/lspci.txt", LSPCI)
        assert the_problem(host, "PCIe ACS").found.startswith("on, on 1 of 4 bridges: 0000:02:00.0 CmpltRedir ReqRedir")

    def test_what_lspci_prints(self) -> None:
        listed = parse_lspci(LSPCI)
        assert listed["0000:02:00.0"].control.acs == {"SrcValid", "ReqRedir", "CmpltRedir"}
        assert listed["0000:04:00.0"].control.relaxed_ordering is False
        assert listed["0000:04:00.0"].control.acs is None
        assert listed["0000:05:00.0"].control is None, "access denied"

    def test_a_container_that_hides_the_bus_is_not_fine(self, host: Path) -> None:
        for entry in (host / "sys/bus/pci/devices").iterdir():
            entry.unlink()
        assert {finding.level for finding in of(host, "PCIe ACS")} == {Level.UNKNOWN}

    @given(st.binary(max_size=4096))
    def test_any_registers_are_read_without_an_error(self, config: bytes) -> None:
        read_control(config)

    def test_a_list_of_capabilities_that_goes_round_ends(self) -> None:
        config = bytearray(config_space(acs=0))
        config[0x40:0x42] = bytes((0x05, 0x40))
        config[0x100:0x104] = (0x1_0001 | (0x100 << 20)).to_bytes(4, "little")
        control = read_control(bytes(config))
        assert (control.acs, control.relaxed_ordering) == (None, None)


LSPCI = """\
02:00.0 PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0) (prog-if 00 [Normal decode])
\tCapabilities: [40] Express (v2) Downstream Port (Slot+), MSI 00
\tCapabilities: [148 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl+ DirectTrans+
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-

0000:04:00.0 Infiniband controller: Mellanox Technologies MT2910 Family [ConnectX-7]
\tCapabilities: [60] Express (v2) Endpoint, MSI 00
\t\tDevCtl:\tCorrErr+ NonFatalErr+ FatalErr+ UnsupReq+
\t\t\tRlxdOrd- ExtTag+ PhantFunc- AuxPwr- NoSnoop+ FLReset-

05:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)
\tCapabilities: <access denied>
"""


class TestIommu:
    @pytest.mark.parametrize("kind", ["DMA", "DMA-FQ"])
    def test_a_group_that_translates(self, tmp_path: Path, kind: str) -> None:
        healthy_host(tmp_path)
        write(tmp_path, "/sys/kernel/iommu_groups/0/type", f"{kind}\n")
        finding = the_problem(tmp_path, "IOMMU")
        assert finding.found == f"translates for 0000:03:00.0 ({kind})"
        assert "iommu=pt" in finding.fix

    def test_it_is_off(self, host: Path) -> None:
        without_groups(host)
        (host / "sys/kernel/iommu_groups").mkdir(parents=True)
        assert [finding.found for finding in of(host, "IOMMU")] == ["off"]

    @pytest.mark.parametrize(
        ("line", "level"),
        [
            ("intel_iommu=on", Level.PROBLEM),
            ("amd_iommu=on quiet", Level.PROBLEM),
            ("intel_iommu=on iommu=pt", Level.OK),
            ("amd_iommu=off", Level.OK),
            ("quiet", Level.NOTE),
        ],
    )
    def test_without_groups_the_kernels_command_line_says(self, host: Path, line: str, level: Level) -> None:
        without_groups(host)
        write(host, "/proc/cmdline", f"root=/dev/sda1 {line}\n")
        assert [finding.level for finding in of(host, "IOMMU")] == [level]

    def test_without_either_it_is_not_fine(self, host: Path) -> None:
        without_groups(host)
        (host / "proc/cmdline").unlink()
        assert the_problem(host, "IOMMU").level is Level.UNKNOWN


def without_groups(host: Path) -> None:
    for path in (GPU, NIC):
        (host / f"sys/devices/{path}/iommu_group").unlink()
    for group in (host / "sys/kernel/iommu_groups").iterdir():
        (group / "type").unlink()
        group.rmdir()
    (host / "sys/kernel/iommu_groups").rmdir()


class TestRelaxedOrdering:
    def test_a_nic_that_may_not(self, host: Path) -> None:
        write(host, f"/sys/devices/{NIC}/config", config_space(device_control=0))
        assert the_problem(host, "PCIe relaxed ordering").found == "not allowed for mlx5_0"

    def test_registers_that_only_root_sees_are_not_fine(self, host: Path) -> None:
        write(host, f"/sys/devices/{NIC}/config", config_space()[:64])
        assert the_problem(host, "PCIe relaxed ordering").level is Level.UNKNOWN


class TestLockedMemory:
    def test_a_limit(self, host: Path) -> None:
        write(host, "/proc/self/limits", LIMITS.format(locked="65536                65536               "))
        finding = the_problem(host, "locked memory")
        assert finding.level is Level.PROBLEM
        assert finding.found == "65536 bytes"

    def test_no_word_of_it_is_not_fine(self, host: Path) -> None:
        (host / "proc/self/limits").unlink()
        assert the_problem(host, "locked memory").level is Level.UNKNOWN


class TestMtu:
    def test_small_frames_under_roce(self, roce: Path) -> None:
        add_interface(roce, "eth1", mtu=1500, speed=400_000)
        finding = the_problem(roce, "MTU")
        assert finding.level is Level.PROBLEM
        assert finding.found == "1500 bytes on eth1, of mlx5_0:1"

    def test_small_frames_of_a_fast_interface_are_a_note(self, host: Path) -> None:
        add_interface(host, "eth0", mtu=1500)
        assert the_problem(host, "MTU").level is Level.NOTE

    def test_small_frames_of_a_slow_interface_are_no_matter(self, host: Path) -> None:
        add_interface(host, "eth0", mtu=1500, speed=1000)
        assert of(host, "MTU") == []

    def test_a_port_without_interface_is_not_fine(self, roce: Path) -> None:
        (roce / f"sys/devices/{NIC}/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0").unlink()
        assert the_problem(roce, "MTU").level is Level.UNKNOWN


class TestGids:
    def test_no_address_that_can_be_routed(self, roce: Path) -> None:
        (roce / f"sys/devices/{NIC}/infiniband/mlx5_0/ports/1/gids/3").unlink()
        finding = the_problem(roce, "RoCE GID")
        assert finding.level is Level.PROBLEM
        assert "eth1 an IP address" in finding.fix

    @pytest.mark.parametrize(
        ("index", "level"),
        [("3", Level.OK), ("-1", Level.OK), ("1", Level.NOTE), ("0", Level.PROBLEM), ("7", Level.PROBLEM)],
    )
    def test_the_index_that_is_set(self, roce: Path, index: str, level: Level) -> None:
        write(roce, "/proc/self/environ", f"NCCL_IB_GID_INDEX={index}\0")
        [finding] = of(roce, "RoCE GID")
        assert finding.level is level
        if level is not Level.OK:
            assert "set it to 3" in finding.fix


class TestInterfaces:
    @pytest.mark.parametrize(
        ("setting", "level"),
        [
            ("eth0", Level.OK),
            ("=eth0", Level.OK),
            ("^docker,lo", Level.OK),
            ("eth9", Level.PROBLEM),
            ("=eth", Level.PROBLEM),
            ("lo", Level.NOTE),
            ("slow", Level.NOTE),
            ("down", Level.PROBLEM),
        ],
    )
    def test_the_setting_chooses_by_nccls_rule(self, host: Path, setting: str, level: Level) -> None:
        add_interface(host, "lo", speed=-1, state="unknown")
        add_interface(host, "slow0", speed=1000)
        add_interface(host, "down0", state="down")
        write(host, "/proc/self/environ", f"NCCL_SOCKET_IFNAME={setting}\0")
        [finding] = of(host, "socket interfaces")
        assert finding.level is level

    def test_the_loopback_alone_reaches_no_other_host(self, tmp_path: Path) -> None:
        add_interface(tmp_path, "lo", speed=-1, state="unknown")
        assert the_problem(tmp_path, "socket interfaces").found == "lo (speed not known)"


class TestSettings:
    COSTLY_VALUES = {  # noqa: RUF012
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_NET_GDR_LEVEL": "LOC",
        "NCCL_IB_GDR_LEVEL": "3",
        "NCCL_NET_GDR_READ": "0",
        "NCCL_DMABUF_ENABLE": "0",
        "NCCL_IB_PCI_RELAXED_ORDERING": "0",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_P2P_LEVEL": "LOC",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
    }
    HARMLESS_VALUES = {  # noqa: RUF012
        "NCCL_IB_DISABLE": "0",
        "NCCL_NET": "IB",
        "NCCL_NET_GDR_LEVEL": "SYS",
        "NCCL_IB_GDR_LEVEL": "",
        "NCCL_NET_GDR_READ": "1",
        "NCCL_DMABUF_ENABLE": "1",
        "NCCL_IB_PCI_RELAXED_ORDERING": "2",
        "NCCL_P2P_DISABLE": "0",
        "NCCL_P2P_LEVEL": "NVL",
        "NCCL_SHM_DISABLE": "0",
        "NCCL_ALGO": "",
        "NCCL_PROTO": " ",
    }

    @pytest.mark.parametrize("entry", COSTLY, ids=lambda entry: entry.variable)
    def test_each_costs_by_its_value(self, host: Path, entry: Any) -> None:
        name = entry.variable
        write(host, "/proc/self/environ", f"{name}={self.COSTLY_VALUES[name]}\0")
        [finding] = of(host, "NCCL settings")
        assert (finding.found, finding.level) == (f"{name}={self.COSTLY_VALUES[name]}", entry.level)
        assert finding.effect
        assert finding.fix
        write(host, "/proc/self/environ", f"{name}={self.HARMLESS_VALUES[name]}\0")
        assert [finding.level for finding in of(host, "NCCL settings")] == [Level.OK]

    @pytest.mark.parametrize(
        ("setting", "level"),
        [("mlx5", Level.OK), ("=mlx5_0:1", Level.OK), ("mlx5_0:2", Level.PROBLEM), ("^mlx5", Level.PROBLEM)],
    )
    def test_devices_are_chosen_by_nccls_rule(self, host: Path, setting: str, level: Level) -> None:
        write(host, "/proc/self/environ", f"NCCL_IB_HCA={setting}\0")
        assert [finding.level for finding in of(host, "NCCL settings")] == [level]

    def test_the_environment_goes_before_the_users_file_and_that_before_the_hosts(self, tmp_path: Path) -> None:
        write(tmp_path, "/etc/nccl.conf", "NCCL_ALGO=Ring\nNCCL_PROTO=LL\nNCCL_IB_HCA=mlx5_9\n# NCCL_NET=Socket\n")
        write(tmp_path, "/home/trainer/.nccl.conf", "NCCL_ALGO=Tree\nNCCL_PROTO=Simple\n")
        write(tmp_path, "/proc/self/environ", b"HOME=/home/trainer\0NCCL_ALGO=NVLS\0PASSWORD=secret\0")
        assert read_settings(Tree(tmp_path)) == {
            "NCCL_ALGO": "NVLS",
            "NCCL_PROTO": "Simple",
            "NCCL_IB_HCA": "mlx5_9",
        }

    def test_a_copy_may_have_lines_instead_of_zero_bytes(self, tmp_path: Path) -> None:
        write(tmp_path, "/proc/self/environ", "NCCL_ALGO=NVLS\nNCCL_PROTO=LL\n")
        assert read_settings(Tree(tmp_path)) == {"NCCL_ALGO": "NVLS", "NCCL_PROTO": "LL"}


class TestUnreadable:
    FILES = (
        ("/sys/class/infiniband", "RDMA ports"),
        ("/sys/module/nvidia_peermem", "GPUDirect RDMA"),
        ("/sys/bus/pci/devices", "PCIe ACS"),
        ("/sys/kernel/iommu_groups/0/type", "IOMMU"),
        ("/proc/self/limits", "locked memory"),
        ("/proc/self/environ", "NCCL settings"),
        ("/dev/infiniband", "RDMA device files"),
        ("/sys/class/net", "socket interfaces"),
    )

    @pytest.mark.parametrize(("path", "subject"), FILES)
    def test_permission_denied_is_never_fine(
        self, host: Path, path: str, subject: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tests may run as root, who is denied nothing: the system calls are made to fail instead."""
        deny(monkeypatch, host / path.lstrip("/"))
        findings = of(host, subject)
        assert Level.UNKNOWN in {finding.level for finding in findings}
        [finding] = [finding for finding in findings if finding.level is Level.UNKNOWN]
        assert "permission denied" in finding.found
        assert finding.effect == "not examined, so it may be wrong"

    def test_what_a_check_found_before_is_kept(self, roce: Path) -> None:
        second = f"{SWITCH}/0000:02:01.0/0000:04:00.1"
        add_nic(roce, "mlx5_1", second, link_layer="Ethernet")
        add_gids(roce, {}, name="mlx5_1", path=second)
        (roce / f"sys/devices/{second}/infiniband/mlx5_1/ports/1/gids/0").symlink_to("0")
        findings = of(roce, "RoCE GID")
        assert [finding.level for finding in findings] == [Level.OK, Level.UNKNOWN]
        assert "symbolic links form a loop" in findings[1].found

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        (tmp_path / "proc").mkdir()
        os.mkfifo(tmp_path / "proc/cmdline")
        with pytest.raises(UnreadableError, match="not a regular file"):
            Tree(tmp_path).text("/proc/cmdline")


def deny(monkeypatch: pytest.MonkeyPatch, denied: Path) -> None:
    """Makes looking into this file or directory fail as for a user without permission; that it is there is seen."""
    lstat = os.lstat

    def guarded(real):
        def call(path, *arguments, **options):
            below = str(path).startswith(f"{denied}/")
            if below or (str(path) == str(denied) and real is not lstat):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return real(path, *arguments, **options)

        return call

    for name in ("open", "listdir", "lstat"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))


class TestTree:
    def test_an_absolute_link_stays_in_the_tree(self, tmp_path: Path) -> None:
        outside = write(tmp_path, "/outside", "of this machine")
        root = tmp_path / "host"
        write(root, "/etc/real", "of the host")
        (root / "etc/absolute").symlink_to("/etc/real")
        (root / "etc/escape").symlink_to(f"../../../{outside.name}")
        (root / "etc/machine").symlink_to(outside)
        tree = Tree(root)
        assert tree.text("/etc/absolute") == "of the host"
        assert tree.text("/etc/escape") is None
        assert tree.text("/etc/machine") is None

    def test_an_attribute_without_a_value_is_absent(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The speed of an interface that is down: sysfs has the file, and answers EINVAL."""
        write(tmp_path, "/sys/class/net/eth0/speed", "")

        def refuse(*_: object, **__: object) -> int:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        monkeypatch.setattr(os, "open", refuse)
        assert Tree(tmp_path).number("/sys/class/net/eth0/speed") is None


READ = (
    "sys/module/nvidia_peermem/version",
    "proc/modules",
    "proc/sys/kernel/osrelease",
    "proc/driver/nvidia/version",
    "proc/cmdline",
    "proc/self/limits",
    "proc/self/environ",
    "etc/nccl.conf",
    "lspci.txt",
    "lsmod.txt",
    "nvidia-smi-topo.txt",
    f"sys/devices/{GPU}/class",
    f"sys/devices/{GPU}/numa_node",
    f"sys/devices/{SWITCH}/0000:02:00.0/config",
    f"sys/devices/{NIC}/infiniband/mlx5_0/ports/1/state",
    f"sys/devices/{NIC}/infiniband/mlx5_0/ports/1/rate",
    f"sys/devices/{NIC}/infiniband/mlx5_0/ports/1/link_layer",
    f"sys/devices/{NIC}/infiniband/mlx5_0/ports/1/gids/3",
    f"sys/devices/{NIC}/infiniband/mlx5_0/ports/1/gid_attrs/types/3",
    f"sys/devices/{NIC}/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0",
    "sys/class/net/eth1/mtu",
    "sys/class/net/eth1/speed",
    "sys/class/net/eth1/operstate",
)
PIECES = st.sampled_from(
    [
        b"NCCL_IB_HCA=",
        b"^=",
        b"GPU0",
        b"NIC0",
        b"X",
        b"\0",
        b"\n",
        b"02:00.0 PCI bridge: ",
        b"ACSCtl:",
        b"-1",
        b"9" * 5000,
    ]
)
GARBAGE = st.binary(max_size=60) | st.lists(PIECES | st.binary(max_size=4), max_size=8).map(b"".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(contents=st.dictionaries(st.sampled_from(READ), GARBAGE, max_size=4))
def test_garbage_is_no_error(roce: Path, contents: dict[str, bytes]) -> None:
    """Whatever the files hold, every check has an answer."""
    saved = {path: (roce / path).read_bytes() if (roce / path).exists() else None for path in contents}
    for path, data in contents.items():
        write(roce, path, data)
    try:
        for finding in examine_host(roce):
            assert finding.found
            assert (finding.level is Level.PROBLEM) <= bool(finding.effect and finding.fix)
    finally:
        for path, data in saved.items():
            if data is None:
                (roce / path).unlink()
            else:
                write(roce, path, data)
