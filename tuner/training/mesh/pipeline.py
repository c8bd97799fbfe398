"""Pipeline parallelism: stages of a chain of blocks on different ranks, through which micro-batches pass.

The schedules are those of `torch.distributed.pipelining`. Its stages send one tensor, what is between two blocks; the
micro-batches themselves are on every rank of the pipeline, so that torch is given only their indices. The last stage
computes the loss of each, weighted by its share of the batch's samples or tokens, and tells the sum to all ranks.

Micro-batches are of one size. The remainder of a batch of another length goes through by itself, after them.

Sources: Huang et al., "GPipe" (2018), arXiv 1811.06965; Narayanan et al., "PipeDream" (2019) and "Efficient large-scale
language model training" (2021), arXiv 2104.04473; https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.training.mesh.gradients import sum_over
from steptune.tuner.training.micro_batch import batch_length, split_at
from steptune.tuner.workloads.workload import leaves

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.mesh.chain import Chain
    from steptune.tuner.workloads.workload import Workload

SCHEDULES = ("gpipe", "1f1b", "interleaved")
CHUNKS = 2
"""Number of stages per rank in an interleaved schedule."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Division of the blocks into stages.

    Attributes:
        starts: The number of the first block of every stage.
    """

    starts: tuple[int, ...]
    num_blocks: int
    num_ranks: int

    def blocks(self, stage: int) -> tuple[int, int]:
        """Return the first and the last block of a stage."""
        ends = (*self.starts[1:], self.num_blocks)
        return self.starts[stage], ends[stage] - 1

    def of_rank(self, rank: int) -> tuple[int, ...]:
        return tuple(range(rank, len(self.starts), self.num_ranks))

    def stage_of(self, block: int) -> int:
        return max(stage for stage, start in enumerate(self.starts) if start <= block)

    @property
    def last(self) -> int:
        return len(self.starts) - 1


def num_stages(schedule: str, num_ranks: int) -> int:
    return num_ranks * (CHUNKS if schedule == "interleaved" else 1)


class Pipeline:
    """Stages of the pipeline that one rank runs.

    Args:
        dtypes: Dtype of each block's input.
        piece_length: Samples per micro-batch.
        group: The ranks of the pipeline, in order.
    """

    def __init__(
        self,
        chain: Chain,
        stages: Stages,
        dtypes: Sequence[torch.dtype],
        *,
        schedule: str,
        piece_length: int,
        group: Any,
        device: torch.device,
    ) -> None:
        import torch.distributed as dist

        self.stages = stages
        self.schedule = schedule
        self.chain = chain
        self._dtypes = dtypes
        self._piece_length = piece_length
        self._group = group
        self._device = device
        self._own = stages.of_rank(dist.get_rank(group))
        self._schedules: dict[Any, Any] = {}
        self._loss: Callable[[Any], torch.Tensor] | None = None
        self._pieces: Sequence[Any] = ()
        self._weights: Sequence[float] = ()

    def pieces(self, workload: Workload, batch: Any) -> tuple[list[Any], list[float]]:
        """Return the micro-batches of a batch, and their weights in the loss."""
        length = batch_length(batch)
        if length is None:
            raise UnsupportedError("micro-batches require tensors with a common first dimension")
        bounds = [*range(0, length, self._piece_length), length]
        return split_at(workload, batch, bounds)

    def forward_backward(
        self, loss: Callable[[Any], torch.Tensor], pieces: Sequence[Any], weights: Sequence[float]
    ) -> torch.Tensor:
        """Accumulate the gradients of this rank's stages.

        Returns:
            The loss of the whole batch, on every rank.
        """
        import torch

        total = torch.zeros((), device=self._device)
        for _, run in groupby(zip(pieces, weights, strict=True), key=lambda pair: _shapes(pair[0])):
            alike, shares = zip(*run, strict=True)
            total += self._pass(loss, alike, shares)
        sum_over([total], self._group)
        return total

    def _pass(
        self, loss: Callable[[Any], torch.Tensor], pieces: Sequence[Any], weights: Sequence[float]
    ) -> torch.Tensor:
        """Pass micro-batches of one shape through all stages; return their loss, or zero on a rank without the last
        stage.
        """
        import torch

        self._loss, self._pieces, self._weights = loss, pieces, weights
        schedule = self._schedule_of(loss, pieces)
        numbers = torch.arange(len(pieces))
        is_last = self.stages.last in self._own
        losses: list[torch.Tensor] = []
        try:
            schedule.step(
                *((numbers,) if 0 in self._own else ()),
                number=numbers,
                target=numbers if is_last else None,
                losses=losses if is_last else None,
                return_outputs=False,
            )
        except RuntimeError as error:
            raise error.__cause__ or error from None  # torch hides what a stage raised, memory that ran out included
        self._pieces = ()
        return (
            torch.stack([value.detach() for value in losses]).sum() if is_last else torch.zeros((), device=self._device)
        )

    def _stage(self, stage: int, received: torch.Tensor, number: int) -> torch.Tensor:
        """Run one micro-batch through one stage."""
        piece, weight, loss = self._pieces[number], self._weights[number], self._loss
        assert loss is not None
        if stage < self.stages.last:
            first, last = self.stages.blocks(stage)
            return self.chain.stage(lambda: loss(piece), first, last, received if stage else None).contiguous()
        if not weight:  # a piece without a token has no mean
            return (received * 0.0).sum().reshape(1)
        return (self.chain.stage(lambda: loss(piece), *self.stages.blocks(stage), received) * weight).reshape(1)

    def _schedule_of(self, loss: Callable[[Any], torch.Tensor], pieces: Sequence[Any]) -> Any:
        """Return torch's schedule for this number and shape of micro-batches."""
        import torch

        key = len(pieces), _shapes(pieces[0])
        if key not in self._schedules:
            with torch.no_grad(), unchanged_generators(self._device):
                shape = self.chain.entry(lambda: loss(pieces[0])).shape
            stages = [self._torch_stage(stage, shape) for stage in self._own]
            self._schedules[key] = make_schedule(self.schedule, stages, len(pieces), lambda output, target: output)
        return self._schedules[key]

    def _torch_stage(self, stage: int, shape: Sequence[int]) -> Any:
        import torch
        from torch.distributed.pipelining import PipelineStage

        def sent(block: int) -> torch.Tensor:
            return torch.empty(shape, dtype=self._dtypes[block], device="meta", requires_grad=True)

        first, last = self.stages.blocks(stage)
        return PipelineStage(
            _stage_module(self._stage, stage),
            stage,
            self.stages.last + 1,
            self._device,
            input_args=torch.arange(1) if stage == 0 else sent(first),
            output_args=torch.empty(1, device="meta", requires_grad=True)
            if stage == self.stages.last
            else sent(last + 1),
            group=self._group,
        )


def make_schedule(schedule: str, stages: list[Any], num_micro_batches: int, loss: Callable[..., Any]) -> Any:
    """Return torch's schedule of this name.

    A schedule that needs more micro-batches than there are, or a number divisible by its rounds, is replaced by
    one that runs all forward passes first.
    """
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleLoopedBFS

    if schedule == "interleaved":
        rounds = max(1, num_micro_batches // stages[0].group_size)
        fits = num_micro_batches % rounds == 0
        if fits:
            return ScheduleInterleaved1F1B(stages, num_micro_batches, loss_fn=loss, scale_grads=False)
        return ScheduleLoopedBFS(stages, num_micro_batches, loss_fn=loss, scale_grads=False)
    kind = Schedule1F1B if schedule == "1f1b" and num_micro_batches >= stages[0].num_stages else ScheduleGPipe
    return kind(stages[0], num_micro_batches, loss_fn=loss, scale_grads=False)


def _stage_module(run: Callable[[int, torch.Tensor, int], torch.Tensor], stage: int) -> torch.nn.Module:
    """Return the module that torch calls for a stage; the parameters stay in the model."""
    import torch

    class Stage(torch.nn.Module):
        def forward(self, received: torch.Tensor, *, number: torch.Tensor) -> torch.Tensor:
            return run(stage, received, int(number))

    return Stage()


def _shapes(piece: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape) for leaf in leaves(piece) if hasattr(leaf, "shape"))


@contextmanager
def unchanged_generators(device: torch.device) -> Iterator[None]:
    """Restore, on exit, the random generators that training draws from."""
    import torch

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
