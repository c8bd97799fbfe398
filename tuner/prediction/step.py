"""Work of a rank in a step without any exchange, derived from a measured breakdown.

    before       waiting for the batch and copying it, starting an epoch
    forward      } everything else, host gaps included, in proportion to the compute of the two phases;
    backward     } recomputation belongs to the backward pass
    optimizer    the update, on the device and on the host. Ranks that divide it save the time of moving its
                 bytes (`UPDATE_BYTES` for each parameter), but not the work for every tensor

Exposed communication is taken out as far as it held compute up (`Breakdown.removable_ns`), and so is what compute lost
to communication beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Breakdown, StepPhase

UPDATE_BYTES = 28
"""Bytes that AdamW reads and writes for one FP32 parameter: it reads parameter, gradient and two moments, and writes
back three of them."""
BACKWARD_SHARE = 2 / 3
"""Default share of the backward pass in the compute of both passes: each matmul of the forward pass needs two in the
backward."""
NO_PHASES = (
    "the profile does not separate forward and backward pass: two thirds of their compute time are counted as backward "
    "pass"
)


@dataclass(frozen=True, kw_only=True)
class ComputeStep:
    """Nanoseconds of a step without communication.

    Attributes:
        forward_ns: Time of the forward passes of all micro-batches; `backward_ns` likewise.
        divisible_ns: Part of `optimizer_ns` that can be divided among ranks.
        num_micro_batches: Number of micro-batches whose gradients are accumulated before they are exchanged.
    """

    before_ns: float
    forward_ns: float
    backward_ns: float
    optimizer_ns: float
    divisible_ns: float = 0.0
    num_micro_batches: int = 1

    @property
    def total_ns(self) -> float:
        return self.before_ns + self.forward_ns + self.backward_ns + self.optimizer_ns

    def update_ns(self, num_parts: int) -> float:
        """Return the update time of a rank that updates one of `num_parts` equal parts of the parameters."""
        return self.optimizer_ns - self.divisible_ns * (1 - 1 / num_parts)

    def scaled(self, factor: float) -> ComputeStep:
        """Return the step with the time of every part multiplied by a factor."""
        names = ("before_ns", "forward_ns", "backward_ns", "optimizer_ns", "divisible_ns")
        return replace(self, **{name: getattr(self, name) * factor for name in names})


def compute_step(
    breakdown: Breakdown, *, moving_ns: float = 0.0, num_micro_batches: int = 1, contention: float = 0.0
) -> ComputeStep:
    """Return the parts of a step without communication.

    Args:
        moving_ns: Time of moving the bytes of an update.
        contention: Contention while the breakdown was taken, as in `timeline.simulate`.
    """
    times = breakdown.per_step_ns
    before_ns = sum(times.get(c, 0.0) for c in (Category.DATA_WAIT, Category.EPOCH_RESTART, Category.COPY_H2D))
    optimizer_ns = sum(times.get(c, 0.0) for c in (Category.OPTIMIZER, Category.OPTIMIZER_HOST))
    exposed_ns = breakdown.removable_ns(Category.COMMUNICATION)
    lost_ns = contention * breakdown.overlapped.get(Category.COMMUNICATION, 0) / breakdown.num_steps
    passes_ns = sum(times.values()) - before_ns - optimizer_ns - exposed_ns
    share = backward_share(breakdown)
    backward_ns = BACKWARD_SHARE * passes_ns if share is None else share * passes_ns
    return ComputeStep(
        before_ns=before_ns,
        forward_ns=passes_ns - backward_ns,
        backward_ns=max(0.0, backward_ns - lost_ns),  # gradients are exchanged beside the backward pass
        optimizer_ns=optimizer_ns,
        divisible_ns=min(times.get(Category.OPTIMIZER, 0.0), moving_ns),
        num_micro_batches=num_micro_batches,
    )


def backward_share(breakdown: Breakdown) -> float | None:
    """Return the backward pass's share of the compute of both passes; None where the profile does not show it."""
    forward = breakdown.phases.get(StepPhase.FORWARD, 0)
    backward = breakdown.phases.get(StepPhase.BACKWARD, 0) + breakdown.phases.get(StepPhase.RECOMPUTE, 0)
    return backward / (forward + backward) if forward and backward else None
