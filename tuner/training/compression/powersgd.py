"""PowerSGD: gradient compression that sends a matrix as two thin factors of its low-rank approximation.

M (n x m) is approximated by P Q^T of a given rank, by one step of subspace iteration that starts from the Q of the step
before (warm start). What the product leaves out is added to the next gradient (error feedback). Tensors for which that
sends no fewer bytes are averaged as they are. The first two steps are, too: DDP rebuilds its buckets after the first,
and the state of this technique is kept by bucket.

Source: Vogels et al. (2019), arXiv 1905.13727; torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.training.compression.base import FIRST_COMPRESSED, Compression
from steptune.tuner.training.compression.by_bucket import BucketLayout

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import GradBucket

    from steptune.tuner.training.compression.lane import Lane
    from steptune.tuner.training.step_hook import Names


_GROUPS: list[Any] = []
"""Process groups kept alive until the process ends.

Gloo's threads run the callbacks of PyTorch's hook, which hold the group and release it after their result is out: a
group released last by its own thread cannot join that thread, and aborts.
"""


class PowerSgd(Compression):
    method = "powersgd"

    def __init__(self, lane: Lane, rank: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        super().__init__()
        self._lane = lane
        _GROUPS.append(lane.group)
        self._state = PowerSGDState(
            process_group=lane.group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=FIRST_COMPRESSED,
            use_error_feedback=True,
            warm_start=True,
        )
        self._layout = BucketLayout()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        if self._state.iter >= FIRST_COMPRESSED:
            for name, tensor in self._layout.see(bucket).items():
                self._kept_by_torch[name][bucket.index()] = tensor
        # Its own futures hold one another up on gloo; one bucket after the other they do not.
        return self._lane.submit(lambda: powerSGD_hook(self._state, bucket).wait())

    @property
    def _kept_by_torch(self) -> dict[str, dict[int, torch.Tensor]]:
        """State that torch keeps for every bucket, by kind: the error, and the two factors "p" and "q"."""
        state = self._state
        return {"error": state.error_dict, "p": state.p_memory_dict, "q": state.q_memory_dict}

    def kept(self, names: Names) -> dict[str, Any]:
        by_kind = self._kept_by_torch
        tensors = {index: {kind: kept[index] for kind, kept in by_kind.items()} for index in by_kind["error"]}
        return self._layout.kept(tensors, names)

    def keep(self, kept: Mapping[str, Any], names: Names) -> None:
        for tensors in self._kept_by_torch.values():
            tensors.clear()
        self._layout.keep(kept, names)

    @property
    def settings(self) -> dict[str, Any]:
        return {"rank": self._state.matrix_approximation_rank}

    @property
    def factor(self) -> float:
        return float(self._state.compression_stats()[0])
