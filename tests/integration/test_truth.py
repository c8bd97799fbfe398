"""Workloads whose answer is known: the category that should hold the time holds it.

The truth is measured beside the profiler, by the clock around the very thing; 5 % is what a category may differ. The
thing lasts long enough that what a busy machine puts between the clock and the profiler's own is less than that.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from breakdowns import analyse
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from steptune.tuner.costs.categories import Category
from steptune.tuner.profiling.analysis import analyse_traces
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.records import Breakdown
from steptune.tuner.trials.capture import record_profile

WITHIN = 0.05
STEPS = 4
LAP_S = 0.2
CPU = torch.device("cpu")


class Stopwatch:
    """Seconds spent in something, by step; the warm-up step is not counted."""

    def __init__(self) -> None:
        self.laps: list[float] = []

    def time(self, run: Callable[[], object]) -> object:
        start = time.perf_counter()
        try:
            return run()
        finally:  # recomputation is broken off by an exception as soon as it has all it needs
            self.laps.append(time.perf_counter() - start)

    @property
    def profiled_ns(self) -> float:
        return sum(self.laps[-STEPS:]) * 1e9


def profiled(step: Callable[[], None], folder: Path, **options: bool) -> Breakdown:
    path = folder / "trace.json"
    record_profile(step, STEPS, CPU, path, options)
    (breakdown,) = analyse(read_trace(path))
    assert breakdown.num_steps == STEPS
    return breakdown


class SlowSamples(Dataset):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.randn(64)


def small_training(inputs: int = 64) -> Callable[[torch.Tensor], None]:
    model = torch.nn.Sequential(torch.nn.Linear(inputs, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return train


def busy(seconds: float) -> None:
    """Python that computes, without any operator."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_a_loader_that_sleeps_is_waiting_for_data(tmp_path: Path) -> None:
    watch, train = Stopwatch(), small_training()
    batches = iter(DataLoader(SlowSamples(LAP_S), batch_size=1))
    breakdown = profiled(lambda: train(watch.time(lambda: next(batches))), tmp_path)
    assert breakdown.categories[Category.DATA_WAIT] == pytest.approx(watch.profiled_ns, rel=WITHIN)
    assert watch.profiled_ns >= STEPS * LAP_S * 1e9


def test_a_loader_whose_workers_sleep_is_waiting_for_data(tmp_path: Path) -> None:
    """Work of the workers is not in the trace; the wait of the main process is."""
    watch, train = Stopwatch(), small_training()
    batches = iter(DataLoader(SlowSamples(LAP_S / 2), batch_size=2, num_workers=1))
    breakdown = profiled(lambda: train(watch.time(lambda: next(batches))), tmp_path)
    assert breakdown.categories[Category.DATA_WAIT] == pytest.approx(watch.profiled_ns, rel=WITHIN)


def test_python_between_steps_is_the_host_s(tmp_path: Path) -> None:
    watch, batch = Stopwatch(), torch.randn(8, 64)

    def step() -> None:
        batch.sum()
        watch.time(lambda: busy(LAP_S))

    breakdown = profiled(step, tmp_path)
    assert breakdown.categories[Category.HOST] == pytest.approx(watch.profiled_ns, rel=WITHIN)


def test_a_product_of_known_length_is_matrix_work(tmp_path: Path) -> None:
    watch = Stopwatch()
    left, right = torch.randn(1536, 1536), torch.randn(1536, 1536)
    breakdown = profiled(lambda: watch.time(lambda: torch.mm(left, right)), tmp_path)
    assert breakdown.categories[Category.MATMUL] == pytest.approx(watch.profiled_ns, rel=WITHIN)


def test_checkpointed_blocks_are_computed_again(tmp_path: Path) -> None:
    """The block's forward pass runs twice: once forward, once as recomputation in the backward pass. Python between its
    operators is the host's, which on a busy machine is some of the time: hence 10 %.
    """
    from torch.utils.checkpoint import checkpoint

    block, watch = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))), Stopwatch()
    batch = torch.randn(4096, 512, requires_grad=True)

    def forward(inputs: torch.Tensor) -> object:
        return watch.time(lambda: block(inputs))

    breakdown = profiled(lambda: checkpoint(forward, batch, use_reentrant=False).sum().backward(), tmp_path)
    phases = breakdown.phases
    first_ns, again_ns = (sum(watch.laps[-2 * STEPS :][number::2]) * 1e9 for number in range(2))
    assert phases["recompute"] == breakdown.categories[Category.RECOMPUTE]
    assert phases["recompute"] == pytest.approx(again_ns, rel=2 * WITHIN)
    assert phases["forward"] == pytest.approx(first_ns, rel=2 * WITHIN)
    assert phases["backward"] > 0


def test_without_checkpoints_nothing_is_computed_again(tmp_path: Path) -> None:
    """Backward formulas run the operators of forward ones too (`aten::mm`): they are no recomputation."""
    train, batch = small_training(), torch.randn(256, 64)
    breakdown = profiled(lambda: train(batch), tmp_path)
    assert breakdown.categories[Category.RECOMPUTE] == 0
    assert breakdown.phases["backward"] > 0
    assert breakdown.phases["optimizer"] > 0


DELAY_S = 1.0


def delayed_rank(rank: int, folder: str) -> None:
    """One rank of a pair; the second is late before every backward pass.

    Each writes down what its clock says: the first how long its backward passes took, the second how late it was.
    """
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    samples = SlowSamples(0.0)
    batches = iter(DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples)))
    watch = Stopwatch()

    def step() -> None:
        loss = model(next(batches)).sum()
        if rank == 1:
            watch.time(lambda: time.sleep(DELAY_S))
            loss.backward()
        else:
            watch.time(loss.backward)

    record_profile(step, STEPS, CPU, Path(folder) / f"rank{rank}.json")
    (Path(folder) / f"rank{rank}.clock").write_text(str(watch.profiled_ns))
    dist.destroy_process_group()


def clocked_ns(folder: Path) -> tuple[float, float]:
    """How long the first rank's backward passes took, and how late the second was."""
    first, second = (float((folder / f"rank{rank}.clock").read_text()) for rank in range(2))
    assert min(first, second) >= STEPS * DELAY_S * 1e9 * (1 - WITHIN)
    return first, second


def test_waiting_for_a_late_rank_is_exposed_communication_and_the_analysis_names_the_rank(tmp_path: Path) -> None:
    """The first rank waits for the second by the delay, in every step; their clocks are one, and are found to be."""
    mp.spawn(delayed_rank, (str(tmp_path),), nprocs=2)
    files = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    first, second = (analyse(read_trace(file))[0] for file in files)
    assert (first.rank, second.rank) == (0, 1)
    waited_ns, late_ns = clocked_ns(tmp_path)
    assert first.categories[Category.COMMUNICATION] == pytest.approx(waited_ns, rel=WITHIN)
    assert second.categories[Category.HOST] == pytest.approx(late_ns, rel=WITHIN)
    assert second.categories[Category.COMMUNICATION] < WITHIN * late_ns
    analysis = analyse_traces(files)
    (finding,) = [finding for finding in analysis.findings if finding.rule == "rank_skew"]
    assert finding.evidence["rank"] == 1
    assert "exposed_communication" not in {finding.rule for finding in analysis.findings}, "the network is not slow"
    waits = {wait.rank: wait for wait in analysis.waits}
    assert waits[0].wait_ns == pytest.approx(waited_ns, rel=WITHIN)
    assert waits[1].wait_ns < WITHIN * waits[0].wait_ns
    assert waits[1].late_share == 1.0
    assert all(abs(offset) < WITHIN * DELAY_S * 1e9 for offset in analysis.clock_offsets_ns.values())
