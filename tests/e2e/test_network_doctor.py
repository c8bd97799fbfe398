"""`steptune doctor` for networks: a copied host, logs, and the commands in the documentation that copy one."""

import re
import subprocess
from pathlib import Path

from command import CONTROL
from host_trees import NIC, add_gids, add_interface, healthy_host, write

from steptune.tuner.network.checks import CHECKS
from steptune.tuner.network.examine import examine_host
from steptune.tuner.network.finding import Level
from steptune.tuner.network.settings import COSTLY

LOGS = Path(__file__).parents[1] / "nccl_logs"
PAGE = Path(__file__).parents[2] / "docs" / "networks.md"


def test_a_copied_host_in_order_ends_with_status_0(inside, tmp_path):
    healthy_host(tmp_path / "host")
    found = inside("doctor", "--root", "host", "--json").json
    assert found["log"] is None
    assert {finding["level"] for finding in found["findings"]} == {"ok"}


def test_a_problem_of_a_copied_host_has_its_effect_and_fix(inside, tmp_path):
    root = healthy_host(tmp_path / "host")
    (root / "sys/module/nvidia_peermem/version").unlink()
    write(root, "/proc/modules", "ib_core 471040 9 mlx5_ib, Live 0x0\n")
    out = inside("doctor", "--root", "host", status=1).out
    assert re.search(r"^!  GPUDirect RDMA +neither nvidia_peermem nor nv_peer_mem", out, re.MULTILINE)
    assert re.search(r"^ +effect: every message between hosts", out, re.MULTILINE)
    assert re.search(r"^ +fix: install nvidia-peermem after the RDMA", out, re.MULTILINE)
    assert re.search(r"^✓  RDMA ports +mlx5_0:1: ACTIVE", out, re.MULTILINE)
    assert all(len(line) <= 80 for line in out.splitlines())


def test_what_could_not_be_examined_ends_with_status_1(inside, tmp_path):
    root = healthy_host(tmp_path / "host")
    (root / "proc/self/limits").unlink()
    out = inside("doctor", "--root", "host", status=1).out
    assert re.search(r"^\?  locked memory +/proc/self/limits does not show the limit", out, re.MULTILINE)
    assert "not examined" in out


def test_logs_alone_say_nothing_of_this_host(inside):
    logs = [str(LOGS / f"{name}.log") for name in ("cumem_and_gpu_direct", "nvls")]
    found = inside("doctor", *logs, "--json").json
    assert {finding["subject"] for finding in found["findings"]} == {
        "NCCL log",
        "between hosts",
        "GPUDirect RDMA",
        "inside a host",
    }
    assert found["log"]["num_hosts"] == 3
    assert {path["transport"] for path in found["log"]["paths"]} == {"P2P", "RDMA"}


def test_the_command_examines_this_host_and_a_log_without_a_gpu(steptune):
    """Torch is kept away from the command's own process; findings about this host are its own affair."""
    write(steptune.folder, "torch.py", "raise ImportError('torch is not needed for this')")
    variables = {"PYTHONPATH": f"{steptune.folder}:{steptune.environment()['PYTHONPATH']}"}
    ended = steptune(
        "doctor", "--network", LOGS / "infiniband_disabled.log", "--json", status=None, variables=variables
    )
    subjects = {finding["subject"] for finding in ended.json["findings"]}
    assert {"RDMA ports", "socket interfaces", "NCCL settings", "between hosts"} <= subjects
    assert ended.json["log"]["settings"] == {"NCCL_IB_DISABLE": "1"}
    assert ended.status == 1


def test_what_is_quoted_cannot_steer_the_terminal(inside, tmp_path):
    write(tmp_path, "job.log", "host:1:2 [0] NCCL WARN \x1b[2J\x07gone\x1b]0;title\x07\n")
    out = inside("doctor", "job.log", status=1).out
    assert "gone" in out
    assert not CONTROL.search(out)


def test_what_is_not_there_is_refused_with_the_way_out(inside):
    refused = inside("doctor", "--root", "missing", status=2)
    assert refused.error.startswith("missing is not a directory: give a directory with")
    assert not refused.out
    assert inside("doctor", "missing.log", status=2).error.startswith("missing.log does not exist: give a file")


def test_the_documented_commands_copy_all_that_is_looked_at(tmp_path):
    """A host with something amiss in most places is copied; the copy gives the same findings."""
    host = healthy_host(tmp_path / "host")
    write(host, f"/sys/devices/{NIC}/infiniband/mlx5_0/ports/1/link_layer", "Ethernet\n")
    add_interface(host, "eth1", mtu=1500, speed=400_000)
    add_gids(host, {0: ("fe80::1", "RoCE v2")})
    write(host, "/sys/kernel/iommu_groups/0/type", "DMA\n")
    write(host, "/etc/nccl.conf", "NCCL_P2P_DISABLE=1\n")
    write(host, "/proc/self/environ", "HOME=/root\nNCCL_ALGO=Ring\n")
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [block] = [block for block in blocks if "/sys" in block]
    copied = tmp_path / "copied"
    variables = {"PATH": "/usr/bin:/bin", "HOME": "/root", "NCCL_ALGO": "Ring"}
    subprocess.run(["bash", "-c", block, "_", copied, host], env=variables, check=True, capture_output=True)
    findings = examine_host(copied)
    assert {finding.level for finding in findings} == {Level.OK, Level.NOTE, Level.PROBLEM}
    assert findings == examine_host(host)


def test_the_page_names_every_check_and_every_setting():
    page = PAGE.read_text(encoding="utf-8")
    for check in CHECKS:
        assert f"\n| {check.name} | " in page
    for entry in COSTLY:
        assert f"`{entry.variable}`" in page
