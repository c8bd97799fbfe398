"""Work of a rank in a step without any exchange, from a measured breakdown.

    before       waiting for the batch and copying it, starting an epoch
    forward      } everything else, host gaps included, in proportion to the compute of the two phases;
    backward     } recomputation belongs to the backward pass
    optimizer    the update, on the device and on the host. Ranks that divide it save what moving its bytes takes
                 (`UPDATE_BYTES` for each parameter), not what is done for every tensor

Exposed communication is taken out as far as it held compute up (`Breakdown.removable_ns`), and so is what compute lost
to communication beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Breakdown, StepPhase

UPDATE_BYTES = 28
"""Read and written by AdamW for one FP32 parameter: parameter, gradient and two moments, three of them back."""
BACKWARD_SHARE = 2 / 3
"""Share of the backward pass in both passes: a matmul of the forward pass needs two in the backward pass."""
NO_PHASES = "the profile does not tell forward and backward pass apart: two thirds are taken as the backward pass"


@dataclass(frozen=True, kw_only=True)
class ComputeStep:
    """Nanoseconds of a step without communication.

    Attributes:
        forward_ns: Of all micro-batches, as `backward_ns`.
        divisible_ns: Of `optimizer_ns`: what ranks can divide among them.
        num_micro_batches: Whose gradients are added up before they are exchanged.
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
        """Time of a rank that updates one of so many parts."""
        return self.optimizer_ns - self.divisible_ns * (1 - 1 / num_parts)

    def scaled(self, factor: float) -> ComputeStep:
        """Every part as many times as long."""
        names = ("before_ns", "forward_ns", "backward_ns", "optimizer_ns", "divisible_ns")
        return replace(self, **{name: getattr(self, name) * factor for name in names})


def compute_step(
    breakdown: Breakdown, *, moving_ns: float = 0.0, num_micro_batches: int = 1, contention: float = 0.0
) -> ComputeStep:
    """
    Args:
        moving_ns: What moving the bytes of an update takes.
        contention: As in `timeline.simulate`, while the breakdown was taken.
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
    """Share of the backward pass in the compute of both passes; None where the profile does not tell."""
    forward = breakdown.phases.get(StepPhase.FORWARD, 0)
    backward = breakdown.phases.get(StepPhase.BACKWARD, 0) + breakdown.phases.get(StepPhase.RECOMPUTE, 0)
    return backward / (forward + backward) if forward and backward else None
