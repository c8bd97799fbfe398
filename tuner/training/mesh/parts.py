"""Parts of the user's tensors on the ranks of a replica, and reassembly of the whole.

Parts are plain tensors under the user's own names. A part of a parameter is cut along one dimension; a fused one
(query, key and value in one product) is cut within each of its stretches, so that a rank has whole heads of all
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
    """Equal parts along a dimension.

    Attributes:
        stretches: Of the dimension, each of which is cut by itself.
    """

    dim: int
    num_parts: int
    stretches: int = 1

    def part(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        """A copy of one part."""
        import torch

        pieces = [stretch.chunk(self.num_parts, self.dim)[number] for stretch in whole.chunk(self.stretches, self.dim)]
        return torch.cat(pieces, self.dim).clone(memory_format=torch.contiguous_format)

    def joined(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """The whole of all parts, in order."""
        import torch

        by_stretch = zip(*(part.chunk(self.stretches, self.dim) for part in parts), strict=True)
        return torch.cat([piece for stretch in by_stretch for piece in stretch], self.dim)

    def part_shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        return tuple(size // self.num_parts if place == self.dim else size for place, size in enumerate(shape))


@dataclass(frozen=True, kw_only=True)
class Held:
    """Location of a tensor of the user's model in a replica.

    Attributes:
        shape: Of the whole.
        holders: Ranks of the replica whose parts make the whole, in order; of several copies the first.
        ranks: All that train it.
        copies: On how many ranks of the replica each element is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    holders: tuple[int, ...]
    ranks: tuple[int, ...]
    copies: int
    cut: Cut | None = None


class Replica:
    """The ranks that hold one model together, and what each of them holds.

    Args:
        group: Their process group.
        held: By the user's names, the same on all of them.
    """

    def __init__(self, group: Any, held: Mapping[str, Held], device: torch.device) -> None:
        import torch.distributed as dist

        self.group = group
        self.held = held
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._device = device

    def whole(self, name: str, own: torch.Tensor | None, *, of: torch.dtype | None = None) -> torch.Tensor:
        """A tensor, or one with its shape (a gradient, an optimizer's moment); every rank of the replica calls it.

        Args:
            own: This rank's part or copy; None where it has neither.
            of: Its number format, where that is not the tensor's.
        """
        import torch
        import torch.distributed as dist

        held = self.held[name]
        if held.copies == self.size:
            assert own is not None, "a copy is on every rank"
            return own.detach()
        shape = self.own_shape(name)
        parts = []
        for holder in held.holders:
            if holder == self.rank:
                assert own is not None, "a holder has its part"
                part = own.detach().clone(memory_format=torch.contiguous_format)
            else:
                part = torch.empty(shape, dtype=of or held.dtype, device=self._device)
            dist.broadcast(part, src=dist.get_global_rank(self.group, holder), group=self.group)
            parts.append(part)
        return held.cut.joined(parts) if held.cut else parts[0]

    def own_shape(self, name: str) -> tuple[int, ...]:
        """Shape of this rank's part or copy."""
        held = self.held[name]
        return held.cut.part_shape(held.shape) if held.cut else held.shape

    def has(self, name: str) -> bool:
        """Say whether this rank trains it."""
        return self.rank in self.held[name].ranks

    def joined(self, name: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """An optimizer's state of a parameter, from those of its holders."""
        cut, shape = self.held[name].cut, self.own_shape(name)
        if cut is None:
            return parts[0]
        return {
            key: cut.joined(part[key] for part in parts) if getattr(value, "shape", None) == shape else value
            for key, value in parts[0].items()
        }

    def own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor, or all of it."""
        held = self.held[name]
        return held.cut.part(whole, self.rank % held.cut.num_parts) if held.cut else whole

    def total_norm(self, gradients: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
        """Norm of the whole model's gradients; every rank of the replica calls it."""
        import torch
        import torch.distributed as dist

        squares = torch.zeros((), device=self._device, dtype=dtype)
        for name, gradient in gradients:
            squares += torch.linalg.vector_norm(gradient.detach(), dtype=dtype) ** 2 / self.held[name].copies
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt()

    def every(self, value: Any) -> list[Any]:
        """Values of all ranks of the replica, in their order."""
        import torch.distributed as dist

        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values
