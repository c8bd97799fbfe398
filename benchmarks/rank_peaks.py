"""Peak memory of the ranks of one configuration, each measurement in fresh processes; and the largest batch that fits.

    python benchmarks/rank_peaks.py '{"workload": "zoo:gpt2?batch=2", "choices": {}, "num_ranks": 2, ...}' RANK FOLDER

A rank trains some steps on batches of the workload and tells the most that tensors took in the last of them: on a GPU
by torch's allocator, which may be held to a cap, on a CPU by counting storages (`tests/support/live_bytes.py`). A rank
that runs out of memory ends all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from stamp import ROOT

from steptune.tuner.records import Choice, Record

if TYPE_CHECKING:
    import torch

NUM_STEPS = 3
"""States are made in the first, DDP's buckets anew in the second; the peak is the last one's."""
LIMIT_S = 120.0
GRACE_S = 5.0


class Configuration(Record):
    """A configuration to measure.

    Attributes:
        cap_bytes: What torch may take of a device; None for all of it.
        choices: By strategy; the rest as PyTorch has it.
    """

    workload: str
    choices: dict[str, Choice]
    num_ranks: int
    device: str
    cap_bytes: int | None = None


class Peak(Record):
    """A rank's report; without `failure` it trained all steps."""

    rank: int
    num_bytes: int = 0
    device: str = ""
    failure: str = ""
    out_of_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Reports of all ranks."""

    ranks: tuple[Peak, ...]

    @property
    def most_bytes(self) -> int:
        return max(peak.num_bytes for peak in self.ranks)

    @property
    def failure(self) -> str:
        """Empty where every rank trained; first what was not a lack of memory."""
        failed = sorted((peak for peak in self.ranks if peak.failure), key=lambda peak: peak.out_of_memory)
        return failed[0].failure if failed else ""

    @property
    def out_of_memory(self) -> bool:
        return any(peak.out_of_memory for peak in self.ranks)


def measured(configuration: Configuration, limit_s: float = LIMIT_S) -> Peaks:
    """Runs one process for each rank. What says nothing within the limit is a failure."""
    text = msgspec.json.encode(configuration).decode()
    with tempfile.TemporaryDirectory(prefix="steptune-peaks-") as folder:
        processes = [
            subprocess.Popen([sys.executable, __file__, text, str(rank), folder], stdout=subprocess.DEVNULL)
            for rank in range(configuration.num_ranks)
        ]
        try:
            _wait(processes, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return Peaks(ranks=tuple(_told(Path(folder), rank) for rank in range(configuration.num_ranks)))


def _wait(processes: list[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Until all have ended, or some time after the first that failed: the others wait for it in a collective."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.1)


def _told(folder: Path, rank: int) -> Peak:
    try:
        return msgspec.json.decode((folder / f"{rank}.json").read_bytes(), type=Peak)
    except FileNotFoundError:
        return Peak(rank=rank, failure="said nothing: it waited for another, or was killed")


def largest_batch(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest size that fits, from a guess: sizes beside it in growing steps, then in between; each is tried once.

    Returns:
        0 where not even one fits.
    """
    low, high = 0, most + 1
    size = max(1, min(guess, most))
    step = max(1, size // 16)
    while high - low > 1:
        if fits(size):
            low = size
        else:
            high = size
        if high > most:
            size = low + step
        elif low == 0:
            size = high - step
        else:
            size = (low + high) // 2
        size = max(low + 1, min(size, high - 1))
        step *= 2
    return low


# --- in a rank --------------------------------------------------------------------------------


def main() -> None:
    configuration = msgspec.json.decode(sys.argv[1], type=Configuration)
    rank, folder = int(sys.argv[2]), Path(sys.argv[3])
    peak = _run(configuration, rank, folder)
    part = folder / f"{rank}.part"
    part.write_bytes(msgspec.json.encode(peak))
    part.rename(folder / f"{rank}.json")
    os._exit(1 if peak.failure else 0)  # a group that lost a member cannot be left in order


def _run(configuration: Configuration, rank: int, folder: Path) -> Peak:
    from steptune.tuner.hardware import describe_hardware
    from steptune.tuner.trials.failures import is_out_of_memory

    device = describe_hardware(configuration.device).devices[rank if configuration.device == "cuda" else 0].name
    try:
        return Peak(rank=rank, device=device, num_bytes=_train(configuration, rank, folder))
    except Exception as error:
        return Peak(
            rank=rank,
            device=device,
            failure=f"{type(error).__name__}: {error}"[:500],
            out_of_memory=is_out_of_memory(error),
        )


def _train(configuration: Configuration, rank: int, folder: Path) -> int:
    import torch

    from steptune.tuner.strategies.combine import make_plan
    from steptune.tuner.training.assemble import assemble
    from steptune.tuner.trials.coordination import Coordinator
    from steptune.tuner.trials.rank_device import rank_device
    from steptune.tuner.workloads.batches import EndlessBatches, draw_batches
    from steptune.tuner.workloads.loading import load_workload

    workload = load_workload(configuration.workload)
    device = rank_device(configuration.device, rank, configuration.cap_bytes)
    coordinator = Coordinator(rank, configuration.num_ranks, None, folder, device)  # there is no server to tell
    order = draw_batches(workload, workload.dataset(), seed=0, limit=NUM_STEPS)

    def make_model() -> torch.nn.Module:
        with device:
            return workload.model()

    with _counter(device) as counter:
        torch.manual_seed(0)
        job = assemble(
            workload,
            make_plan(complete(configuration.choices)),
            device=device,
            rank=rank,
            num_ranks=configuration.num_ranks,
            make_model=make_model,
            batch_sampler=EndlessBatches(order, rank, configuration.num_ranks),
        )
        for batch in itertools.islice(iter(job), NUM_STEPS):
            counter.begin()
            job.step(batch)
            if configuration.device == "cpu" and counter.peak() > (configuration.cap_bytes or float("inf")):
                raise MemoryError(f"tensors took {counter.peak()} bytes")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        coordinator.total([0.0])  # whoever left now would end what others still wait for
        return counter.peak()


def complete(choices: Mapping[str, Choice]) -> dict[str, Choice]:
    from steptune.tuner.strategies import STRATEGIES

    return {strategy.name: {**strategy.defaults, **choices.get(strategy.name, {})} for strategy in STRATEGIES}


@dataclass(frozen=True, kw_only=True)
class Counter:
    """Peak of the memory of tensors since it was told to begin."""

    begin: Callable[[], None]
    peak: Callable[[], int]


@contextlib.contextmanager
def _counter(device: torch.device) -> Iterator[Counter]:
    import torch

    if device.type == "cuda":
        yield Counter(
            begin=lambda: torch.cuda.reset_peak_memory_stats(device),
            peak=lambda: torch.cuda.max_memory_allocated(device),
        )
        return
    sys.path.append(str(ROOT / "tests" / "support"))
    from live_bytes import LiveBytes

    with LiveBytes() as live:
        yield Counter(begin=lambda: setattr(live, "peak", 0), peak=lambda: live.peak)


if __name__ == "__main__":
    main()
