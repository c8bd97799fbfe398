"""Recording of module masks (dropout) in a rank during guarded steps that draw masks: the share of elements set to
zero, and the scale of the rest.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from steptune.tuner.guard.mask_rates import SCALE_LIMIT, ModuleMasks
from steptune.tuner.training.job import unwrapped

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob

SAMPLED_ELEMENTS = 4096
"""Maximum number of evenly spaced elements sampled from each output."""
FEW = 0.01
"""Maximum share of elements whose scale may differ, because a 16-bit dtype hardly resolves small numbers."""


def why_not_counted(job: TrainingJob) -> str | None:
    """Return the reason for which a job's masks cannot be recorded by module; None where they can."""
    compiled = any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in job.model.modules())
    return "modules of a compiled model cannot be watched" if compiled or job.plan.step.captured else None


class MaskWatch:
    """Recorder of each innermost module's mask in every draw, and of direct calls of `dropout`."""

    def __init__(self, job: TrainingJob) -> None:
        self._model = unwrapped(job.model)
        self._rates: dict[str, list[float]] = {}
        self._counts: dict[str, int] = {}
        self._scales: dict[str, list[float]] = {}
        self._draw: dict[str, tuple[int, int]] = {}

    @property
    def modules(self) -> dict[str, ModuleMasks]:
        """Masks, keyed by module name."""
        return {
            name: ModuleMasks(rates=tuple(rates), scale=_middle(self._scales.get(name, [])), count=self._counts[name])
            for name, rates in self._rates.items()
        }

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record one draw of masks, whatever its number of micro-batches."""
        from steptune.tuner.trials.called_dropout import CalledDropout

        self._draw = {}
        called = CalledDropout(self._model, self._look)
        handles = []
        for name, module in self._model.named_modules():
            enter = _not_compiled(lambda module, arguments, name=name: called.enter(name, module))
            leave = _not_compiled(lambda module, arguments, output: called.leave(module))
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))  # recomputation may end in a module
            if next(module.children(), None) is None:
                handles.append(module.register_forward_hook(self._hook(name)))
        try:
            with called:
                yield
        finally:
            for handle in handles:
                handle.remove()
        for name, (count, zeros) in self._draw.items():
            self._rates.setdefault(name, []).append(zeros / count)
            self._counts[name] = count

    def on_gradients(self) -> None:
        """Do nothing: masks are seen in the forward pass."""

    def on_repeat(self) -> None:
        """Do nothing: a skipped attempt draws masks like any other attempt, so they are recorded too."""

    def _hook(self, name: str) -> Any:
        return _not_compiled(lambda module, arguments, output: self._look(name, arguments, output))

    def _look(self, name: str, arguments: Any, output: Any) -> None:
        import torch

        if not arguments or not _alike(arguments[0], output):
            return
        given = arguments[0]
        before, after = _sampled(given), _sampled(output)
        live, gone = before != 0, after == 0
        negative = before < 0
        if not bool(live.any()) or (bool(negative.any()) and torch.equal(gone & live, negative)):
            return  # what a sign decides is a rectifier's doing
        count, zeros = self._draw.get(name, (0, 0))
        self._draw[name] = count + int(live.sum()), zeros + int((live & gone).sum())
        if bool((live & ~gone).any()):
            kept = live & ~gone
            self._scales.setdefault(name, []).append(_scale(after[kept] / before[kept]))


def _not_compiled(look: Any) -> Any:
    """Exclude a hook from compilation. The graph of a compiled caller ends at the hook."""
    return sys.modules["torch._dynamo"].disable(look) if "torch._dynamo" in sys.modules else look


def _alike(given: Any, output: Any) -> bool:
    import torch

    both = isinstance(given, torch.Tensor) and isinstance(output, torch.Tensor)
    if both and torch._C._functorch.is_batchedtensor(output):
        return False  # inside of a `vmap` nobody may look at values
    return both and given.shape == output.shape and given.is_floating_point() and output.is_floating_point()


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)][:SAMPLED_ELEMENTS].float().cpu()


def _scale(ratios: torch.Tensor) -> float:
    """Return the factor by which all elements are scaled; NaN if their factors differ."""
    scale = ratios.median()
    other = ((ratios - scale).abs() > SCALE_LIMIT * scale.abs()).float().mean()
    return math.nan if float(other) > FEW else float(scale)


def _middle(values: list[float]) -> float:
    """Return the median; NaN if any value is NaN, 0 without values."""
    if any(math.isnan(value) for value in values):
        return math.nan
    return sorted(values)[len(values) // 2] if values else 0.0
