"""Recording of gradients in a rank during guarded steps, for a later comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from steptune.tuner.guard.averages import StateStep
from steptune.tuner.guard.gradients import Noise, Tensors, at_distance, distances, measure_distances, measure_noise
from steptune.tuner.guard.masks import Scatter
from steptune.tuner.training.initial_state import named_state
from steptune.tuner.training.job import unwrapped
from steptune.tuner.training.sharding import laid_out_as, whole
from steptune.tuner.training.tensor_file import map_tensors, save_tensors
from steptune.tuner.trials.disturbance import Disturbance
from steptune.tuner.trials.update_watch import sampled

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob


LEFT_OVER = "gradients left over from the previous step"


def why_not_compared(job: TrainingJob) -> str | None:
    """Return the reason for which a job's gradients cannot be compared with a reference's; None where they can."""
    if not job.layout.has_every_parameter:
        return "a rank holds only a part of the model"
    return "ranks step alone" if any(hook.ranks_differ for hook in job.hooks) else None


def set_initial_state(job: TrainingJob, path: Path, disturb: Disturbance | None = None) -> None:
    """Set parameters and buffers, and nothing else, to the stored values, which are the same on all ranks."""
    import torch

    state, _ = map_tensors(path)
    model = unwrapped(job.model)
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    with torch.no_grad():
        for name, tensor in named_state(model):
            value = state[name]
            if disturb and id(tensor) in trainable:  # where the tensor is: a CPU draws seconds for a large model
                value = disturb(value.to(tensor.device))
            tensor.copy_(laid_out_as(tensor, value))
    job.parameters_set()


def _change(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return the change of values. An element that is NaN, or the same infinity, both before and after (as in a buffer
    with a mask) counts as unchanged.
    """
    stayed = (before == after) | (before.isnan() & after.isnan())
    return (after - before).masked_fill(stayed, 0.0)


@dataclass
class GradientWatch:
    """Recorder of gradients at every guarded step, and of the change of untrained values.

    Attributes:
        gradients: Gradients after unscaling, before clipping; of every update, for a step with several updates.
        changes: Changes of buffers and of untrained parameters.
        states: Buffers and untrained parameters before and after, and the trained parameters.
    """

    job: TrainingJob
    gradients: list[Tensors] = field(default_factory=list)
    changes: list[Tensors] = field(default_factory=list)
    states: list[StateStep] = field(default_factory=list)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record one step; if the loss scaler repeats it, all of its attempts."""
        before = self._untrained()
        self._updates: list[Tensors] = []
        with self._of_other_optimizers():
            yield
        after = self._untrained()
        before = {name: value for name, value in before.items() if name in after}  # a forward may thaw parameters
        before[LEFT_OVER] = after[LEFT_OVER] * 0
        self.changes.append({name: _change(value, after[name]) for name, value in before.items()})
        self.states.append(self._state(before, after))
        self.gradients.append(
            {
                name if number == 0 else f"{name} (update {number + 1})": gradient
                for number, update in enumerate(self._updates)
                for name, gradient in update.items()
            }
        )

    def on_gradients(self) -> None:
        """Record the gradients between unscaling and clipping."""
        import torch

        named = self.job.named_gradients()
        self._updates.append({name: sampled(whole(g)) for name, g in named if g.layout is torch.strided})

    def on_repeat(self) -> None:
        """Discard the gradients of a step that the loss scaler skipped, before it is repeated."""
        self._updates.clear()

    @contextmanager
    def _of_other_optimizers(self) -> Iterator[None]:
        """Record the gradients of optimizers other than the job's when they step within a workload-defined step."""
        if not self.job.workload.has_custom_step:
            yield
            return
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        names = {parameter: name for name, parameter in self.job.updated_parameters()}

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if optimizer is not self.job.optimizer:
                own = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                self._updates.append({names[p]: sampled(p.grad) for p in own if p in names})

        handle = register_optimizer_step_pre_hook(look)
        try:
            yield
        finally:
            handle.remove()

    def _untrained(self) -> dict[str, torch.Tensor]:
        """Return the values of buffers and untrained parameters, together with the number of gradients that remain
        after a step.
        """
        trained = {id(p) for p in unwrapped(self.job.model).parameters() if p.requires_grad}
        untrained = {
            name: sampled(whole(tensor.detach()))
            for name, tensor in named_state(unwrapped(self.job.model))
            if id(tensor) not in trained
        }
        return {**untrained, LEFT_OVER: self._left_over()}

    def _state(self, before: Tensors, after: Tensors) -> StateStep:
        import torch

        floating = {name: t for name, t in named_state(unwrapped(self.job.model)) if t.is_floating_point()}
        weights = {name: sampled(whole(t.detach())) for name, t in floating.items() if name not in before}
        return StateStep(
            before={name: before[name] for name in floating if name in before},
            after={name: after[name] for name in floating if name in before},
            weights=weights,
            roundoffs={name: torch.finfo(t.dtype).eps for name, t in floating.items()},
        )

    def _left_over(self) -> torch.Tensor:
        """Return the number of gradients that are not zero after a step; 0 for a step captured in a CUDA graph, which
        overwrites its own gradients.
        """
        import torch

        left = [g for g in self.job.gradients() if bool(g.any())] if self.job.runner.accumulates else []
        return torch.tensor([float(len(left))], dtype=torch.float64)


# --- files ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Tensors of the reference's steps, and their noise, keyed by unit roundoff (as `float.hex`)."""

    steps: Sequence[Tensors]
    noise: dict[str, list[Noise]]

    def at(self, places: Sequence[int], unit_roundoff: float) -> Compared:
        """Return the steps at the given indices, with their noise at one unit roundoff."""
        noise = self.noise_at(unit_roundoff)
        return Compared(steps=[self.steps[k] for k in places], noise={unit_roundoff.hex(): [noise[k] for k in places]})

    def noise_at(self, unit_roundoff: float) -> list[Noise]:
        """Return the noise measured at this roundoff; if there is none, at the next coarser roundoff."""
        measured = sorted((float.fromhex(key), noise) for key, noise in self.noise.items())
        return next((noise for roundoff, noise in measured if roundoff >= unit_roundoff), measured[-1][1])


class GradientReference:
    """Gradients of the reference, for comparison with candidates, as stored in the study's files.

    Attributes:
        gradients: Gradients of every step.
        changes: Changes of untrained values.
        wide: Gradients of the audits in FP32, whatever the reference computes in; no steps where they are not known.
        weights: Weights after every step, and the distances of disturbed runs; no steps where they are not known.
        exact: Indices of the steps that begin from the initial parameters.
        scatter: Scatter of gradients by masks; None for a model without masks.
    """

    def __init__(
        self,
        *,
        gradients: Compared,
        changes: Compared,
        exact: Sequence[int],
        wide: Compared | None = None,
        weights: Compared | None = None,
        scatter: Scatter | None = None,
    ) -> None:
        self.gradients = gradients
        self.changes = changes
        self.wide = wide or Compared(steps=(), noise={})
        self.weights = weights or Compared(steps=(), noise={})
        self.exact = tuple(exact)
        self.scatter = scatter

    @classmethod
    def measured(
        cls,
        reference: GradientWatch,
        repeated: GradientWatch,
        disturbed: dict[float, list[GradientWatch]],
        exact: Sequence[int],
        wide: Compared | None,
        scatter: Scatter | None,
    ) -> GradientReference:
        """Build the reference from an undisturbed run, a repetition of it, and runs disturbed by each unit roundoff."""

        def compared(part: Callable[[GradientWatch], Sequence[Tensors]]) -> Compared:
            noise = {
                roundoff.hex(): measure_noise(
                    part(reference),
                    [part(run) for run in runs],
                    part(repeated),
                    unit_roundoff=roundoff,
                    exact=exact,
                )
                for roundoff, runs in disturbed.items()
            }
            return Compared(steps=part(reference), noise=noise)

        def weights_of(watch: GradientWatch) -> list[Tensors]:
            """Return the weights after each step, as long as the next step continues from them."""
            following = itertools.takewhile(lambda place: place not in exact, itertools.count(1))
            return [state.weights for state, _ in zip(watch.states, following, strict=False)]

        steps = weights_of(reference)
        weights = Compared(
            steps=steps,
            noise={
                roundoff.hex(): measure_distances(steps, [weights_of(run) for run in runs])
                for roundoff, runs in disturbed.items()
            },
        )
        return cls(
            gradients=compared(lambda watch: watch.gradients),
            changes=compared(lambda watch: watch.changes),
            exact=exact,
            wide=wide,
            weights=weights,
            scatter=scatter,
        )

    def noise_of(self, watch: GradientWatch, unit_roundoff: float) -> list[Noise]:
        """Return the noise of a candidate's gradients, scaled by the distance of its weights from the reference's. The
        result is valid only if the candidate's updates are correct.
        """
        noise = self.gradients.noise_at(unit_roundoff)
        if not self.weights.steps:
            return noise
        found = [state.weights for state in watch.states]
        far = distances(self.weights.steps, self.weights.noise_at(unit_roundoff), found)
        return at_distance(noise, far, self.exact)

    def save(self, path: Path) -> None:
        tensors: dict[str, torch.Tensor] = {}
        metadata: dict[str, Any] = {"exact": list(self.exact)}
        for part in _PARTS:
            compared: Compared = getattr(self, part)
            metadata[part] = msgspec.to_builtins(compared.noise)
            metadata[f"{part} steps"] = len(compared.steps)
            for number, step in enumerate(compared.steps):
                tensors.update({f"{part}/{number}/{name}": tensor for name, tensor in step.items()})
        if self.scatter is not None:
            kept = ("energies", "num_seeds", "spread", "is_of_draws", "directions")
            metadata["scatter"] = {name: getattr(self.scatter, name) for name in kept}
            for number, step in enumerate(self.scatter.means):
                tensors.update({f"scatter/{number}/{name}": tensor for name, tensor in step.items()})
        save_tensors(path, tensors, metadata)

    @classmethod
    def load(cls, path: Path) -> GradientReference | None:
        """Load the reference's gradients; None if the reference was made without them."""
        if not path.exists():
            return None
        tensors, metadata = map_tensors(path)

        def steps(owner: str) -> list[Tensors]:
            found: dict[int, dict[str, torch.Tensor]] = {}
            for key, tensor in tensors.items():
                part, number, name = key.split("/", 2)
                if part == owner:
                    found.setdefault(int(number), {})[name] = tensor
            return [found.get(number, {}) for number in range(metadata.get(f"{owner} steps", len(found)))]

        parts = {}
        for part in _PARTS:
            noise = msgspec.convert(metadata.get(part, {}), dict[str, list[Noise]])
            parts[part] = Compared(steps=steps(part), noise=noise)
        known = metadata.get("scatter")
        scatter = None if known is None else Scatter(means=steps("scatter"), **known)
        return cls(**parts, exact=metadata["exact"], scatter=scatter)


_PARTS = ("gradients", "changes", "wide", "weights")
