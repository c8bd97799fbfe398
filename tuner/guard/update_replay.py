"""Replay of the update: the user's own optimizer on the gradients that a candidate computed.

Only gradients depend on the precision in which a model computes. What follows them (clipping, the learning rate of the
schedule, decay, the optimizer's rule and its state) is arithmetic on FP32 parameters in every precision. So the rule is
run again, in FP64 and in torch's own for-loop form, from the parameters and gradients that the candidate had before a
step, with the hyperparameters that the reference had at that step. The candidate's parameters after the step must agree
to a few roundoffs, however it computed its gradients. State is the replay's own from step to step: a candidate that
loses its state differs from the second step on.

Parameters are sampled: a rule that treats every element alike can be checked on a few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptune.tuner.records import Record

if TYPE_CHECKING:
    import torch

LIMIT = 3.0
"""Maximum score that passes. Correct runs score at most 0.8, planted faults at least 260
(`benchmarks/results/guard_power.json`).
"""
RELATIVE = 1e-5
"""Tolerance of each element of an update, as a share of the element: some implementations compute bias corrections in
FP32.
"""
RELATIVE_IN_FP32 = 1e-4
"""Tolerance of each element of an update, as a share of the element, if powers of betas are FP32 too: 1 - beta ** t
cancels in the first steps.
"""
ABSOLUTE = 1e-6
"""Tolerance of each element of an update, as a share of the tensor's mean absolute update."""
FLAGS = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer's group that select how the rule is computed, not which rule."""


class RuleGroup(Record):
    """Parameters that one step updates with the same options.

    Attributes:
        names: Names of the parameters that have a gradient.
        options: Options of the optimizer's group, without the flags of its implementation.
    """

    names: tuple[str, ...]
    options: dict[str, Any]


class UpdateRule(Record):
    """Update rule of the reference.

    Attributes:
        optimizer: Name of the class in `torch.optim`.
        max_grad_norm: The norm to which gradients are clipped; None where they are not.
        steps: Groups of each step.
    """

    optimizer: str
    max_grad_norm: float | None
    steps: tuple[tuple[RuleGroup, ...], ...]


@dataclass(frozen=True, kw_only=True)
class SeenStep:
    """Record of one step in a rank: sampled elements by parameter name, FP64 on the CPU.

    Attributes:
        before: Parameters before the step.
        gradients: Gradients after unscaling, before clipping.
        norm: Norm of all gradients.
        after: Parameters after the step.
        states: Per-element state of the optimizer after the step; None where its layout differs.
        roundoff: Distance from 1 to the next larger number of the coarsest dtype among the parameters.
    """

    before: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    norm: float
    after: dict[str, torch.Tensor]
    states: dict[str, dict[str, torch.Tensor]] | None
    roundoff: float


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Deviation from the rule, at the step and in the tensor where the update differs most.

    Attributes:
        score: Score in units of the difference that rounding allows; `LIMIT` is the largest that passes.
        step: Number of the step, from 1.
        name: Name of the parameter.
        rate: Relative excess of the update; meaningless where the tensor was not updated.
        decay: Amount subtracted beyond the rule, as a share of the parameter.
    """

    score: float
    step: int
    name: str
    rate: float = 0.0
    decay: float = 0.0


def worst_deviation(rule: UpdateRule, steps: Sequence[SeenStep], *, in_fp32: bool = False) -> Deviation:
    """Replay the rule over the steps of a candidate and return the largest deviation.

    Args:
        in_fp32: The candidate computes bias corrections in FP32.

    Returns:
        The largest deviation. A parameter that the reference updates and that has no gradient here deviates infinitely,
        and so does an optimizer that steps more or less often.
    """
    if len(rule.steps) != len(steps):
        return Deviation(score=math.inf, step=min(len(rule.steps), len(steps)) + 1, name=f"{rule.optimizer} as a whole")
    found = list(_deviations(rule, steps, RELATIVE_IN_FP32 if in_fp32 else RELATIVE))
    return max(found, key=lambda deviation: deviation.score, default=Deviation(score=0.0, step=0, name=""))


def _deviations(rule: UpdateRule, steps: Sequence[SeenStep], relative: float) -> Iterator[Deviation]:
    replay = _Replay(rule)
    for number, (groups, seen) in enumerate(zip(rule.steps, steps, strict=True), start=1):
        names = [name for group in groups for name in group.names]
        missing = next((name for name in names if name not in seen.gradients), None)
        if missing is not None:
            yield Deviation(score=math.inf, step=number, name=missing)
            return
        wanted = replay.step(groups, seen)
        for name in names:
            yield _deviation(number, name, wanted[name], seen, max(relative, 4 * seen.roundoff))
            if seen.states is not None:
                score = _score_of_state(replay.state(name), seen.states[name], max(RELATIVE, 4 * seen.roundoff))
                yield Deviation(score=score, step=number, name=f"the state of {name}")


def _deviation(step: int, name: str, wanted: torch.Tensor, seen: SeenStep, relative: float) -> Deviation:
    """Compare the update of one tensor with the rule's: element by element, and as sums along the update and along the
    parameter. The sums show a wrong rate or decay far below the rounding of an element.
    """
    before, after = seen.before[name], seen.after[name]
    excess = (after - before) - wanted
    if not bool(excess.isfinite().all()):
        return Deviation(score=math.inf, step=step, name=name)
    last_digit = seen.roundoff * before.abs().maximum(after.abs())
    allowed = last_digit + relative * wanted.abs() + ABSOLUTE * wanted.abs().mean() + _TINY
    squares, weights = _dot(wanted, wanted), _dot(before, before)
    rate, decay = _ratio(_dot(excess, wanted), squares), -_ratio(_dot(excess, before), weights)
    rate_allowed = relative + _ratio(_of_sum(allowed, last_digit, wanted), squares)
    decay_allowed = relative * abs(_ratio(_dot(wanted, before), weights)) + _ratio(
        _of_sum(allowed, last_digit, before), weights
    )
    scores = (
        (excess / allowed).square().mean().sqrt().item(),
        abs(rate) / rate_allowed if squares else 0.0,
        abs(decay) / decay_allowed if weights else 0.0,
    )
    return Deviation(score=max(scores), step=step, name=name, rate=rate, decay=decay)


def _score_of_state(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor], relative: float) -> float:
    """Return the deviation of the optimizer's state from the rule's, in units of the rounding error allowed."""
    scores = [0.0]
    for key, value in wanted.items():
        if key not in found or not bool(found[key].isfinite().all()):
            return math.inf
        scores.append(float((found[key] - value).norm()) / (relative * float(value.norm()) + _TINY))
    return max(scores)


_TINY = 1e-30


def _of_sum(allowed: torch.Tensor, last_digit: torch.Tensor, factor: torch.Tensor) -> float:
    """Return the allowed difference of a sum over elements, each multiplied by its element of `factor`. Elements are
    taken to round independently; a part is added for elements that all round alike, such as the weights of a norm that
    are all 1.
    """
    return float((allowed * factor).norm()) + float((last_digit * factor.abs()).sum()) / LIMIT


def _dot(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first * second).sum())


def _ratio(value: float, unit: float) -> float:
    return value / unit if unit else 0.0


class _Replay:
    """Replay of the rule on separate parameters, which keep the optimizer's state from step to step."""

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule
        self._parameters: dict[str, Any] = {}
        self._optimizers: dict[str, Any] = {}

    def step(self, groups: Sequence[RuleGroup], seen: SeenStep) -> dict[str, torch.Tensor]:
        """Run one step from the recorded parameters and gradients; return the update of every parameter."""
        import torch

        clipped = self._clip_factor(seen.norm)
        updates = {}
        for group in groups:
            for name in group.names:
                before = seen.before[name]
                optimizer = self._optimizer(name, before, group.options)
                parameter = self._parameters[name]
                with torch.no_grad():
                    parameter.copy_(before)
                parameter.grad = seen.gradients[name] * clipped
                optimizer.step()
                updates[name] = parameter.detach() - before
        return updates

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return the state that the rule keeps for each element of a parameter."""
        import torch

        parameter = self._parameters[name]
        state = self._optimizers[name].state[parameter]
        return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == parameter.shape}

    def _optimizer(self, name: str, before: torch.Tensor, options: dict[str, Any]) -> Any:
        """Return the optimizer of a parameter, with the options of this step."""
        import torch

        if name not in self._optimizers:
            self._parameters[name] = torch.nn.Parameter(before.clone())
            group = {**options, "params": [self._parameters[name]]}
            self._optimizers[name] = getattr(torch.optim, self._rule.optimizer)([group], foreach=False)
        self._optimizers[name].param_groups[0].update(options)
        return self._optimizers[name]

    def _clip_factor(self, norm: float) -> float:
        """Return the clipping factor as `torch.nn.utils.clip_grads_with_norm_` computes it."""
        if self._rule.max_grad_norm is None:
            return 1.0
        return min(1.0, self._rule.max_grad_norm / (norm + 1e-6))
