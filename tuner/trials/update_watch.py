"""Recording what a replay of the update needs, while guarded steps run in a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from steptune.tuner.guard.update_replay import FLAGS, RuleGroup, SeenStep, UpdateRule
from steptune.tuner.training.flat_parameters import ELEMENT_WISE

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob

SAMPLED_ELEMENTS = 512
"""Of each parameter, evenly spread."""


def why_not_replayed(job: TrainingJob) -> str | None:
    """The reason for which the update of a job cannot be replayed; None where it can."""
    import torch

    kind = type(job.optimizer)
    wrap = job.plan.wrap
    if job.workload.has_custom_step:
        return "the workload has a training_step of its own"
    if getattr(torch.optim, kind.__name__, None) is not kind or kind.__name__ not in ELEMENT_WISE:
        return f"{kind.__name__} is not one of torch's optimizers that treat every element alike"
    if job.mesh or wrap.shards_parameters or wrap.shards_optimizer or job.local_sgd:
        return "a rank holds only a part of the parameters or of the optimizer's state"
    return None


class UpdateWatch:
    """Samples parameters and gradients around every guarded step of a job whose update can be replayed."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._gradients: dict[str, torch.Tensor] = {}
        self._norm = 0.0
        self._groups: list[tuple[RuleGroup, ...]] = []
        self.steps: list[SeenStep] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step; where the loss scaler repeats it, around all of its attempts."""
        import torch

        if self._job.captured:
            self._job.captured.settle()
        before = self._parameters()
        options = self._hyperparameters()
        yield
        dtypes = {p.dtype for _, p in self._job.master_parameters()}
        self.steps.append(
            SeenStep(
                before=before,
                gradients=self._gradients,
                norm=self._norm,
                after=self._parameters(),
                states=self._states(),
                roundoff=max(torch.finfo(dtype).eps for dtype in dtypes),
            )
        )
        self._groups.append(
            tuple(
                RuleGroup(names=tuple(name for name in names if name in self._gradients), options=chosen)
                for names, chosen in options
            )
        )
        self._gradients = {}

    def on_gradients(self) -> None:
        """Call between unscaling and clipping."""
        import torch

        named = [(name, g) for name, g in self._job.named_gradients() if g.layout is torch.strided]
        self._gradients = {name: sampled(gradient) for name, gradient in named}
        self._norm = float(torch.nn.utils.get_total_norm([gradient for _, gradient in named]))  # as a job that clips

    def rule(self) -> UpdateRule:
        """The rule of the steps that were seen."""
        return UpdateRule(
            optimizer=type(self._job.optimizer).__name__,
            max_grad_norm=self._job.workload.max_grad_norm,
            steps=tuple(self._groups),
        )

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: sampled(parameter.detach()) for name, parameter in self._job.master_parameters()}

    def _states(self) -> dict[str, dict[str, torch.Tensor]] | None:
        """None of contiguous parameters, whose states lie in one buffer."""
        if self._job.plan.optimizer.contiguous:
            return None
        states = self._job.optimizer.state
        return {
            name: {
                key: sampled(value)
                for key, value in states.get(parameter, {}).items()
                if getattr(value, "shape", None) == parameter.shape
            }
            for name, parameter in self._job.master_parameters()
        }

    def _hyperparameters(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Names of each group's parameters, and its options at this step."""
        return [
            (names, {key: value for key, value in _options(group).items() if _is_plain(value)})
            for names, group in self._job.named_groups()
        ]


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Evenly spread elements, FP64 on the CPU: the same ones of every tensor of this shape, in any layout."""
    import torch

    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    stride = max(1, flat.numel() // SAMPLED_ELEMENTS)
    return flat[::stride][:SAMPLED_ELEMENTS].double().cpu().clone()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in group.items() if key not in ("params", *FLAGS)}


def _is_plain(value: Any) -> bool:
    """A user's group may hold anything beside what its optimizer reads."""
    items = value if isinstance(value, list) else [value]
    return all(item is None or isinstance(item, bool | int | float | str) for item in items)


def _plain(value: Any) -> Any:
    """As JSON has it: an update that is recorded keeps its rate in a tensor."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value
