"""How much of a pipeline's time is lost to filling and draining it, by schedule, against (d-1)/(m+d-1).

d ranks of gloo on this machine; stages sleep rather than compute, so that a few cores are enough for many ranks:
twice as long backward as forward, as transformer blocks take. With v stages on a rank, each of a v-th of its time,
the schedule loses (d-1)/(v*m+d-1). What is measured is one step of the slowest rank less the sleep of one, as a share
of the step: the bubble, and what sending and waking up cost.

    python benchmarks/pipeline_bubble.py            # writes results/pipeline_bubble.json

The order of the actions alone, without a clock, is tested in tests/integration/test_pipeline_order.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stamp import RESULTS, hardware, stamp
from torch.distributed.pipelining import PipelineStage

from steptune.tuner.hardware import describe_environment
from steptune.tuner.training.mesh.pipeline import CHUNKS, SCHEDULES, make_schedule, num_stages

OUTPUT = RESULTS / "pipeline_bubble.json"
FORWARD_S = 0.05
"""Seconds of the forward pass of a rank's part of the model, for one micro-batch."""
REPEATS = 5
NUM_RANKS = (2, 4)
NUM_MICRO_BATCHES = (4, 8, 16)

Act = Callable[[str, int, int], None]
"""Called with "F" or "B", the stage, and the micro-batch."""


class _Acting(torch.autograd.Function):
    """Identity that acts, forward and backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, act: Act, stage: int, number: int) -> torch.Tensor:
        ctx.act, ctx.stage, ctx.number = act, stage, number
        act("F", stage, number)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.act("B", ctx.stage, ctx.number)
        return gradient.clone(), None, None, None


class _Stage(torch.nn.Module):
    def __init__(self, act: Act, stage: int) -> None:
        super().__init__()
        self._act, self._stage = act, stage
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, received: torch.Tensor, *, number: torch.Tensor) -> torch.Tensor:
        value = received.float() * self.weight
        return _Acting.apply(value, self._act, self._stage, int(number))  # type: ignore[no-any-return]


def make_step(schedule: str, num_micro_batches: int, act: Act) -> Callable[[], None]:
    """A step of this rank's stages, in the default group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = num_stages(schedule, ranks)
    sent = torch.empty(1, device="meta", requires_grad=True)
    own = [
        PipelineStage(
            _Stage(act, number),
            number,
            count,
            torch.device("cpu"),
            input_args=torch.arange(1) if number == 0 else sent,
            output_args=sent,
        )
        for number in range(rank, count, ranks)
    ]
    torch_schedule = make_schedule(schedule, own, num_micro_batches, lambda output, target: output.sum())
    numbers = torch.arange(num_micro_batches)
    is_last = rank == ranks - 1

    def step() -> None:
        torch_schedule.step(
            *((numbers,) if rank == 0 else ()),
            number=numbers,
            target=numbers if is_last else None,
            losses=[] if is_last else None,
            return_outputs=False,
        )

    return step


def measure(rank: int, ranks: int, store: str, pipe: Any) -> None:
    """Sends, for every schedule and number of micro-batches, the seconds of each step of the slowest rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    for num_micro_batches in NUM_MICRO_BATCHES:
        for schedule in SCHEDULES:
            taken = steps_of(schedule, num_micro_batches)
            if rank == 0:
                pipe.send((schedule, num_micro_batches, taken))
    dist.destroy_process_group()


def steps_of(schedule: str, num_micro_batches: int) -> list[float]:
    """Seconds of each step of the slowest rank, after one that warms up."""
    chunks = CHUNKS if schedule == "interleaved" else 1

    def sleep(kind: str, stage: int, number: int) -> None:
        time.sleep(FORWARD_S / chunks * (2 if kind == "B" else 1))

    step = make_step(schedule, num_micro_batches, sleep)
    step()
    taken = []
    for _ in range(REPEATS):
        dist.barrier()
        began = time.perf_counter()
        step()
        slowest = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        taken.append(float(slowest))
    return taken


def rows_of(ranks: int) -> Iterator[dict[str, Any]]:
    """Every schedule on so many ranks, measured and expected."""
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        processes = [context.Process(target=measure, args=(rank, ranks, store, theirs)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for _ in range(len(NUM_MICRO_BATCHES) * len(SCHEDULES)):
            yield row(ranks, *ours.recv())
        for process in processes:
            process.join()


def row(ranks: int, schedule: str, num_micro_batches: int, taken: list[float]) -> dict[str, Any]:
    """Shares of a step that the slowest rank does not sleep as a stage."""
    busy_s = 3 * FORWARD_S * num_micro_batches
    chunks = CHUNKS if schedule == "interleaved" else 1
    shares = sorted(1 - busy_s / seconds for seconds in taken)
    return {
        "schedule": schedule,
        "ranks": ranks,
        "micro_batches": num_micro_batches,
        "expected": (ranks - 1) / (chunks * num_micro_batches + ranks - 1),
        "measured": statistics.median(shares),
        "least": shares[0],
        "most": shares[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    rows = []
    for ranks in NUM_RANKS:
        for found_row in rows_of(ranks):
            rows.append(found_row)
            print(
                "{schedule:12s} d={ranks} m={micro_batches:2d} expected {expected:.3f} measured {measured:.3f} "
                "({least:.3f} to {most:.3f})".format(**found_row),
                flush=True,
            )
    found = {
        **stamp("python benchmarks/pipeline_bubble.py"),
        "hardware": hardware(describe_environment("cpu", Path(tempfile.gettempdir()), max(NUM_RANKS))),
        "forward_s": FORWARD_S,
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
