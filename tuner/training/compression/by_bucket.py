"""Per-bucket state of a compression technique, and its transfer into another job.

DDP rebuilds its buckets after a job's first step, in the order in which gradients arrived. Loaded state is therefore
held back until the first step that compresses, and then assigned to the buckets of the same parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import WorkloadRejectedError

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import GradBucket

    from steptune.tuner.training.step_hook import Names


class BucketLayout:
    """Parameters of each bucket, and loaded state that is not yet assigned to its bucket."""

    def __init__(self) -> None:
        self._parameters: dict[int, list[torch.Tensor]] = {}
        self._awaited: dict[int, dict[str, Any]] = {}
        self._names: Names = {}

    def see(self, bucket: GradBucket) -> dict[str, torch.Tensor]:
        """Register a bucket in a step that compresses gradients.

        Returns:
            The state loaded for the bucket, at the first call only.

        Raises:
            WorkloadRejectedError: The loaded state belongs to other buckets.
        """
        index = bucket.index()
        if index in self._parameters:
            return {}
        self._parameters[index] = bucket.parameters()
        awaited = self._awaited.pop(index, None)
        if self._names:
            own = [self._names[parameter] for parameter in bucket.parameters()]  # type: ignore[index]
            if awaited is None or awaited["parameters"] != own or (bucket.is_last() and self._awaited):
                raise WorkloadRejectedError(
                    f"the saved compression state belongs to other gradient buckets (bucket {index} differs): "
                    "resume with the same ddp_buckets, model and number of ranks, or do not load this state"
                )
            if bucket.is_last():
                self._names = {}
        tensors: dict[str, torch.Tensor] = {} if awaited is None else awaited["tensors"]
        device = bucket.buffer().device
        return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}

    def kept(self, tensors: Mapping[int, Mapping[str, torch.Tensor]], names: Names) -> dict[str, Any]:
        """Return the parameter names and tensors of each bucket, or the loaded state that is not yet assigned."""
        if self._names:
            return {"buckets": dict(self._awaited)}
        return {
            "buckets": {
                index: {
                    "parameters": [names[parameter] for parameter in self._parameters[index]],  # type: ignore[index]
                    "tensors": {name: tensor.clone() for name, tensor in tensors[index].items()},
                }
                for index in tensors
            }
        }

    def keep(self, kept: Mapping[str, Any], names: Names) -> None:
        """Load the result of `kept`; it is assigned to the buckets once they are known."""
        self._parameters = {}
        self._awaited = dict(kept["buckets"])
        self._names = names if self._awaited else {}
