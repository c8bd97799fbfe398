"""Peak memory of a rank and of what it started."""

import mmap
import subprocess
import sys

import pytest
import torch

from steptune.tuner.trials.memory import measure_peak

CPU = torch.device("cpu")
MIB = 1 << 20


def test_a_peak_that_has_passed_is_remembered() -> None:
    before = measure_peak(3, CPU)
    block = mmap.mmap(-1, before.resident_bytes + 64 * MIB)
    for offset in range(0, len(block), mmap.PAGESIZE):
        block[offset] = 1
    block.close()
    after = measure_peak(3, CPU)
    assert after.resident_bytes >= before.resident_bytes + 64 * MIB
    assert (after.rank, after.allocated_bytes, after.reserved_bytes, after.device_bytes) == (3, 0, 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="proportional shares are Linux's")
def test_live_children_are_counted() -> None:
    code = "x = bytearray(96 << 20); x[::4096] = b'1' * len(x[::4096]); print('ready', flush=True); input()"
    alone = measure_peak(0, CPU).resident_bytes
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        together = measure_peak(0, CPU).resident_bytes
        child.communicate(b"\n")
    assert together >= alone + 90 * MIB
