"""Averaging of compressed gradients in two stages: each rank averages one part, which it receives from all ranks, and
sends the result to all ranks.

    encode my gradient, one part for each rank --all-to-all--> decode and average my part --encode, all-gather--> decode

Every number is sent twice in its short form, whatever the number of ranks; gathering all short forms everywhere, as the
quantising hooks of PyTorch do, sends them once for each rank.

Source: Tang et al., "1-bit Adam" (2021), arXiv 2102.02888; Wang et al., "ZeRO++" (2023), arXiv 2306.10209
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.training.compression.base import FIRST_COMPRESSED, FlatCompression, average_dense
from steptune.tuner.training.compression.by_bucket import BucketLayout

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import GradBucket

    from steptune.tuner.training.compression.lane import Lane
    from steptune.tuner.training.step_hook import Names


class TwoStages(FlatCompression):
    """Compression whose encoded values are averaged in two stages.

    Attributes:
        block: Number of elements that share one scale.
        feeds_back: Whether encoding errors are added to the next step's numbers, on the sending and the averaging rank.
    """

    block: int
    feeds_back: bool

    def __init__(self, lane: Lane) -> None:
        super().__init__(lane)
        self._lost: dict[tuple[int, str], torch.Tensor] = {}
        self._layout = BucketLayout()

    def see(self, bucket: GradBucket) -> None:
        if self.feeds_back and self.num_steps >= FIRST_COMPRESSED:
            for place, lost in self._layout.see(bucket).items():
                self._lost[bucket.index(), place] = lost

    def kept(self, names: Names) -> dict[str, Any]:
        if not self.feeds_back:
            return {}
        lost: dict[int, dict[str, torch.Tensor]] = {}
        for (key, place), tensor in self._lost.items():
            lost.setdefault(key, {})[place] = tensor
        return self._layout.kept(lost, names)

    def keep(self, kept: Mapping[str, Any], names: Names) -> None:
        self._lost = {}
        self._layout.keep(kept, names)

    @abstractmethod
    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode rows of numbers as bytes and one scale per row."""

    @abstractmethod
    def decode(self, payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Decode rows of numbers to FP32."""

    def mean_of(self, payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the mean of all ranks' decoded rows, from bytes (ranks, rows, bytes) and scales (ranks, rows)."""
        return self.decode(payload.flatten(0, 1), scales.flatten()).view(len(payload), -1, self.block).mean(0)

    def average(self, flat: torch.Tensor, group: Any, key: int) -> torch.Tensor:
        import torch
        import torch.distributed as dist

        if self.feeds_back and self.num_steps < FIRST_COMPRESSED:
            self.count(flat, flat.nbytes)
            return average_dense(flat, group)
        num_ranks = dist.get_world_size(group)
        unit = num_ranks * self.block
        padded = flat.new_zeros(-(-flat.numel() // unit) * unit, dtype=torch.float32)
        padded[: flat.numel()].copy_(flat)
        payload, scales = self._encoded(padded.view(-1, self.block), (key, "sent"))
        received, their_scales = torch.empty_like(payload), torch.empty_like(scales)
        dist.all_to_all_single(received, payload, group=group)
        dist.all_to_all_single(their_scales, scales, group=group)
        part = self.mean_of(received.view(num_ranks, -1, received.shape[1]), their_scales.view(num_ranks, -1))
        payload, scales = self._encoded(part, (key, "averaged"))
        all_payload = payload.new_empty(num_ranks * payload.shape[0], *payload.shape[1:])
        all_scales = scales.new_empty(num_ranks * scales.shape[0])
        dist.all_gather_into_tensor(all_payload, payload, group=group)
        dist.all_gather_into_tensor(all_scales, scales, group=group)
        self.count(flat, received.nbytes + their_scales.nbytes)
        flat.copy_(self.decode(all_payload, all_scales).view(-1)[: flat.numel()])
        return flat

    def _encoded(self, blocks: torch.Tensor, place: tuple[int, str]) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.feeds_back:
            return self.encode(blocks)
        lost = self._lost.get(place)
        if lost is not None:
            blocks = blocks + lost
        payload, scales = self.encode(blocks)
        self._lost[place] = blocks - self.decode(payload, scales)
        return payload, scales
