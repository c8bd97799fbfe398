"""Step runner of a rank in a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from steptune.tuner.training.host_step import HostStep

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.mesh.pipeline import Pipeline


class PipelineStep(HostStep):
    """Step runner whose micro-batches pass through the stages of all ranks."""

    def __init__(self, job: TrainingJob, pipeline: Pipeline) -> None:
        super().__init__(job)
        self._pipeline = pipeline
        pipeline.chain.on_leaving = lambda sent: job.formats.look(sent, job.device)

    def pieces(self, batch: Any) -> tuple[list[Any], Sequence[float]]:
        return self._pipeline.pieces(self._job.workload, batch)

    def forward_backward(self, pieces: list[Any], weights: Sequence[Any]) -> torch.Tensor:
        return self._pipeline.forward_backward(self._job.loss, pieces, weights)
