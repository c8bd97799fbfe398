"""Combination of the shares of a batch that the ranks of a replica loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.training.micro_batch import batch_length
from steptune.tuner.training.structure import map_structure
from steptune.tuner.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.plan import Plan


def shares_are_even(workload: Workload, plan: Plan, num_ranks: int) -> bool:
    """Say whether it is known in advance that the ranks' shares of every batch have the same number of samples."""
    own = type(workload).batch_sampler is not Workload.batch_sampler
    whole = workload.global_batch * plan.batches.factor
    return workload.drop_last and not own and whole % num_ranks == 0


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Combination of several ranks' shares into one batch.

    Attributes:
        group: The ranks that compute on the same samples.
        even: Whether all shares have one size, which then need not be exchanged.
    """

    group: Any
    even: bool

    def together(self, batch: Any) -> Any:
        """Return the samples of all ranks, in rank order; every rank gets the same batch.

        Raises:
            UnsupportedError: The batch's tensors have no common first dimension.
        """
        import torch.distributed as dist

        if dist.get_world_size(self.group) == 1:
            return batch
        length = batch_length(batch)
        if length is None:
            raise UnsupportedError(
                "the tensors of a batch must have a common first dimension, along which ranks concatenate their shares"
            )
        lengths = self._lengths(batch, length)
        return map_structure(lambda leaf: self._whole(leaf, lengths) if hasattr(leaf, "shape") else leaf, batch)

    def _lengths(self, batch: Any, length: int) -> list[int]:
        import torch.distributed as dist

        size = dist.get_world_size(self.group)
        if self.even:
            return [length] * size
        found: list[Any] = [None] * size
        dist.all_gather_object(found, length, group=self.group)
        return found

    def _whole(self, own: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        import torch
        import torch.distributed as dist

        sent = own.contiguous()
        sent = sent.view(torch.uint8) if own.dtype is torch.bool else sent
        whole = sent.new_empty((sum(lengths), *sent.shape[1:]))
        parts = list(whole.split(lengths))
        if len(set(lengths)) == 1:
            dist.all_gather_into_tensor(whole, sent, group=self.group)
        else:
            for place, part in enumerate(parts):
                if place == dist.get_rank(self.group):
                    part.copy_(sent)
                dist.broadcast(part, src=dist.get_global_rank(self.group, place), group=self.group)
        return whole.view(torch.bool) if own.dtype is torch.bool else whole
