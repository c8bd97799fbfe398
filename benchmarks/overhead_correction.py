"""Is the rescaled breakdown what the step costs without the profiler?

    python benchmarks/overhead_correction.py --out overhead_correction.jsonl
    torchrun --nproc-per-node 2 benchmarks/overhead_correction.py --out overhead_correction.jsonl ddp

The profiler makes the host slower, so a breakdown of profiled steps is rescaled to the unprofiled step.
Here each of its claims is checked by a counter-experiment without any profiler, in the same process and
in turns with the plain step:

* the loader replaced by one cached batch: what is saved is the wait for data;
* model, loss and optimizer replayed as one CUDA graph: what is saved is the host (Python, launches,
  the optimizer's own calls);
* gradients exchanged with nobody (each rank reduces in a group of its own, so that everything that the host
  does for it stays): what is saved is communication that held the step up. `contention_ms` is what kernels gain
  from having no collective beside them, from a second profile.

With several ranks the slowest sets the pace of all, whatever is done about the exchange: a step takes as long as its
slowest rank, and the claims are those of the rank that waits least for others.
A claim holds within the larger of 10 % of it and 2 % of the step. `saved_error_ms`
tells whether the machine was quiet enough to see that much (`resolved`: twice the error is no more than what is
allowed).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from stamp import stamp
from torch import nn
from torch.utils.data import DataLoader, Dataset

from steptune.tuner.costs.categories import COMPUTING, HOST_CATEGORIES, Category
from steptune.tuner.profiling.breakdown import breakdown_of
from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.cpu_time import cpu_time
from steptune.tuner.profiling.device_time import device_time
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.trace import Kind
from steptune.tuner.records import Breakdown
from steptune.tuner.trials.capture import record_profile

PROFILED_STEPS = 10
PROFILES = 5
"""Ten steps of a host that others disturb are a small sample: a claim is the median of as many profiles."""
ROUNDS = 61
OF_CATEGORY, OF_STEP = 0.10, 0.02


T = TypeVar("T")


class Exchange:
    """DDP's exchange of gradients, which can be switched to groups of one rank: all that the host does for it stays."""

    def __init__(self) -> None:
        self.on = True
        ranks = range(torch.distributed.get_world_size())
        self.alone = [torch.distributed.new_group([rank]) for rank in ranks][torch.distributed.get_rank()]

    def hook(self, _, bucket):  # DDP refuses annotations that are texts
        buffer = bucket.buffer().div_(torch.distributed.get_world_size())
        group = torch.distributed.group.WORLD if self.on else self.alone
        work = torch.distributed.all_reduce(buffer, group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


class Experiment:
    """A training loop with its counter-experiments.

    Attributes:
        device_waits: Whether the device is done when the loader begins, as it is where launches take longer than
            kernels. Then it has to be so in the replayed steps as well: else the next batch would hide the kernels too,
            and the experiment would show more than the host's part.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        loader: DataLoader,
        *,
        device: torch.device,
        ddp: bool,
        device_waits: bool = False,
    ) -> None:
        self.device_waits = device_waits
        self.name, self.device = name, device
        self.model = model.to(device)
        cuda = device.type == "cuda"
        if ddp:
            self.model = nn.parallel.DistributedDataParallel(self.model, device_ids=[device.index] if cuda else None)
            self.exchange = Exchange()
            self.model.register_comm_hook(None, self.exchange.hook)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=True if cuda else None, capturable=cuda
        )
        self.batches = iter(loader)
        self.cached = self._to_device(next(self.batches))
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        self.train(self._to_device(next(self.batches)))

    def cached_step(self) -> None:
        self.train(self.cached)

    def unexchanged_step(self) -> None:
        self.exchange.on = False
        self.step()
        self.exchange.on = True

    def train(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(self.model(batch[0]).float(), batch[1]).backward()
        self.optimizer.step()

    def capture(self) -> None:
        """The training of the cached batch as one graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                self.train(self.cached)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        # The loader's pinning thread calls CUDA as well: only this thread's calls belong to the graph.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            nn.functional.cross_entropy(self.model(self.cached[0]).float(), self.cached[1]).backward()
            self.optimizer.step()

    def graph_step(self) -> None:
        """Loads and copies as the plain step does, then replays."""
        images, labels = next(self.batches)
        self.cached[0].copy_(images)
        self.cached[1].copy_(labels)
        assert self.graph is not None
        self.graph.replay()
        if self.device_waits:
            torch.cuda.synchronize()

    def _to_device(self, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return batch[0].to(self.device, non_blocking=True), batch[1].to(self.device, non_blocking=True)


def step_ms(step: Callable[[], None], count: int, synchronise: Callable[[], None]) -> float:
    synchronise()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        synchronise()
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronise()
    return (time.perf_counter() - start) * 1e3 / count


def agreed(count: int, device: torch.device) -> int:
    """Return the first rank's count on every rank."""
    if not torch.distributed.is_initialized():
        return count
    value = torch.tensor(count, device=device)
    torch.distributed.broadcast(value, 0)
    return int(value)


def measure(experiment: Experiment, variants: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Milliseconds per step of each variant, in turns."""
    synchronise = torch.cuda.synchronize if experiment.device.type == "cuda" else lambda: None
    for run in variants.values():
        step_ms(run, 5, synchronise)
    count = agreed(max(3, min(100, int(100 / step_ms(experiment.step, 5, synchronise)))), experiment.device)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, run in variants.items():
            times[name].append(step_ms(run, count, synchronise))
    return slowest(times)


def of_all_ranks(value: T) -> list[T]:
    if not torch.distributed.is_initialized():
        return [value]
    values: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def slowest(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Round by round the time of the slowest rank."""
    ranks = of_all_ranks(times)
    return {name: [max(values) for values in zip(*(rank[name] for rank in ranks), strict=True)] for name in times}


def median_error(values: list[float]) -> float:
    """Standard error of a median, from the values' median absolute deviation (of a normal distribution)."""
    centre = statistics.median(values)
    return 1.2533 * 1.4826 * statistics.median(abs(value - centre) for value in values) / len(values) ** 0.5


CLAIMS = {
    "cached": (Category.DATA_WAIT, Category.COPY_H2D),
    "graph": tuple(HOST_CATEGORIES),
    "unexchanged": (Category.COMMUNICATION,),
}


def check(experiment: Experiment, *, ddp: bool) -> dict:
    """One row: the rescaled breakdown beside what the counter-experiments say."""
    variants = {"plain": experiment.step, "cached": experiment.cached_step}
    if ddp:
        variants["unexchanged"] = experiment.unexchanged_step
    elif experiment.device.type == "cuda":
        experiment.capture()
        variants["graph"] = experiment.graph_step
    times = measure(experiment, variants)
    plain_ms = statistics.median(times["plain"])
    profiles = [profiled(experiment.step, experiment.device, plain_ms) for _ in range(PROFILES)]
    contention_ms = 0.0
    if ddp:
        alone = profiled(experiment.unexchanged_step, experiment.device, statistics.median(times["unexchanged"]))
        contention_ms = max(0.0, computing_ms(profiles[0]) - computing_ms(alone))
    all_claims = {
        name: [of_the_pace_maker(breakdown, name) for breakdown in profiles] for name in times if name != "plain"
    }
    breakdown = profiles[0]
    rescaled = {name: value / 1e6 for name, value in breakdown.rescaled.items()}
    return {
        "workload": experiment.name,
        "plain_ms": round(plain_ms, 4),
        "spread_ms": {name: [round(min(t), 4), round(max(t), 4)] for name, t in times.items()},
        "medians_ms": {name: round(statistics.median(t), 4) for name, t in times.items()},
        "profiled_ms": round(breakdown.step_time_ns / breakdown.num_steps / 1e6, 4),
        "sum_is_unprofiled": sum(breakdown.rescaled.values()) == breakdown.unprofiled_step_time_ns,
        "raw_ms": {n: round(v / breakdown.num_steps / 1e6, 4) for n, v in breakdown.categories.items() if v},
        "rescaled_ms": {name: round(value, 4) for name, value in rescaled.items() if value},
        "blocking_ms": {n: round(v / breakdown.num_steps / 1e6, 4) for n, v in breakdown.blocking.items()},
        "overlapped_ms": {n: round(v / breakdown.num_steps / 1e6, 4) for n, v in breakdown.overlapped.items() if v},
        "compute_ms": round(computing_ms(breakdown), 4),
        "contention_ms": round(contention_ms, 4),
        "problems": list(breakdown.quality.problems),
        "checks": [checked(name, claims, times) for name, claims in all_claims.items()],
    }


def checked(name: str, claims_ms: list[float], times: dict[str, list[float]]) -> dict:
    """Check the median of a claim against the time that its counter-experiment saved."""
    claimed_ms = statistics.median(claims_ms)
    differences = [plain - other for plain, other in zip(times["plain"], times[name], strict=True)]
    saved_ms = statistics.median(differences)
    # A variant that is slower shows that there was nothing to save.
    shown_ms = max(0.0, saved_ms)
    allowed_ms = max(OF_CATEGORY * max(claimed_ms, shown_ms), OF_STEP * statistics.median(times["plain"]))
    error_ms = median_error(differences)
    return {
        "experiment": name,
        "categories": [str(category) for category in CLAIMS[name]],
        "claimed_ms": round(claimed_ms, 4),
        "claims_ms": [round(claim, 4) for claim in claims_ms],
        "saved_ms": round(saved_ms, 4),
        "saved_error_ms": round(error_ms, 4),
        "allowed_ms": round(allowed_ms, 4),
        "resolved": 2 * error_ms <= allowed_ms,
        "holds": abs(claimed_ms - shown_ms) <= allowed_ms,
    }


def profiled(step: Callable[[], None], device: torch.device, plain_ms: float) -> Breakdown:
    """The breakdown of a step, rescaled to what it takes without the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record_profile(step, PROFILED_STEPS, device, path)
        capture = link(read_trace(path))
    numbers = capture.device_numbers
    segments = device_time(capture, numbers[0])[0] if numbers else cpu_time(capture)
    return breakdown_of(capture, f"cuda:{numbers[0]}" if numbers else "cpu", segments, round(plain_ms * 1e6))


def computing_ms(breakdown: Breakdown) -> float:
    """Kernel time of a step in ms; the profiler does not slow kernels."""
    return sum(breakdown.categories[category] for category in COMPUTING) / breakdown.num_steps / 1e6


def claim_ms(breakdown: Breakdown, experiment: str) -> float:
    return breakdown.removable_ns(*CLAIMS[experiment]) / 1e6


def of_the_pace_maker(breakdown: Breakdown, experiment: str) -> float:
    """The claim of the rank that waits least for others."""
    claims = of_all_ranks((breakdown.removable_ns(Category.COMMUNICATION), claim_ms(breakdown, experiment)))
    return min(claims)[1]


def recording_costs(device: torch.device) -> dict:
    """Nanoseconds that the profiler adds for each event: of an operator alone, and of one with a launch."""
    on_cpu, on_device = torch.zeros(1), torch.zeros(1, device=device)
    chain = 2000
    costs = {}
    for name, tensor in (("operator", on_cpu), ("operator_and_launch", on_device)):

        def step(values: torch.Tensor = tensor) -> None:
            for _ in range(chain):
                values.add_(1)

        synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        plain = statistics.median(step_ms(step, 1, synchronise) for _ in range(15))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            record_profile(step, 5, device, path)
            capture = link(read_trace(path))
        host = capture.trace.host
        marks = capture.trace.host_rows(r"^ProfilerStep#", Kind.ANNOTATION, Kind.OPERATOR)
        profiled = float(np.median(host.end[marks] - host.start[marks])) / 1e6
        recorded = int(np.isin(host.kind, (Kind.OPERATOR, Kind.RUNTIME)).sum()) / 5
        costs[name] = {
            "added_ns_per_call": round((profiled - plain) * 1e6 / chain),
            "events_per_call": round(recorded / chain, 2),
        }
    return costs


def convolutions(width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def deep_narrow() -> nn.Module:
    blocks = [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU()) for _ in range(60)]
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 256), *blocks, nn.Linear(256, 10))


class Images(Dataset):
    """Samples that are there already, without end.

    Attributes:
        delay_s: A batch comes that much later, as from a slow disk: a wait that other work on the machine hardly moves.
    """

    def __init__(self, size: int, batch: int, delay_s: float) -> None:
        self.images, self.labels = torch.randn(8 * batch, 3, size, size), torch.randint(10, (8 * batch,))
        self.delay_s = delay_s

    def __len__(self) -> int:
        return 1 << 24

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        time.sleep(self.delay_s)
        return [(self.images[index % len(self.images)], self.labels[index % len(self.images)]) for index in indices]


def loader(size: int, batch: int, *, delay_s: float = 0.0, workers: int = 0) -> DataLoader:
    """Make a loader; with workers memory is pinned, because its thread would compete with launches."""
    data = Images(size, batch, delay_s)
    return DataLoader(data, batch_size=batch, num_workers=workers, pin_memory=workers > 0 and torch.cuda.is_available())


def experiments(device: torch.device, *, small: bool, ddp: bool) -> list[Callable[[], Experiment]]:
    width, batch = (16, 8) if small else (128, 256)
    size = 32 if small else 64
    layer = 512 if small else 16384
    workers = 0 if small else 8

    def make(name: str, model: nn.Module, data: DataLoader, *, device_waits: bool = False) -> Experiment:
        return Experiment(name, model, data, device=device, ddp=ddp, device_waits=device_waits)

    if ddp:
        return [
            lambda: make(
                "ddp-large-layers",
                nn.Sequential(
                    nn.Flatten(),
                    nn.Linear(3072, layer),
                    nn.ReLU(),
                    nn.Linear(layer, layer),
                    nn.ReLU(),
                    nn.Linear(layer, 10),
                ),
                loader(32, 16 * batch // 8, workers=workers),
            ),
            lambda: make("ddp-launch-bound", deep_narrow(), loader(32, 16)),
            lambda: make("ddp-input-bound", convolutions(width), loader(32, 32, delay_s=0.015)),
            lambda: make("ddp-compute-bound", convolutions(width), loader(size, batch, workers=workers)),
        ]
    return [
        lambda: make("launch-bound", deep_narrow(), loader(32, 16)),
        lambda: make("input-bound", convolutions(width), loader(32, 32, delay_s=0.015), device_waits=True),
        lambda: make("compute-bound", convolutions(width), loader(size, batch, workers=workers)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", default="single", choices=["single", "ddp"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, to try the script")
    arguments = parser.parse_args()
    ddp = arguments.kind == "ddp"
    rank = int(os.environ.get("RANK", "0"))
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(f"cuda:{local_rank}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    gc.freeze()
    if ddp:  # ranks that share cores disturb each other
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // int(os.environ["LOCAL_WORLD_SIZE"])
        os.sched_setaffinity(0, cores[local_rank * share : (local_rank + 1) * share])
    if ddp:
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
    hardware = {"device": torch.cuda.get_device_name(device) if cuda else "CPU", "cores": os.cpu_count()}
    command = " ".join(["python", "benchmarks/overhead_correction.py", *sys.argv[1:]])
    if not ddp:
        row = {"workload": "recording", "costs": recording_costs(device), "hardware": hardware, **stamp(command)}
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row["costs"], flush=True)
    for make in experiments(device, small=arguments.small, ddp=ddp):
        torch.manual_seed(0)
        row = {**check(make(), ddp=ddp), "rank": rank, "hardware": hardware, **stamp(command)}
        if rank == 0:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            verdicts = {c["experiment"]: (c["claimed_ms"], c["saved_ms"], c["holds"]) for c in row["checks"]}
            print(row["workload"], row["plain_ms"], row["contention_ms"], verdicts, flush=True)
    if ddp:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
