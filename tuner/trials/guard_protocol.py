"""Guarded steps: the protocol that reference and candidate run from the shared initial state on stored batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from typing import Protocol as Interface

import msgspec

from steptune.tuner.guard.curves import Curve, Protocol
from steptune.tuner.training.job import unwrapped
from steptune.tuner.training.structure import map_structure
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.gradient_watch import GradientWatch
from steptune.tuner.trials.mask_watch import MaskWatch
from steptune.tuner.trials.update_watch import sampled

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob

NUM_REFERENCE_DRAWS = 16
MAX_REPEATS = 20
"""Maximum repeats of a step that the loss scaler skipped."""


def run_protocol(
    job: TrainingJob,
    batches: Sequence[Any],
    protocol: Protocol,
    *,
    seed: int,
    horizon_seed: int | None = None,
    watches: Sequence[Watch] = (),
    gradient_watch: GradientWatch | None = None,
    mask_watch: GradientWatch | None = None,
    rate_watch: MaskWatch | None = None,
    restart: Callable[[], None] | None = None,
    draws: Sequence[int] = (),
    uncompiled: bool = False,
) -> tuple[Curve, dict[str, torch.Tensor]]:
    """Run the guarded steps on a freshly built job.

    Args:
        seed: Seed of the curve part.
        horizon_seed: Seed of the longer horizon; None for a run without it.
        watches: Observers of the pointwise part.
        gradient_watch: Observer of the pointwise part and the audits.
        mask_watch: Observer of the curve part, or of the draws.
        rate_watch: Observer of the draws.
        restart: Function that resets parameters and buffers to their initial values; without it there are no audits and
            no draws.
        draws: Seeds of the steps that draw masks.
        uncompiled: Whether the steps without dropout run compiled code uncompiled.

    Returns:
        The curve, and the first update sampled by parameter name.
    """
    import torch

    before = _sample(job)
    torch.manual_seed(protocol.seed)
    steps = WatchedSteps(job, protocol.randomness, uncompiled=uncompiled)
    pointwise: list[Watch] = [*watches, *([gradient_watch] if gradient_watch is not None else [])]
    masked: list[Watch] = [w for w in (mask_watch, rate_watch) if w is not None]
    update: dict[str, torch.Tensor] = {}
    for number in range(protocol.num_pointwise):
        steps.step(batches[number % len(batches)], pointwise)
        if number == 0:
            update = {name: after - before[name] for name, after in _sample(job).items()}
    update_norm = math.sqrt(sum(float(piece.double().pow(2).sum()) for piece in update.values()))
    losses, norms = list(steps.losses), list(steps.norms)
    torch.manual_seed(seed)
    source = _endless(batches, protocol.num_pointwise)
    drawing = WatchedSteps(job, "none", uncompiled=False)
    for _ in range(protocol.num_curve):
        drawing.step(next(source), masked)
    horizon: list[float] = []
    if horizon_seed is not None:
        torch.manual_seed(horizon_seed)
        horizon = [_loss_of(job, next(source)) for _ in range(protocol.num_horizon)]
    if restart is not None:
        run_audits(steps, batches, protocol, restart, gradient_watch)
        for draw in draws:
            restart()
            torch.manual_seed(draw)
            drawing.step(batches[0], masked)
    return (
        Curve(
            losses=tuple(losses),
            gradient_norms=tuple(norms),
            update_norm=update_norm,
            curve_losses=tuple(drawing.losses),
            horizon_losses=tuple(horizon),
            skipped_steps=job.skipped_steps,
        ),
        update,
    )


def run_audits(
    steps: WatchedSteps,
    batches: Sequence[Any],
    protocol: Protocol,
    restart: Callable[[], None],
    watch: GradientWatch | None,
) -> None:
    """Run the audits: steps that each begin from the initial parameters. Their batches come after those of the
    pointwise part and the curve, whatever the length of the horizon.
    """
    import torch

    torch.manual_seed(protocol.seed)
    source = _endless(batches, protocol.num_pointwise + protocol.num_curve)
    for _ in range(protocol.num_audits):
        restart()
        steps.step(next(source), [watch] if watch is not None else [])


def seeds_of_draws(protocol: Protocol, *, of_reference: bool) -> range:
    """Return the seeds of the steps that draw masks; a candidate shares none with the reference."""
    first = protocol.seed + 1
    if of_reference:
        return range(first, first + (NUM_REFERENCE_DRAWS if protocol.num_draws else 0))
    return range(first + NUM_REFERENCE_DRAWS, first + NUM_REFERENCE_DRAWS + protocol.num_draws)


class Watch(Interface):
    """Observer of guarded steps."""

    def step(self) -> AbstractContextManager[None]:
        """Observe a step, including its repeats if the loss scaler skips it."""
        ...

    def on_gradients(self) -> None:
        """Act between unscaling and clipping of the gradients."""
        ...

    def on_repeat(self) -> None:
        """Act before a step that the loss scaler skipped is repeated."""
        ...


class WatchedSteps:
    """Runner of guarded steps with dropout and similar randomness off.

    Args:
        uncompiled: Whether compiled code runs uncompiled.

    Attributes:
        losses: Loss of each step.
        norms: Gradient norm of each step; for a step defined by the workload with several updates, the norm at the last
            update.
    """

    def __init__(self, job: TrainingJob, randomness: str, *, uncompiled: bool) -> None:
        self._job = job
        self._randomness = randomness
        self._uncompiled = uncompiled
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step(self, batch: Any, watches: Sequence[Watch]) -> None:
        """Run one update. Repeat a step that the loss scaler skips, on the same batch and from the same buffers, so
        that loss curves stay aligned and running statistics include the batch only once.
        """
        import torch

        seen: list[float] = []

        def look(gradients: list[torch.Tensor]) -> None:
            seen.append(self._job.gradient_norm(gradients))
            for watch in watches:
                watch.on_gradients()

        self._job.on_gradients = look
        try:
            with ExitStack() as stack:
                if self._uncompiled:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(randomness_off(self._job.model, self._randomness))
                for watch in watches:
                    stack.enter_context(watch.step())
                self.losses.append(self._loss(batch, watches))
        finally:
            self._job.on_gradients = None
        self.norms += seen[-1:]

    def _loss(self, batch: Any, watches: Sequence[Watch]) -> float:
        restore = kept_buffers(unwrapped(self._job.model)) if self._job.scaler else None
        for attempt in range(MAX_REPEATS):
            if attempt:
                if restore is not None:
                    restore()  # running statistics have moved
                for watch in watches:
                    watch.on_repeat()
            skipped = self._job.skipped_steps
            loss = _loss_of(self._job, batch)
            if self._job.skipped_steps == skipped:
                return loss
        return math.nan


def kept_buffers(model: torch.nn.Module) -> Callable[[], None]:
    """Return a function that resets the buffers to their present values, even if a forward pass replaces their
    tensors.
    """
    kept = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]

    def restore() -> None:
        for module, name, buffer, value in kept:
            buffer.detach().copy_(value)
            setattr(module, name, buffer)

    return restore


def _loss_of(job: TrainingJob, batch: Any) -> float:
    return float(job.step(map_structure(lambda leaf: leaf.clone() if hasattr(leaf, "clone") else leaf, batch)))


def _endless(batches: Sequence[Any], first: int) -> Iterator[Any]:
    for number in itertools.count(first):
        yield batches[number % len(batches)]


def _sample(job: TrainingJob) -> dict[str, torch.Tensor]:
    """Return a sample of every parameter's elements, in FP32."""
    return {name: sampled(parameter).float() for name, parameter in job.whole_parameters()}


@contextmanager
def randomness_off(model: torch.nn.Module, randomness: str) -> Iterator[None]:
    """Turn dropout and similar randomness off while active, if that is what makes the model random.

    All modules but those with running statistics go to evaluation mode, which functional dropout
    (`training=self.training`) obeys too. Recurrent modules stay in training mode, because cuDNN has no backward pass
    without it, and their dropout is set to 0.
    """
    if randomness != "switchable":
        yield
        return
    import torch

    training = [module for module in model.modules() if module.training and not hasattr(module, "running_mean")]
    recurrent = [(m, m.dropout) for m in training if isinstance(m, torch.nn.RNNBase)]
    switched = [module for module in training if not isinstance(module, torch.nn.RNNBase)]
    for module in switched:
        module.training = False
    for module, _ in recurrent:
        module.dropout = 0.0
    try:
        yield
    finally:
        for module in switched:
            module.training = True
        for module, dropout in recurrent:
            module.dropout = dropout


def averaged(curve: Curve, coordinator: Coordinator) -> Curve:
    """Average the losses over the ranks, each of which used its part of the batch."""
    if coordinator.num_ranks == 1:
        return curve
    import torch
    import torch.distributed as dist

    def mean(values: tuple[float, ...]) -> tuple[float, ...]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=coordinator.group)
        return tuple((tensor / coordinator.num_ranks).tolist())

    return msgspec.structs.replace(
        curve,
        losses=mean(curve.losses),
        curve_losses=mean(curve.curve_losses),
        horizon_losses=mean(curve.horizon_losses),
    )
