"""Step runner that launches the step from the host, one operation after the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from steptune.tuner.training.micro_batch import batch_length, split_batch

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob


class HostStep:
    """Step runner that runs micro-batches one after the other, or the workload's own step."""

    cache_casts: bool | None = None
    accumulates = True

    def __init__(self, job: TrainingJob) -> None:
        self.num_pieces: int | None = None
        self._job = job

    def step(self, batch: Any) -> torch.Tensor:
        job = self._job
        if job.workload.has_custom_step:
            return job.workload.training_step(job, batch).detach()
        loss = self.forward_backward(*self.pieces(batch))
        job.update()
        return loss

    def settle(self) -> None:
        """Do nothing: this runner leaves no work for later."""

    @property
    def skipped_steps(self) -> int:
        return 0

    def pieces(self, batch: Any) -> tuple[list[Any], Sequence[float]]:
        """Return the micro-batches of a batch (at most one per sample), and their weights in the batch's loss."""
        count = self._job.plan.step.num_micro_batches
        count = min(count, batch_length(batch) or count)
        return ([batch], [1.0]) if count == 1 else split_batch(self._job.workload, batch, count)

    def forward_backward(self, pieces: list[Any], weights: Sequence[Any]) -> torch.Tensor:
        """Accumulate the gradients of all micro-batches.

        Returns:
            The loss of the whole batch, detached.
        """
        job = self._job
        self.num_pieces = max(len(pieces), self.num_pieces or 0)
        if len(pieces) == 1:
            loss = job.loss(pieces[0])
            job.backward(loss)
            return loss.detach()
        total: Any = 0.0
        # A piece without a token has no mean, and not a number times nothing is none either.
        if any(isinstance(weight, float) and weight > 0 for weight in weights):
            pieces = [piece for piece, weight in zip(pieces, weights, strict=True) if weight]
            weights = [weight for weight in weights if weight]
        for number, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
            with job.layout.waiting(job.model) if number < len(pieces) - 1 else nullcontext():
                loss = job.loss(piece) * weight
                job.backward(loss)
            for hook in job.hooks:
                hook.after_micro_batch(job.model)
            total = total + loss.detach()
        return total  # type: ignore[no-any-return]
