"""Expert parallelism: the experts of a mixture are sharded across ranks, which exchange tokens and results.

Every rank routes its own tokens, exactly as without: the same choices, the same capacity, the same dropped ones. An
all-to-all then brings the slots of every expert to the rank that has it, which runs those of all ranks at once, and
another one brings the results back; in the backward pass gradients go the same ways. So an expert's gradient is the sum
over the ranks that sent it tokens, and is divided as the average over ranks would be.

Source: Lepikhin et al., "GShard" (2020), arXiv 2006.16668, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.training.experts import movable_layers, num_movable_experts
from steptune.tuner.training.mesh.parts import Cut

if TYPE_CHECKING:
    import torch


def lay_experts(model: torch.nn.Module, group: Any, *, even: bool) -> dict[int, Cut]:
    """Keep only this rank's experts in every layer with experts that can be placed on other ranks.

    Args:
        even: Whether all ranks have equally many tokens.

    Returns:
        Each part's cut, by the identity of its new parameter.

    Raises:
        UnsupportedError: No layer's experts can be moved, or their number is not divisible by that of the ranks.
    """
    import torch
    import torch.distributed as dist

    size, rank = dist.get_world_size(group), dist.get_rank(group)
    count = num_movable_experts(model)
    if not count or count % size:
        raise UnsupportedError(f"{count} experts cannot be divided evenly among {size} ranks")
    cuts: dict[int, Cut] = {}
    for layer in movable_layers(model):
        for module in layer.experts.modules():
            for name, whole in list(module.named_parameters(recurse=False)):
                cut = Cut(dim=0, num_parts=size)
                part = torch.nn.Parameter(cut.part(whole.detach(), rank), requires_grad=whole.requires_grad)
                setattr(module, name, part)
                cuts[id(part)] = cut
        layer.exchange = _Exchange(layer.experts, group, even=even)
    return cuts


class _Exchange:
    """Exchange of tokens between ranks, so that each expert's tokens are computed on the rank that holds the expert."""

    def __init__(self, experts: torch.nn.Module, group: Any, *, even: bool) -> None:
        import torch.distributed as dist

        self._experts = experts
        self._group = group
        self._size = dist.get_world_size(group)
        self._even = even

    def __call__(self, slots: torch.Tensor) -> torch.Tensor:
        """Run the experts on the slots (experts, capacity, width), and return the results in the same shape. The
        capacity may be different on each rank.
        """
        import torch.nn.functional as F

        num_experts, capacity, width = slots.shape
        most = capacity if self._even else self._most(capacity)
        sent = F.pad(slots, (0, 0, 0, most - capacity)).reshape(self._size, -1, most, width)
        received = self._exchanged(sent).transpose(0, 1)  # own experts, ranks, most, width
        done = self._experts(received.reshape(len(received), -1, width)).view(len(received), self._size, most, width)
        back: torch.Tensor = self._exchanged(done.transpose(0, 1)).reshape(num_experts, most, width)
        return back[:, :capacity]

    def _most(self, capacity: int) -> int:
        import torch.distributed as dist

        found = [0] * self._size
        dist.all_gather_object(found, capacity, group=self._group)
        return max(found)

    def _exchanged(self, parts: torch.Tensor) -> torch.Tensor:
        return _all_to_all().apply(parts.contiguous(), self._group)  # type: ignore[no-any-return]


def _all_to_all() -> Any:
    """Return an all-to-all function that sends part k to rank k; gradients are sent in the opposite direction."""
    import torch
    import torch.distributed as dist

    def exchanged(parts: torch.Tensor, group: Any) -> torch.Tensor:
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    class AllToAll(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, parts: torch.Tensor, group: Any) -> torch.Tensor:
            ctx.group = group
            return exchanged(parts, group)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return exchanged(gradient.contiguous(), ctx.group), None

    return AllToAll
