"""Step runner that records a whole step as CUDA graphs once and replays it with two launches.

Mechanism: forward, backward and the scale of the gradients are one graph; clipping, the update and the masters'
rounding are another, so that a check of a training can inspect the gradients in between. Both run over static
tensors: every batch is copied into the one that was recorded, learning rates are filled into tensors. Gradients are
written, not accumulated, so nothing is zeroed. A step that the loss scaler skips is skipped on the device and counted
there; the count is read on demand. Random numbers come from the device's generator, which a graph advances.

Recording needs steps that warm up libraries and create the optimizer's state. They are run on the first batch and
undone, so that the first step of a training is a replay like all others. After a change that a graph cannot follow
(training mode, shapes) the step is recorded again, within limits; also after a rare change of the optimizer's options
that the update reads on the host. Where these change often, as with most schedulers and an update that cannot read a
tensor, the host launches the update, and only the graph of the gradients is replayed.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs ("Whole-network capture")
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import CaptureError
from steptune.tuner.training.carried_state import CarriedState
from steptune.tuner.training.host_step import HostStep
from steptune.tuner.training.learning_rates import LearningRates
from steptune.tuner.training.micro_batch import split_batch
from steptune.tuner.training.recorder import Recorded, Recorder, Repeater
from steptune.tuner.training.step_state import StepState
from steptune.tuner.training.structure import map_structure

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob

WARM_UP_STEPS = 3
"""Number of warm-up steps: PyTorch's documentation asks for a few; a library's autotuning ends in the first."""
MAX_RECORDINGS = 4
"""Maximum number of recordings, one per batch signature. It is limited because each recording keeps its own memory."""
PAYS_AFTER_STEPS = 100
"""Minimum mean number of replays per change of the optimizer's options at which recording the step again is worth its
time.

The first change is free: an option set only once does not come from a scheduler.
"""

Key = tuple[Any, ...]

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), enum.Enum)
"""Types of non-tensor leaves that a recorded batch may contain; each distinct value needs a separate recording."""


class CapturedStep(HostStep):
    """Step runner that records the step of a job and replays it.

    Args:
        recorder: Recorder to use; None selects the one for the job's device.

    Attributes:
        num_replays: Number of replayed steps so far.
        num_recordings: Number of recordings of the step so far.
        record_ns: Time spent recording, in nanoseconds.
        host_options: Options of the optimizer that change too often to be recorded, so that the host launches the
            update; empty where the update is recorded too.
    """

    # A graph would hold casts of weights that the cache made before it was recorded.
    cache_casts: bool | None = False
    accumulates = False

    def __init__(self, job: TrainingJob, recorder: Recorder | None = None) -> None:
        import torch

        super().__init__(job)
        self.num_replays = 0
        self.num_recordings = 0
        self.record_ns = 0
        self.host_options: tuple[str, ...] = ()
        self._recorder = recorder or _recorder_for(job.device)
        self._modules = list(job.model.modules())
        self._tensors = [*job.model.parameters(), *job.model.buffers()]
        self._mode: Key = ()
        self._recordings: dict[Key, _Recording] = {}
        self._options: dict[str, Key] = {}
        self._num_changes = 0
        self._optimizer_state: Any = None
        self._num_states = 0
        self._rates = LearningRates(job.optimizer, job.device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=job.device)
        self._num_scheduled_skips = 0
        self._undecided = False

    @property
    def skipped_steps(self) -> int:
        """Number of updates that the loss scaler skipped; reading it waits for the device."""
        self.settle()
        return int(self._skipped)

    def step(self, batch: Any) -> torch.Tensor:
        """Replay one update from one batch on the device, after recording the step if necessary.

        Returns:
            The loss, detached, on the device.

        Raises:
            CaptureError: The step cannot be recorded, or batches differ from step to step.
        """
        job = self._job
        self.settle()
        weights = self.pieces(batch)[1] if job.plan.step.num_micro_batches > 1 else [1.0]
        recording = self._recording_for(batch)
        recording.take_in(batch, weights)
        self._rates.fill()
        recording.gradients.replay()
        found: _Gradients = recording.gradients.outputs
        if job.on_gradients:
            with found.shown_by(job):
                job.on_gradients([gradient for gradient in found.values if gradient is not None])
        if recording.update is not None:
            recording.update.replay()
        else:
            found.give_to(job)
            self._update()
        self.num_replays += 1
        self._schedule()
        return found.loss.clone()

    # --- the schedule -------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Step the scheduler. With a loss scaler, defer the scheduler's step until it is known whether the update was
        skipped.

        The device is asked only when the next learning rate, or the scheduler itself, is read.
        """
        if self._job.scheduler is None:
            return
        if self._job.scaler is None:
            self._job.scheduler.step()
        else:
            self._undecided = True

    def settle(self) -> None:
        """Make the scheduler's deferred step, so that the next update gets its learning rate. This may wait for the
        device.
        """
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
        key = signature(batch)
        found = self._recordings.get(key)
        if found is not None:
            return found
        if len(self._recordings) == MAX_RECORDINGS:
            raise CaptureError(_changes([*self._recordings, key]))
        began = time.perf_counter_ns()
        self._recordings[key] = recording = self._record(batch)
        self.num_recordings += 1
        self.record_ns += time.perf_counter_ns() - began
        return recording

    def _forget_what_changed(self) -> None:
        """Drop all recordings if a condition that they depend on has changed.

        These are the training mode, the trained tensors, their addresses, and the options that the update reads on the
        host.
        """
        mode = (
            *(module.training for module in self._modules),
            *((tensor.requires_grad, tensor.data_ptr()) for tensor in self._tensors),
        )
        state = self._job.optimizer.state
        stale = mode != self._mode or state is not self._optimizer_state or len(state) != self._num_states
        stale |= self._options_changed()
        if stale and self._recordings:
            self._recorder.finish()
            self._recordings.clear()
        self._mode = mode

    def _options_changed(self) -> bool:
        """Say whether the optimizer's options have changed since they were recorded. If they change too often, stop
        recording the update.
        """
        if self.host_options:
            return False
        before, self._options = self._options, self._read_options()
        names = tuple(name for name, values in self._options.items() if before.get(name, values) != values)
        self._num_changes += bool(names)
        if self._num_changes > 1 and self.num_replays < PAYS_AFTER_STEPS * self._num_changes:
            self.host_options = names
        return bool(names)

    def _read_options(self) -> dict[str, Key]:
        """Return, by name, the options that the update reads on the host, for all groups of the optimizer. Device
        tensors are compared by identity.
        """

        def read(value: Any) -> Any:
            if not hasattr(value, "data_ptr"):
                return tuple(value) if isinstance(value, list) else value
            return value.tolist() if value.device.type == "cpu" else id(value)

        optimizer = self._job.optimizer
        names = [name for name in optimizer.defaults if not (name == "lr" and self._rates.on_device)]
        return {name: tuple(read(group[name]) for group in optimizer.param_groups if name in group) for name in names}

    def _record(self, batch: Any) -> _Recording:
        job = self._job
        _check_hooks(job.optimizer)
        static = map_structure(lambda leaf: leaf.clone() if hasattr(leaf, "clone") else leaf, batch)
        weights = self._weights(batch)
        self._rates.fill()
        if job.scaler is not None:
            job.scaler.scale(self._skipped.float())  # its tensors are made when it is first used

        def gradients() -> _Gradients:
            _clear_gradients(job)
            pieces = [static] if weights is None else split_batch(job.workload, static, len(weights))[0]
            loss = self.forward_backward(pieces, [1.0] if weights is None else weights.unbind())
            job.finish_gradients()
            return _Gradients.of(job, loss)

        carried = CarriedState(job)

        def whole() -> None:
            with carried.step():
                gradients()
                self._update()

        state = StepState(job, also=[self._skipped])
        self._recorder.warm_up(whole, WARM_UP_STEPS)
        state.restore()
        carried.restore()
        recorded = self._recorder.record([gradients] if self.host_options else [gradients, self._update])
        self._optimizer_state, self._num_states = job.optimizer.state, len(job.optimizer.state)
        return _Recording(
            batch=static, weights=weights, gradients=recorded[0], update=None if self.host_options else recorded[1]
        )

    def _update(self) -> None:
        job = self._job
        job.clip()
        with self._rates.given():
            self._step_optimizer()
        job.after_update()

    def _weights(self, batch: Any) -> torch.Tensor | None:
        """Return the weights of the micro-batches in the loss, or None for a single micro-batch. Weights by number of
        tokens differ from batch to batch.
        """
        import torch

        if self._job.plan.step.num_micro_batches == 1:
            return None
        return torch.tensor(self.pieces(batch)[1], dtype=torch.float32, device=self._job.device)

    def _step_optimizer(self) -> None:
        """Run the optimizer's update. With a loss scaler, undo it on the device if a gradient is not finite."""
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


@dataclass(frozen=True, kw_only=True)
class _Gradients:
    """Gradients that the first graph leaves for the second graph or for the host; every replay writes the same tensors.

    Attributes:
        values: Gradients of the optimizer's parameters, in order.
        scaling: The loss scaler's state for them: that they are unscaled, and whether one is not finite.
    """

    loss: torch.Tensor
    values: list[torch.Tensor | None]
    scaling: dict[str, Any]

    @classmethod
    def of(cls, job: TrainingJob, loss: torch.Tensor) -> _Gradients:
        scaling = job.scaler._per_optimizer_states[id(job.optimizer)] if job.scaler else {}
        return cls(loss=loss, values=[p.grad for p in job.parameters()], scaling=dict(scaling))

    @contextmanager
    def shown_by(self, job: TrainingJob) -> Iterator[None]:
        """Set these gradients in the job while the context is active, as if the host had launched the step."""
        before = [parameter.grad for parameter in job.parameters()]
        self._set(job, self.values)
        try:
            yield
        finally:
            self._set(job, before)

    def give_to(self, job: TrainingJob) -> None:
        """Set the gradients and the scaler's state in the job after a replay, because a replay runs no Python."""
        self._set(job, self.values)
        if job.scaler:
            job.scaler._per_optimizer_states[id(job.optimizer)] = dict(self.scaling)

    @staticmethod
    def _set(job: TrainingJob, values: Sequence[torch.Tensor | None]) -> None:
        for parameter, value in zip(job.parameters(), values, strict=True):
            parameter.grad = value


@dataclass(kw_only=True)
class _Recording:
    """Graphs of one recording, and the static tensors that they read. The host runs the update if `update` is None."""

    batch: Any
    weights: torch.Tensor | None
    gradients: Recorded
    update: Recorded | None
    last_weights: Sequence[float] = ()

    def take_in(self, batch: Any, weights: Sequence[float]) -> None:
        found = dict(_named_leaves(batch))
        for name, static in _named_leaves(self.batch):
            if hasattr(static, "copy_"):
                static.copy_(found[name], non_blocking=True)
        if len(weights) > 1 and not all(weights):
            raise CaptureError(
                f"micro-batch {list(weights).index(0) + 1} of {len(weights)} contains no tokens, so its loss is "
                "NaN, and a CUDA graph cannot skip it: use fewer micro-batches (micro_batch), or drop such samples"
            )
        if self.weights is not None and weights != self.last_weights:
            for number, weight in enumerate(weights):
                self.weights[number].fill_(weight)
            self.last_weights = weights


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Make an optimizer that has not stepped yet keep its step count on the device. On a CPU nothing changes.

    Raises:
        CaptureError: The optimizer does not support this.
    """
    import torch

    if not all("capturable" in group for group in optimizer.param_groups):
        if not isinstance(optimizer, torch.optim.SGD):  # which counts no steps
            raise CaptureError(
                f"{type(optimizer).__name__} does not support capturable=True, so its update cannot be recorded: "
                "use an optimizer that does, such as torch.optim.AdamW"
            )
        return
    if device.type == "cpu":
        return
    for group in optimizer.param_groups:
        group["capturable"] = True
    optimizer.defaults["capturable"] = True
    # Warm-up runs it without recording, which is not worth a warning.
    optimizer._warned_capturable_if_run_uncaptured = True


def _check_hooks(optimizer: torch.optim.Optimizer) -> None:
    hooks = {**optimizer._optimizer_step_pre_hooks, **optimizer._optimizer_step_post_hooks}
    if hooks:
        names = ", ".join(sorted({getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks.values()}))
        raise CaptureError(
            f"{type(optimizer).__name__} calls hooks around its update ({names}), which a replay would skip: move "
            "their work into the workload, or remove them"
        )


def signature(batch: Any) -> Key:
    """Return a key that two batches share if the same graphs can run on both. The order of a mapping does not matter.

    Raises:
        CaptureError: A leaf of the batch can neither be copied into a graph nor compared.
    """
    return tuple(sorted((name, _format(name, leaf)) for name, leaf in _named_leaves(batch)))


def _format(name: str, leaf: Any) -> Any:
    import torch

    if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
        return str(tuple(leaf.shape)), str(tuple(leaf.stride())), str(leaf.dtype), str(leaf.device)
    if isinstance(leaf, _CONSTANTS) or (type(leaf).__module__ == "numpy" and leaf.shape == ()):
        return (repr(leaf),)
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    raise CaptureError(
        f"a batch contains a {kind}{f' at {name}' if name else ''}: a CUDA graph would replay the contents that it had "
        "in the recorded batch. Return dense tensors in dicts, lists, tuples or dataclasses"
    )


def _named_leaves(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a batch, each with its path in the batch."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _named_leaves(value, f"{name}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for number, value in enumerate(batch):
            yield from _named_leaves(value, f"{name}[{number}]")
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _named_leaves(getattr(batch, field.name), f"{name}.{field.name}")
    else:
        yield name, batch


def _changes(signatures: Sequence[Key]) -> str:
    """Return the reason why these batches would need an unlimited number of recordings, and the remedy."""
    shapes = [f"[{', '.join(found[0] for _, found in leaves if len(found) > 1)}]" for leaves in signatures]
    seen = ", ".join(dict.fromkeys(shapes))
    if len(set(shapes)) > 1:
        return (
            f"batches have {len(set(shapes))} shapes ({seen}), and each shape needs its own CUDA graph: pad "
            "batches to a few lengths"
        )
    return (
        "batches contain numbers or strings that change, but a CUDA graph would repeat the recorded ones: convert "
        "them to tensors"
    )


def _clear_gradients(job: TrainingJob) -> None:
    """Clear the gradients, so that the recorded backward pass allocates the gradients that every replay writes."""
    job.optimizer.zero_grad(set_to_none=True)
    job.model.zero_grad(set_to_none=True)


def _recorder_for(device: torch.device) -> Recorder:
    if device.type == "cuda":
        from steptune.tuner.training.cuda_graphs import CudaGraphs

        return CudaGraphs(device)
    return Repeater()
