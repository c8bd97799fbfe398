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


FREED_BEFORE = """
import torch
from steptune.tuner.trials.memory import forget_peak, measure_peak

def peak():
    print(measure_peak(0, torch.device("cpu")).resident_bytes)

forget_peak(torch.device("cpu"))
peak()
large, small = torch.ones(64 * 2**20 // 4), [torch.ones(10_000) for _ in range(64 * 2**20 // 40_000)]
peak()
del large, small
peak()
forget_peak(torch.device("cpu"))
peak()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can begin a peak anew")
def test_what_was_freed_before_a_peak_was_forgotten_does_not_count() -> None:
    """Large blocks are the kernel's at once; of small ones the C library keeps what it may need again. A process of
    its own, as a rank is: here, other tests' freed blocks would serve the new ones.
    """
    ran = subprocess.run([sys.executable, "-c", FREED_BEFORE], check=True, capture_output=True, text=True)
    before, with_both, after_both, anew = map(int, ran.stdout.split())
    assert with_both >= before + 120 * MIB
    assert after_both >= before + 120 * MIB
    assert anew <= before + 32 * MIB


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
