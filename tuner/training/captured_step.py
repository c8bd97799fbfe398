"""A whole step as CUDA graphs: recorded once, replayed with two launches.

Mechanism: forward, backward and the scale of the gradients are one graph; clipping, the update and the masters'
rounding are another, so that who checks a training can look at the gradients between them. Both run over static
tensors: every batch is copied into the one that was recorded, learning rates are filled into tensors. Gradients are
written, not accumulated, so nothing is zeroed. A step that the loss scaler skips is skipped on the device and counted
there; the count is read when somebody asks. Random numbers come from the device's generator, which a graph advances.

Recording needs steps that warm up libraries and create the optimizer's state. They are run on the first batch and
undone, so that the first step of a training is a replay like all others. A change of what a graph cannot follow
(training mode, shapes, options of the optimizer) is recorded again, within limits.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs ("Whole-network capture")
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.errors import CannotCapture
from tuner.training.learning_rates import LearningRates
from tuner.training.micro_batch import split_batch
from tuner.training.recorder import Recorded, Recorder, Repeater
from tuner.training.step_state import StepState
from tuner.training.structure import map_structure
from tuner.workloads.workload import leaves

if TYPE_CHECKING:
    import torch

    from tuner.training.job import TrainingJob

WARM_UP_STEPS = 3
"""PyTorch's documentation asks for a few; autotuning of a library ends in the first."""
MAX_RECORDINGS = 4
"""Shapes, or options of the optimizer, that one training mode may see: each keeps memory of its own."""

Key = tuple[Any, ...]


class CapturedStep:
    """The recorded step of one job.

    Args:
        recorder: How work is recorded; None for what the job's device offers.

    Attributes:
        num_replays: Steps so far.
        num_recordings: How often the step was recorded.
        record_ns: Time that took.
    """

    def __init__(self, job: TrainingJob, recorder: Recorder | None = None) -> None:
        import torch

        self.num_replays = 0
        self.num_recordings = 0
        self.record_ns = 0
        self._job = job
        self._recorder = recorder or _recorder_for(job.device)
        self._modules = list(job.model.modules())
        self._mode: tuple[bool, ...] = ()
        self._recordings: dict[Key, _Recording] = {}
        self._optimizer_state: Any = None
        self._num_states = 0
        self._rates = LearningRates(job.optimizer, job.device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=job.device)
        self._num_scheduled_skips = 0
        self._undecided = False

    @property
    def skipped_steps(self) -> int:
        """Updates that the loss scaler skipped. Reading it waits for the device."""
        self.settle()
        return int(self._skipped)

    def step(self, batch: Any) -> torch.Tensor:
        """One update from one batch on the device.

        Returns:
            The loss, detached, on the device.

        Raises:
            CannotCapture: The step cannot be recorded, or batches or options differ from step to step.
        """
        job = self._job
        self.settle()
        weights = job.pieces(batch)[1] if job.plan.step.num_micro_batches > 1 else [1.0]
        recording = self._recording_for(batch)
        recording.take_in(batch, weights)
        self._rates.fill()
        recording.gradients.replay()
        loss, gradients = recording.gradients.outputs
        if job.on_gradients:
            job.on_gradients(gradients)
        recording.update.replay()
        self.num_replays += 1
        self._schedule()
        result: torch.Tensor = loss.clone()
        return result

    # --- the schedule -------------------------------------------------------------------------

    def _schedule(self) -> None:
        """The scheduler's step follows every update that was not skipped. Whether a loss scaler skipped this one is
        asked as late as possible: when the next step's learning rate is needed, or somebody looks.
        """
        if self._job.scheduler is None:
            return
        if self._job.scaler is None:
            self._job.scheduler.step()
        else:
            self._undecided = True

    def settle(self) -> None:
        """Makes the scheduler's step that is due, so that the rate is the next update's. It may wait for the device."""
        if not self._undecided:
            return
        self._undecided = False
        count = int(self._skipped)
        if count == self._num_scheduled_skips:
            self._job.scheduler.step()
        self._num_scheduled_skips = count

    # --- recordings ---------------------------------------------------------------------------

    def _recording_for(self, batch: Any) -> _Recording:
        self._forget_what_changed()
        key = (self._options(), signature(batch))
        found = self._recordings.get(key)
        if found is not None:
            return found
        if len(self._recordings) == MAX_RECORDINGS:
            raise CannotCapture(_changes([*self._recordings, key]))
        began = time.perf_counter_ns()
        self._recordings[key] = recording = self._record(batch)
        self.num_recordings += 1
        self.record_ns += time.perf_counter_ns() - began
        return recording

    def _forget_what_changed(self) -> None:
        """Graphs hold addresses and one training mode: what was recorded of others is dropped."""
        mode = tuple(module.training for module in self._modules)
        state = self._job.optimizer.state
        stale = mode != self._mode or state is not self._optimizer_state or len(state) != self._num_states
        if stale and self._recordings:
            self._recorder.finish()
            self._recordings.clear()
        self._mode = mode

    def _options(self) -> Key:
        """What the update reads on the host."""
        return tuple(
            (name, id(value) if hasattr(value, "data_ptr") else repr(value))
            for group in self._job.optimizer.param_groups
            for name, value in group.items()
            if name != "params" and not (name == "lr" and self._rates.on_device)
        )

    def _record(self, batch: Any) -> _Recording:
        job = self._job
        static = map_structure(lambda leaf: leaf.clone() if hasattr(leaf, "clone") else leaf, batch)
        weights = self._weights(batch)
        self._rates.fill()
        if job.scaler is not None:
            job.scaler.scale(self._skipped.float())  # its tensors are made when it is first used

        def gradients() -> tuple[torch.Tensor, list[torch.Tensor]]:
            _clear_gradients(job)
            pieces = [static] if weights is None else split_batch(job.workload, static, len(weights))[0]
            loss = job.forward_backward(pieces, [1.0] if weights is None else weights.unbind())
            job.finish_gradients()
            return loss, job.gradients()

        def update() -> None:
            job.clip()
            with self._rates.given():
                self._step_optimizer()
            if job.masters:
                job.masters.write_back()

        def whole() -> None:
            gradients()
            update()

        state = StepState(job, also=[self._skipped])
        self._recorder.warm_up(whole, WARM_UP_STEPS)
        state.restore()
        recorded = self._recorder.record([gradients, update])
        self._optimizer_state, self._num_states = job.optimizer.state, len(job.optimizer.state)
        return _Recording(batch=static, weights=weights, gradients=recorded[0], update=recorded[1])

    def _weights(self, batch: Any) -> torch.Tensor | None:
        """Of the micro-batches: with tokens they are another in every batch."""
        import torch

        if self._job.plan.step.num_micro_batches == 1:
            return None
        return torch.tensor(self._job.pieces(batch)[1], dtype=torch.float32, device=self._job.device)

    def _step_optimizer(self) -> None:
        """The update; under a loss scaler one that is undone on the device where a gradient is not finite."""
        import torch

        job, scaler = self._job, self._job.scaler
        if scaler is None:
            job.optimizer.step()
            return
        found = sum(scaler._found_inf_per_device(job.optimizer).values())
        if getattr(job.optimizer, "_step_supports_amp_scaling", False):
            scaler.step(job.optimizer)
        else:
            state = [v for values in job.optimizer.state.values() for v in values.values() if hasattr(v, "clone")]
            changed = [p.detach() for p in job.parameters() if p.grad is not None] + state
            before = [tensor.clone() for tensor in changed]
            job.optimizer.step()
            for tensor, kept in zip(changed, before, strict=True):
                tensor.copy_(torch.where(found > 0, kept, tensor))
        self._skipped.add_(found > 0)
        scaler.update()


@dataclass(kw_only=True)
class _Recording:
    """Graphs, and the static tensors that they read."""

    batch: Any
    weights: torch.Tensor | None
    gradients: Recorded
    update: Recorded
    last_weights: Sequence[float] = ()

    def take_in(self, batch: Any, weights: Sequence[float]) -> None:
        for static, leaf in zip(leaves(self.batch), leaves(batch), strict=True):
            if hasattr(static, "copy_"):
                static.copy_(leaf, non_blocking=True)
        if self.weights is not None and weights != self.last_weights:
            for number, weight in enumerate(weights):
                self.weights[number].fill_(weight)
            self.last_weights = weights


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Lets an optimizer keep its step count on the device, before it has taken a step. On a CPU that is where it is.

    Raises:
        CannotCapture: It has no such form.
    """
    import torch

    if not all("capturable" in group for group in optimizer.param_groups):
        if not isinstance(optimizer, torch.optim.SGD):  # which counts no steps
            raise CannotCapture(
                f"{type(optimizer).__name__} has no capturable form, so its update cannot be recorded: use one of "
                "torch.optim that has it, as AdamW"
            )
        return
    if device.type == "cpu":
        return
    for group in optimizer.param_groups:
        group["capturable"] = True
    optimizer.defaults["capturable"] = True
    # Warm-up runs it without recording, which is not worth a warning.
    optimizer._warned_capturable_if_run_uncaptured = True


def signature(batch: Any) -> Key:
    """What must be equal in two batches for the same graphs to run on both."""
    return tuple(
        (tuple(leaf.shape), tuple(leaf.stride()), str(leaf.dtype)) if hasattr(leaf, "stride") else repr(leaf)
        for leaf in leaves(batch)
    )


def _changes(keys: Sequence[Key]) -> str:
    """Why no number of recordings would do."""
    if len({options for options, _ in keys}) > 1:
        sets = [dict(options) for options, _ in keys]
        names = sorted({name for one in sets for name in one if len({other.get(name) for other in sets}) > 1})
        reason = (
            f"{', '.join(names)} of the optimizer changed {len(keys) - 1} times, and its update reads it on the host"
        )
        return (
            f"{reason}: use its fused form, if it has one (optimizer_implementation: fused), or schedule it less often"
        )
    shapes = [str([leaf[0] for leaf in leaves_ if isinstance(leaf, tuple)]) for _, leaves_ in keys]
    seen = ", ".join(dict.fromkeys(shapes))
    if len(set(shapes)) > 1:
        return f"batches came in {len(set(shapes))} shapes ({seen}), and a graph holds one: pad them to a few lengths"
    return "batches hold numbers or texts that differ from one to the next, which a graph would hold: make them tensors"


def _clear_gradients(job: TrainingJob) -> None:
    """So that the backward pass makes new ones, which a graph then writes into at every replay."""
    job.optimizer.zero_grad(set_to_none=True)
    job.model.zero_grad(set_to_none=True)


def _recorder_for(device: torch.device) -> Recorder:
    if device.type == "cuda":
        from tuner.training.cuda_graphs import CudaGraphs

        return CudaGraphs(device)
    return Repeater()
