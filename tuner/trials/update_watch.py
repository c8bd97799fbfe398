"""Recording of updates in a rank during guarded steps, for their replay."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from steptune.tuner.guard.between import Updates
from steptune.tuner.guard.update_replay import FLAGS, RuleGroup, SeenStep, UpdateRule
from steptune.tuner.training.flat_parameters import ELEMENT_WISE

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob

SAMPLED_ELEMENTS = 512
"""Maximum number of evenly spaced elements sampled from each parameter."""


def why_not_replayed(job: TrainingJob) -> str | None:
    """Return the reason why a job's update cannot be replayed; None if it can."""
    if not job.layout.has_every_value or any(hook.ranks_differ for hook in job.hooks):
        return "a rank holds only a part of the parameters or of the optimizer's state"
    return _why_not_element_wise(job.optimizer)


def _why_not_element_wise(optimizer: torch.optim.Optimizer) -> str | None:
    import torch

    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind or kind.__name__ not in ELEMENT_WISE:
        return f"{kind.__name__} is not one of torch's element-wise optimizers"
    return None


def watch_of_updates(job: TrainingJob) -> UpdateWatch:
    """Return a recorder for a job's updates, which must be replayable."""
    return OwnUpdateWatch(job) if job.workload.has_custom_step else UpdateWatch(job)


@dataclass
class Track:
    """Recorded updates of one optimizer.

    Attributes:
        max_grad_norm: Norm to which its gradients are clipped after they were recorded; None without clipping.
    """

    optimizer: torch.optim.Optimizer
    max_grad_norm: float | None
    groups: list[tuple[RuleGroup, ...]] = field(default_factory=list)
    steps: list[SeenStep] = field(default_factory=list)

    @property
    def rule(self) -> UpdateRule:
        return UpdateRule(
            optimizer=type(self.optimizer).__name__, max_grad_norm=self.max_grad_norm, steps=tuple(self.groups)
        )


class UpdateWatch:
    """Recorder of sampled parameters and gradients before and after every guarded step of a job whose update can be
    replayed.
    """

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._gradients: dict[str, torch.Tensor] = {}
        self._norm = 0.0
        self.tracks = [Track(job.optimizer, job.workload.max_grad_norm)]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record a step; if the loss scaler repeats it, all of its attempts."""
        self._job.runner.settle()
        parameters = dict(self._job.updated_parameters())
        before, options = _values(parameters), self._hyperparameters()
        yield
        states = None if self._job.plan.optimizer.contiguous else _states(self._job.optimizer, parameters)
        _add(self.tracks[0], options, before, parameters, states, self._gradients, self._norm)
        self._gradients = {}

    def on_gradients(self) -> None:
        """Record the gradients between unscaling and clipping."""
        import torch

        named = [(name, g) for name, g in self._job.named_gradients() if g.layout is torch.strided]
        self._gradients = {name: sampled(gradient) for name, gradient in named}
        self._norm = float(torch.nn.utils.get_total_norm([gradient for _, gradient in named]))  # as a job that clips

    def on_repeat(self) -> None:
        """Do nothing: `on_gradients` replaces the recorded gradients in every attempt at the step."""

    @property
    def why_no_rule(self) -> str | None:
        """Reason why an optimizer of the recorded steps cannot be replayed; None if all can."""
        return next((why for why in (_why_not_element_wise(track.optimizer) for track in self.tracks) if why), None)

    @property
    def rules(self) -> tuple[UpdateRule, ...]:
        """Update rules of the recorded steps, one for each optimizer."""
        return tuple(track.rule for track in self.tracks)

    @property
    def around(self) -> Updates:
        """Parameters before and after each recorded update, by optimizer."""
        return {
            f"{type(track.optimizer).__name__} {number}": [(step.before, step.after) for step in track.steps]
            for number, track in enumerate(self.tracks)
        }

    def _hyperparameters(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Return the parameter names of each parameter group, and the group's options at this step."""
        return [(names, _options(group)) for names, group in self._job.named_groups()]


class OwnUpdateWatch(UpdateWatch):
    """Recorder of steps defined by the workload, in which any optimizer may step any number of times.

    Gradients of the job's optimizer are recorded before they are clipped, those of others when they step.
    """

    def __init__(self, job: TrainingJob) -> None:
        super().__init__(job)
        self.tracks: list[Track] = []
        self._names: dict[Any, str] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._groups: list[tuple[list[str], dict[str, Any]]] = []
        self._counts: list[int] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record a step and, in it, the updates of all optimizers."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._names = {parameter: name for name, parameter in self._job.updated_parameters()}
        self._counts = [len(track.steps) for track in self.tracks]
        handles = [
            register_optimizer_step_pre_hook(self._look_before),
            register_optimizer_step_post_hook(self._look_after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def on_repeat(self) -> None:
        """Discard the updates that other optimizers made in the skipped attempt."""
        for track, count in zip(self.tracks, self._counts, strict=False):
            del track.steps[count:], track.groups[count:]
        del self.tracks[len(self._counts) :]

    def _look_before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = self._parameters_of(optimizer)
        self._before = _values(parameters)
        self._groups = [
            ([name for name, p in parameters.items() if any(p is own for own in group["params"])], _options(group))
            for group in optimizer.param_groups
        ]
        if optimizer is not self._job.optimizer or not self._gradients:
            self._gradients = {name: sampled(p.grad) for name, p in parameters.items() if p.grad is not None}
            self._norm = 0.0

    def _look_after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = self._parameters_of(optimizer)
        _add(
            self._track_of(optimizer),
            self._groups,
            self._before,
            parameters,
            _states(optimizer, parameters),
            self._gradients,
            self._norm,
        )
        self._gradients = {}

    def _track_of(self, optimizer: torch.optim.Optimizer) -> Track:
        known = next((track for track in self.tracks if track.optimizer is optimizer), None)
        if known is None:
            clips = optimizer is self._job.optimizer and self._norm > 0
            known = Track(optimizer, self._job.workload.max_grad_norm if clips else None)
            self.tracks.append(known)
        return known

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
        """Return an optimizer's parameters by name, or by index if they do not belong to the model."""
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {self._names.get(parameter, f"parameter {number}"): parameter for number, parameter in enumerate(own)}


class OtherOptimizers:
    """Optimizers that take part in a job's steps in addition to the job's own optimizer, with their initial state."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._began: dict[torch.optim.Optimizer, dict[str, Any]] = {}

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Record the optimizers that step while this is active, with their earlier state."""
        if not self._job.workload.has_custom_step:
            yield
            return
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if optimizer is not self._job.optimizer and optimizer not in self._began:
                self._began[optimizer] = copy.deepcopy(optimizer.state_dict())

        handle = register_optimizer_step_pre_hook(look)
        try:
            yield
        finally:
            handle.remove()

    def restart(self) -> None:
        """Restore the optimizers' initial state."""
        for optimizer, state in self._began.items():
            optimizer.state.clear()
            optimizer.load_state_dict(copy.deepcopy(state))


def _add(
    track: Track,
    options: list[tuple[list[str], dict[str, Any]]],
    before: dict[str, torch.Tensor],
    parameters: Mapping[str, torch.nn.Parameter],
    states: dict[str, dict[str, torch.Tensor]] | None,
    gradients: dict[str, torch.Tensor],
    norm: float,
) -> None:
    """Add an update to the recorded updates of its optimizer."""
    import torch

    track.steps.append(
        SeenStep(
            before=before,
            gradients=gradients,
            norm=norm,
            after=_values(parameters),
            states=states,
            roundoff=max(torch.finfo(parameter.dtype).eps for parameter in parameters.values()),
        )
    )
    track.groups.append(
        tuple(
            RuleGroup(names=tuple(name for name in names if name in gradients), options=chosen)
            for names, chosen in options
        )
    )


def _values(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: sampled(parameter.detach()) for name, parameter in parameters.items()}


def _states(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the per-element state of an optimizer."""
    return {
        name: {
            key: sampled(value)
            for key, value in optimizer.state.get(parameter, {}).items()
            if getattr(value, "shape", None) == parameter.shape
        }
        for name, parameter in parameters.items()
    }


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced elements of a tensor as FP64 on the CPU: the same positions for every tensor of this shape,
    in any layout.
    """
    import torch

    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    stride = max(1, flat.numel() // SAMPLED_ELEMENTS)
    return flat[::stride][:SAMPLED_ELEMENTS].double().cpu().clone()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that the update rule reads."""
    options = {key: _plain(value) for key, value in group.items() if key not in ("params", *FLAGS)}
    return {key: value for key, value in options.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Say whether the value of an optimizer option is a number, a text, a boolean or None, or a list of these. A user's
    parameter group may also hold objects that its optimizer does not read.
    """
    items = value if isinstance(value, list) else [value]
    return all(item is None or isinstance(item, bool | int | float | str) for item in items)


def _plain(value: Any) -> Any:
    """Return an option's value for JSON, with tensors as plain numbers: an update in a CUDA graph keeps its learning
    rate in a tensor.
    """
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value
