"""NCCL's logs as records, and what they say: lines of real runs, named with their threads in tests/nccl_logs."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptune.tuner.errors import ChoiceError
from steptune.tuner.network.finding import Level, NetworkFinding
from steptune.tuner.network.known_warnings import KNOWN_WARNINGS
from steptune.tuner.network.log import (
    MAX_TEXT,
    MAX_WARNINGS,
    ChannelPath,
    Distance,
    NcclLog,
    Nic,
    Transport,
    read_log,
    read_logs,
)
from steptune.tuner.network.log_checks import examine_logs, log_findings

FOLDER = Path(__file__).parents[1] / "nccl_logs"
LOGS = {path.stem: path for path in sorted(FOLDER.glob("*.log"))}


def logged(name: str) -> NcclLog:
    log, unreadable = read_logs([LOGS[name]])
    assert not unreadable
    return log


def path(channel: int, transport: Transport, number: int, **options: Any) -> ChannelPath:
    return ChannelPath(channel=channel, transport=transport, num_connections=number, **options)


P2P, SHM, RDMA, SOCKET = Transport.P2P, Transport.SHM, Transport.RDMA, Transport.SOCKET


class TestTransports:
    """Kinds of transport by channel; NCCL 2.4 to 2.27."""

    @pytest.mark.parametrize(
        ("name", "paths"),
        [
            (
                "infiniband_without_gpu_direct",
                [path(0, P2P, 2, way="IPC"), path(0, RDMA, 2, network="IB"), path(1, RDMA, 1, network="IB")],
            ),
            (
                "gpu_direct",
                [path(1, RDMA, 4, network="IB", gpu_direct=True), path(2, RDMA, 2, network="IB", gpu_direct=True)],
            ),
            (
                "cumem_and_gpu_direct",
                [
                    path(0, P2P, 1, way="CUMEM"),
                    path(0, RDMA, 1, network="IB", gpu_direct=True),
                    path(1, P2P, 1, way="CUMEM"),
                    path(1, RDMA, 1, network="IB", gpu_direct=True),
                    path(7, RDMA, 1, network="IB", gpu_direct=True),
                ],
            ),
            (
                "shared_buffers",
                [path(0, P2P, 1, way="CUMEM"), path(1, RDMA, 1, network="IB", gpu_direct=True)],
            ),
            (
                "plugin_without_gpu_direct",
                [path(channel, RDMA, 1, network="IBext_v8") for channel in (0, 3, 5)],
            ),
            (
                "shared_memory_full",
                [
                    path(0, SHM, 1),
                    path(0, SOCKET, 1, network="Socket"),
                    path(6, SHM, 1),
                    path(16, SOCKET, 1, network="Socket"),
                ],
            ),
            (
                "without_host_names",
                [
                    path(0, P2P, 1, way="IPC"),
                    path(0, RDMA, 1, network="IB"),
                    path(0, SHM, 1),
                    path(1, RDMA, 1, network="IB"),
                ],
            ),
            ("one_node", [path(0, P2P, 1, way="direct pointer")]),
        ],
    )
    def test_of_real_logs(self, name: str, paths: list[ChannelPath]) -> None:
        assert list(logged(name).paths) == paths

    @pytest.mark.parametrize(
        ("via", "expected"),
        [
            ("P2P/indirect/3[3]/read", path(2, P2P, 1, way="indirect")),
            ("P2P/CUMEM/read/CE", path(2, P2P, 1, way="CUMEM")),
            ("SHM/CE/direct", path(2, SHM, 1)),
            ("NET/IB/3(5)/GDRDMA(PCI)/Shared", path(2, RDMA, 1, network="IB", gpu_direct=True)),
            ("NET/AWS Libfabric/0/GDRDMA", path(2, RDMA, 1, network="AWS Libfabric", gpu_direct=True)),
            ("NET/Socket/0/Shared", path(2, SOCKET, 1, network="Socket")),
        ],
    )
    def test_of_the_forms_that_nccl_has(self, via: str, expected: ChannelPath) -> None:
        """After the format strings of src/transport (p2p.cc, shm.cc, net.cc)."""
        assert read_log([f"h:1:2 [0] NCCL INFO Channel 02/0 : 0[0] -> 8[0] [send] via {via}"]).paths == (expected,)

    def test_reductions_in_switches(self) -> None:
        line = "h:1:2 [0] NCCL INFO CollNet 00/0 : 0 [receive] via COLLNET/SHARP/0/GDRDMA"
        assert read_log([line]).paths == (path(0, Transport.COLLNET, 1, network="SHARP", gpu_direct=True),)
        assert logged("nvls").uses_nvls

    def test_a_way_that_is_not_known_is_passed_over(self) -> None:
        log = read_log(["h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via CARRIER/PIGEON"])
        assert (log.num_lines, log.paths) == (1, ())


class TestRecord:
    def test_versions_with_and_without_a_prefix(self) -> None:
        assert logged("infiniband_without_gpu_direct").versions == ("2.4.7+cuda10.0",)
        assert logged("without_host_names").versions == ("2.5.7+cuda10.0",)
        assert read_log(["RCCL version 2.18.3+hip5.7 HEAD:abc"]).versions == ("2.18.3+hip5.7",)

    def test_nics(self) -> None:
        assert logged("infiniband_without_gpu_direct").nics == (Nic(name="mlx5_0", port=1, link="IB"),)
        assert logged("gpu_direct_disabled").nics == tuple(
            Nic(name=name, port=1, link="RoCE", relaxed_ordering=True) for name in ("mlx5_0", "mlx5_1")
        )

    def test_interfaces_and_networks(self) -> None:
        log = logged("infiniband_disabled")
        assert (log.interfaces, log.networks) == (("ibs85f0", "ib0"), ("Socket",))
        assert logged("plugin_network").networks == ("Libfabric",)
        assert logged("loopback").interfaces == ("lo",)

    def test_settings(self) -> None:
        assert logged("infiniband_disabled").settings == {"NCCL_IB_DISABLE": "1"}
        assert logged("loopback").settings == {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}

    def test_rings_and_trees(self) -> None:
        log = logged("without_host_names")
        assert log.rings == {0: tuple(range(16)), 1: tuple(range(16))}
        assert log.num_trees == 2
        assert logged("one_node").rings == {0: (0, 1), 1: (0, 1)}

    def test_the_rings_are_those_of_the_largest_communicator(self) -> None:
        prefix = "h:1:2 [0] NCCL INFO Channel 00/02 :"
        for lines in (["    0   1", "    3   1   2   0"], ["    3   1   2   0", "    0   1"]):
            assert read_log([prefix + ranks for ranks in lines]).rings == {0: (3, 1, 2, 0)}

    def test_ranks_hosts_and_nodes(self) -> None:
        assert (logged("one_node").num_ranks, logged("one_node").num_nodes) == (2, 1)
        assert logged("infiniband_without_gpu_direct").num_hosts == 2
        ready = logged("ready")
        assert (ready.num_ranks, ready.is_complete, ready.interfaces) == (16, True, ("enp9s0np0",))

    def test_gpu_direct(self) -> None:
        assert logged("gpu_direct_disabled").gpu_direct == {"mlx5_0": False, "mlx5_1": False}
        assert logged("distance").distances == (Distance(gpu="42000", nic="0", hops=6, limit=4),)
        assert logged("infiniband_without_gpu_direct").distances == (Distance(gpu="2[2]", nic="0", hops=3, limit=2),)
        assert logged("loopback").gpu_direct == {}, "sockets have no GPUDirect RDMA to lose"

    def test_warnings_that_differ_in_names_and_numbers_are_one(self) -> None:
        [said, other] = logged("shared_memory_full").warnings
        assert (said.text, said.count) == ("Error: failed to extend /dev/shm/nccl-fjwOOB to 5967876 bytes", 2)
        assert other.count == 1

    def test_the_number_of_an_error_is_not_among_them(self) -> None:
        completions = [said for said in logged("warnings").warnings if "Got completion" in said.text]
        assert [said.count for said in completions] == [1, 1]

    def test_endless_new_warnings_take_no_memory(self) -> None:
        [said] = read_log([f"h:1:2 [0] NCCL WARN {'long ' * 1000}"]).warnings
        assert len(said.text) == MAX_TEXT
        words = ("".join(chr(97 + int(digit)) for digit in str(number)) for number in range(3 * MAX_WARNINGS))
        assert len(read_log(f"h:1:2 [0] NCCL WARN {word}" for word in words).warnings) == MAX_WARNINGS

    def test_the_files_of_a_run_are_one_record(self) -> None:
        log, unreadable = read_logs([LOGS["one_node"], LOGS["cumem_and_gpu_direct"]])
        assert not unreadable
        assert (log.num_hosts, log.num_lines) == (3, 13)
        assert log.connections(P2P) == 3
        assert log.connections(RDMA, gpu_direct=True) == 3
        assert log.connections(RDMA, gpu_direct=False) == 0


def of(name: str, subject: str) -> NetworkFinding:
    """The only thing that a real log says of this."""
    [finding] = [finding for finding in log_findings(logged(name)) if finding.subject == subject]
    return finding


class TestFindings:
    def test_gpu_direct_on(self) -> None:
        levels = {finding.level for finding in log_findings(logged("cumem_and_gpu_direct"))}
        assert levels == {Level.OK}
        assert of("cumem_and_gpu_direct", "GPUDirect RDMA").found == "on for every connection (3)"

    def test_gpu_direct_off_for_the_distance(self) -> None:
        finding = of("infiniband_without_gpu_direct", "GPUDirect RDMA")
        assert finding.level is Level.PROBLEM
        assert finding.found == "off for 3 of 3 connections; too far apart: GPU 2[2] and NIC 0 (3, allowed 2)"
        assert "NCCL_NET_GDR_LEVEL" in finding.fix

    @pytest.mark.parametrize(
        ("name", "found", "fix"),
        [
            ("gpu_direct_disabled", "off; mlx5_0, mlx5_1 cannot", "modprobe nvidia-peermem"),
            ("distance", "off; too far apart: GPU 42000 and NIC 0 (6, allowed 4)", "NCCL_TOPO_FILE"),
        ],
    )
    def test_gpu_direct_off_before_any_connection(self, name: str, found: str, fix: str) -> None:
        finding = of(name, "GPUDirect RDMA")
        assert (finding.level, finding.found) == (Level.PROBLEM, found)
        assert fix in finding.fix

    @pytest.mark.parametrize(
        ("name", "cause"),
        [
            ("sockets_without_device", "NCCL found no RDMA device"),
            ("infiniband_disabled", "on ibs85f0, ib0; NCCL_IB_DISABLE=1"),
            ("shared_memory_full", "NCCL does not log the reason"),
        ],
    )
    def test_sockets_and_why(self, name: str, cause: str) -> None:
        finding = of(name, "between hosts")
        assert finding.level is Level.PROBLEM
        assert finding.found.startswith("2 connections over TCP sockets")
        assert finding.found.endswith(cause)
        assert finding.fix

    @pytest.mark.parametrize(
        ("line", "cause"),
        [
            (
                "comm 0x1 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 1 MNNVL 0",
                "although all ranks are on one host",
            ),
            ("Failed to open libibverbs.so[.1]", "libibverbs cannot be loaded"),
            ("NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:192.168.11.1<0>", "although the hosts have NICs (mlx5_0)"),
        ],
    )
    def test_more_reasons_for_sockets(self, line: str, cause: str) -> None:
        socket = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0"
        findings = log_findings(read_log([f"h:1:2 [0] NCCL INFO {line}", socket]))
        [finding] = [finding for finding in findings if finding.subject == "between hosts"]
        assert cause in finding.found

    def test_host_memory_inside_a_host(self) -> None:
        findings = log_findings(logged("without_host_names"))
        inside = [(finding.level, finding.found) for finding in findings if finding.subject == "inside a host"]
        assert inside == [
            (Level.OK, "1 connection from GPU to GPU (IPC)"),
            (Level.NOTE, "1 connection through host memory (SHM)"),
        ]

    def test_relaxed_ordering(self) -> None:
        assert of("infiniband_without_gpu_direct", "PCIe relaxed ordering").level is Level.NOTE
        subjects = {finding.subject for finding in log_findings(logged("gpu_direct_disabled"))}
        assert "PCIe relaxed ordering" not in subjects

    def test_two_versions_in_one_run(self) -> None:
        log, _ = read_logs([LOGS["infiniband_without_gpu_direct"], LOGS["without_host_names"]])
        [finding] = [finding for finding in log_findings(log) if "in one run" in finding.found]
        assert (finding.level, finding.found) == (Level.PROBLEM, "NCCL 2.4.7+cuda10.0 and 2.5.7+cuda10.0 in one run")

    def test_settings_of_the_run(self) -> None:
        assert of("infiniband_disabled", "NCCL settings").found == "NCCL_IB_DISABLE=1"

    def test_time_outs_count_also_without_a_line_of_nccl(self) -> None:
        nothing, errors = log_findings(logged("time_out"))
        assert nothing.level is Level.UNKNOWN
        assert errors.found.startswith("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580")
        assert errors.found.endswith("(2 times)")

    def test_warnings_of_real_runs_are_known(self) -> None:
        subjects = {finding.subject for finding in log_findings(logged("warnings"))}
        assert subjects >= {
            "locked memory",
            "RDMA connection",
            "RDMA time-out",
            "GPUDirect RDMA",
            "shared memory",
            "socket interfaces",
            "sockets",
        }
        assert of("warnings", "NCCL warnings").found == "NET/OFI OFI fi_getinfo() call failed: No data available"

    EXAMPLES = {  # noqa: RUF012
        r"P2P is disabled": "P2P is disabled between NVLINK connected GPUs 0 and 1. This should not be the case given",
        r"duplicate GPU": "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000",
        r"cuda failure": "Cuda failure 2 'out of memory'",
        r"iommu=pt": 'Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!',
        r"NUMA auto": "NUMA auto balancing enabled which can lead to variability in the RCCL performance!",
    }

    @pytest.mark.parametrize("entry", KNOWN_WARNINGS, ids=lambda entry: entry.pattern[:20])
    def test_each_known_warning_speaks_for_itself(self, entry: Any) -> None:
        """None is hidden by one before it, and each has an effect and a fix."""
        texts = [said.text for name in LOGS for said in logged(name).warnings] + list(self.EXAMPLES.values())
        first = [next((known for known in KNOWN_WARNINGS if known.says(text)), None) for text in texts]
        assert entry in first
        assert entry.effect
        assert entry.fix


class TestBadFiles:
    @pytest.mark.parametrize("content", [b"", b"\n\n", b"nothing of it\n", b"\x00\xff\xfe" * 1000, b"NCCL INFO"])
    def test_what_is_no_log_is_not_fine(self, tmp_path: Path, content: bytes) -> None:
        file = tmp_path / "job.log"
        file.write_bytes(content)
        _, [finding] = examine_logs([file])
        assert finding.level is Level.UNKNOWN
        assert "NCCL_DEBUG=INFO" in finding.fix

    def test_a_log_that_breaks_off_keeps_what_it_has(self, tmp_path: Path) -> None:
        file = tmp_path / "job.log"
        file.write_bytes(LOGS["gpu_direct"].read_bytes()[:-40])
        log, _ = examine_logs([file])
        assert log.connections(RDMA) == 5

    def test_a_log_that_may_not_be_read_is_not_fine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The others are read. Tests may run as root, who is denied nothing."""
        denied = tmp_path / "rank1.log"
        denied.touch()
        real = Path.open

        def guarded(self: Path, *arguments: Any, **options: Any) -> Any:
            if self == denied:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
            return real(self, *arguments, **options)

        monkeypatch.setattr(Path, "open", guarded)
        log, findings = examine_logs([denied, LOGS["gpu_direct"]])
        assert (findings[0].level, findings[0].found) == (Level.UNKNOWN, f"{denied}: permission denied")
        assert log.connections(RDMA) == 6

    def test_what_does_not_exist_or_is_a_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ChoiceError, match="does not exist: give a file with the output of NCCL_DEBUG=INFO"):
            examine_logs([tmp_path / "missing.log"])
        with pytest.raises(ChoiceError, match="is not a file"):
            examine_logs([tmp_path])


WORDS = st.sampled_from(
    [
        *("NCCL INFO ", "NCCL WARN ", "NCCL version ", "host:1:2 [0] ", "Channel ", "Ring ", "CollNet ", "Trees [0] "),
        *(
            "00/02 :",
            "00/0 : ",
            "0[0] -> 1[1] ",
            "[send] ",
            "via ",
            "P2P/",
            "P2P",
            "SHM",
            "NET/",
            "NET/IB/",
            "COLLNET/",
        ),
        *(
            "NET/IB : Using ",
            "NET/Socket : Using ",
            "[0]mlx5_0:1/IB",
            "eth0:1.2.3.4<0>",
            "GDRDMA",
            "/",
            ":",
            "9" * 5000,
        ),
        *("GPU Direct RDMA Disabled for GPU 1 / HCA 0 (distance ", "6 > 4)", "NCCL_IB_DISABLE set by environment to "),
        *("comm 0x1 rank 0 nranks ", "nNodes ", "ncclSystemError", "Watchdog caught collective operation timeout", "٣"),
        *("NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0", "NCCL INFO Channel 1 : 0 -> 8 via NET/Socket/0"),
    ]
)
LINES = st.text(max_size=80) | st.lists(WORDS | st.text(max_size=4), max_size=10).map("".join)


@settings(deadline=None)
@given(st.lists(LINES, max_size=20))
def test_garbage_is_no_error(lines: list[str]) -> None:
    """Whatever is in a file, there is a record, and something to say of it."""
    assert log_findings(read_log(lines))


@given(st.binary(max_size=400))
def test_neither_are_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.mktemp("logs") / "job.log"
    file.write_bytes(content)
    assert examine_logs([file])
