"""Interface of the runners of a job's step: launched by the host, recorded, or in a pipeline. The job knows only this
interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class StepRunner(Protocol):
    """A way to run the steps of one job.

    Attributes:
        cache_casts: Whether autocast keeps the casts of weights during a forward pass; None leaves that to torch.
        accumulates: Whether a step adds to gradients that it finds; else it writes them anew.
        num_pieces: Largest number of micro-batches of a batch; None before the first step, and where the runner does
            not count them.
    """

    cache_casts: bool | None
    accumulates: bool
    num_pieces: int | None

    def step(self, batch: Any) -> torch.Tensor:
        """Make one update from one batch on the device.

        Returns:
            The loss, detached, on the device.
        """

    def settle(self) -> None:
        """Finish what a step has deferred, such as the scheduler's step. It may wait for the device."""

    @property
    def skipped_steps(self) -> int:
        """Number of skipped updates that the job does not know of. Reading it waits for the device."""
