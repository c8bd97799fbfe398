"""Parts of the user's tensors on the ranks of a replica, and their reassembly.

Parts are plain tensors under the user's own names. A part of a parameter is cut along one dimension; a fused one
(query, key and value in one matmul) is cut within each of its stretches, so that a rank has whole heads of all
three.

Norms: an element counts once, however many ranks have a copy: its square is divided by that number and summed over the
replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Division of a tensor into equal parts along a dimension.

    Attributes:
        stretches: Number of stretches of the dimension, each of which is cut by itself.
    """

    dim: int
    num_parts: int
    stretches: int = 1

    def part(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        """Return a copy of the tensor's part with this number."""
        import torch

        pieces = [stretch.chunk(self.num_parts, self.dim)[number] for stretch in whole.chunk(self.stretches, self.dim)]
        return torch.cat(pieces, self.dim).clone(memory_format=torch.contiguous_format)

    def joined(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """Join all parts, given in order, into the whole tensor."""
        import torch

        by_stretch = zip(*(part.chunk(self.stretches, self.dim) for part in parts), strict=True)
        return torch.cat([piece for stretch in by_stretch for piece in stretch], self.dim)

    def part_shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        return tuple(size // self.num_parts if place == self.dim else size for place, size in enumerate(shape))


@dataclass(frozen=True, kw_only=True)
class Held:
    """Placement of a tensor of the user's model within a replica.

    Attributes:
        shape: Shape of the whole tensor.
        holders: Ranks of the replica whose parts make the whole, in order; the first of several copies.
        ranks: All ranks that train it.
        copies: Number of ranks of the replica that hold each element.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    holders: tuple[int, ...]
    ranks: tuple[int, ...]
    copies: int
    cut: Cut | None = None


class Replica:
    """The ranks that together hold one copy of the model, and the placement of its tensors on them.

    Args:
        group: Process group of these ranks.
        held: Placements by the user's names, the same on all ranks.
    """

    def __init__(self, group: Any, held: Mapping[str, Held], device: torch.device) -> None:
        import torch.distributed as dist

        self.group = group
        self.held = held
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._device = device

    def whole(self, name: str, own: torch.Tensor | None, *, of: torch.dtype | None = None) -> torch.Tensor:
        """Assemble a whole tensor, or a whole gradient or optimizer moment of its shape; every rank of the replica must
        call it.

        Args:
            own: This rank's part or copy; None where it has neither.
            of: Dtype of the result, where that is not the tensor's.
        """
        import torch
        import torch.distributed as dist

        held = self.held[name]
        if held.copies == self.size:
            assert own is not None, "every rank must hold a copy"
            return own.detach()
        shape = self.own_shape(name)
        parts = []
        for holder in held.holders:
            if holder == self.rank:
                assert own is not None, "a holder must have its own part"
                part = own.detach().clone(memory_format=torch.contiguous_format)
            else:
                part = torch.empty(shape, dtype=of or held.dtype, device=self._device)
            dist.broadcast(part, src=dist.get_global_rank(self.group, holder), group=self.group)
            parts.append(part)
        return held.cut.joined(parts) if held.cut else parts[0]

    def own_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's part or copy of a tensor."""
        held = self.held[name]
        return held.cut.part_shape(held.shape) if held.cut else held.shape

    def has(self, name: str) -> bool:
        """Say whether this rank trains a parameter."""
        return self.rank in self.held[name].ranks

    def joined(self, name: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Assemble the optimizer state of a whole parameter from the states on the ranks that hold its parts."""
        cut, shape = self.held[name].cut, self.own_shape(name)
        if cut is None:
            return parts[0]
        return {
            key: cut.joined(part[key] for part in parts) if getattr(value, "shape", None) == shape else value
            for key, value in parts[0].items()
        }

    def own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor; the whole tensor if it is not sharded."""
        held = self.held[name]
        return held.cut.part(whole, self.rank % held.cut.num_parts) if held.cut else whole

    def total_norm(self, gradients: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
        """Return the norm of the whole model's gradients; every rank of the replica must call it."""
        import torch
        import torch.distributed as dist

        squares = torch.zeros((), device=self._device, dtype=dtype)
        for name, gradient in gradients:
            squares += torch.linalg.vector_norm(gradient.detach(), dtype=dtype) ** 2 / self.held[name].copies
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt()

    def every(self, value: Any) -> list[Any]:
        """Return the values of all ranks of the replica, in rank order."""
        import torch.distributed as dist

        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values
