"""Optimizers of users and libraries whose step a kernel computes over all parameters at once.

A changed optimizer becomes an instance of a subclass of its class, with another `step`: groups, options, state and
hooks stay, so that states of either load into the other. Gradients stay as they are, which some loops scale in place.

A class's name alone does not prove what the class computes: three of its steps on a few small tensors in float64 must
agree with the kernel's reference.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from steptune.kernels.multi_tensor import laid_out_like, reason_against

PROBED_SHAPES = ((5, 4), (4,), (3,))
"""Shapes of the parameters in each group of the optimizer under test: a matrix, a vector, and a vector of zeros."""
NUM_PROBED = 3
TOLERANCE = 1e-9
"""Maximum absolute difference, in float64, between the parameters after steps by an optimizer's own class and by the
reference.
"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tensors of one dtype that a step updates, with their settings.

    Attributes:
        parameters: Parameters with a gradient.
        gradients: Gradient of each parameter, in its strides.
        states: What the optimizer keeps for each element: one list for each name.
        settings: Settings of each parameter.
        max_grad_norm: Clipping norm of all the optimizer's gradients together; None clips nothing.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[list[Tensor]]
    settings: list[Any]
    max_grad_norm: float | None


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A published implementation of an optimizer's algorithm.

    Attributes:
        options: Options of a group that the kernel supports; a group with others is refused.
        refusal: Returns why the kernel does not support an optimizer's options; empty where it does.
        settings: Returns a parameter's settings at this step; called after `begin`, before the parameter has a state.
        begin: Counts a step, once for each group.
        states: Names of what the optimizer keeps for each element.
        max_grad_norm: Returns an optimizer's clipping norm.
        end: Called with the optimizer, the parameters and the norms (T, 3) after a step.
    """

    options: frozenset[str]
    settings: Callable[[Any, Mapping[str, Any], Tensor], Any]
    states: Callable[[Mapping[str, Any]], tuple[str, ...]]
    refusal: Callable[[Any], str] = lambda optimizer: ""
    begin: Callable[[dict[str, Any]], None] = lambda group: None
    max_grad_norm: Callable[[Any], float | None] = lambda optimizer: None
    end: Callable[[Any, list[Tensor], Tensor], None] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """An optimizer's algorithm, with its published implementations and its kernel.

    Attributes:
        word: Lower-case word that the names of its classes contain.
        kinds: Implementations by the full name of their class.
        by_kernel: Updates parts by the kernel; returns their norms.
        by_reference: Updates parts by the kernel's reference; returns their norms.
    """

    word: str
    kinds: Mapping[str, Kind]
    by_kernel: Callable[[list[Part]], list[Tensor]]
    by_reference: Callable[[list[Part]], list[Tensor]]

    def refusal(self, optimizer: Any) -> str | None:
        """Return why the kernel cannot compute an optimizer's step; empty if it can, and None if the optimizer has
        another algorithm.
        """
        cls = type(optimizer)
        if self.word not in cls.__name__.lower():
            return None
        kind = self.kinds.get(_name_of(cls))
        if kind is None:
            known = ", ".join(sorted(self.kinds))
            return f"the kernel does not support {_name_of(cls)} (supported: {known})"
        unknown = sorted({key for group in optimizer.param_groups for key in group} - kind.options - _COMMON)
        if unknown:
            return f"{_name_of(cls)} has options that the kernel does not support: {', '.join(unknown)}"
        return (
            kind.refusal(optimizer)
            or reason_against([p for group in optimizer.param_groups for p in group["params"]])
            or self._difference(optimizer, kind)
        )

    def replace(self, optimizer: Any) -> None:
        """Change an optimizer, in place, so that it calls the kernel; `refusal` must have accepted it."""
        cls: Any = type(optimizer)
        optimizer.__class__ = _subclass(cls, self)
        optimizer._patch_step_function()  # hooks and profiling, as of every optimizer

    def step(self, optimizer: Any, kind: Kind, compute: Callable[[list[Part]], list[Tensor]]) -> None:
        """Take one optimizer step with the given update function."""
        parts = _parts(optimizer, kind)
        if not parts:
            return
        for part, norms in zip(parts, compute(parts), strict=True):
            if kind.end is not None:
                kind.end(optimizer, part.parameters, norms)

    def _difference(self, optimizer: Any, kind: Kind) -> str:
        """Return how the steps of the optimizer's class differ from the reference; empty where they agree."""
        theirs, ours = _probe(optimizer), _probe(optimizer)
        generator = torch.Generator().manual_seed(0)
        for number in range(NUM_PROBED):
            pairs = list(zip(_parameters(theirs), _parameters(ours), strict=True))
            for first, second in pairs:
                first.grad = torch.randn(first.shape, generator=generator, dtype=first.dtype)
                second.grad = first.grad.clone()
            type(optimizer).step(theirs)
            with torch.no_grad():
                self.step(ours, kind, self.by_reference)
            worst = max(float((first - second).detach().abs().max()) for first, second in pairs)
            if not worst <= TOLERANCE:
                return (
                    f"{_name_of(type(optimizer))} and the kernel compute different updates: step {number + 1} of "
                    f"a trial run differs by {worst:.3g}"
                )
        return ""


_COMMON = frozenset({"params", "initial_lr", "lr_scale", "param_names", "step", "name"})
"""Keys that schedulers and libraries add to a parameter group, and that no update reads."""


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def _subclass(cls: type, rule: Rule) -> type:
    kind = rule.kinds[_name_of(cls)]

    class Fused(cls):  # type: ignore[misc]
        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            rule.step(self, kind, rule.by_kernel)
            return loss

    Fused.__name__, Fused.__qualname__ = cls.__name__, cls.__qualname__
    return Fused


def _parts(optimizer: Any, kind: Kind) -> list[Part]:
    """Group the tensors that a step updates, by dtype and by the number of states that the optimizer keeps."""
    found: dict[Any, Part] = {}
    for group in optimizer.param_groups:
        kind.begin(group)
        names = kind.states(group)
        settings: dict[Any, Any] = {}
        for parameter in group["params"]:
            if parameter.grad is None or not parameter.numel():
                continue
            state = optimizer.state[parameter]
            own = kind.settings(optimizer, group, parameter)
            own = settings.setdefault(own, own)
            part = found.setdefault(
                (parameter.dtype, len(names)),
                Part(
                    parameters=[],
                    gradients=[],
                    states=[[] for _ in names],
                    settings=[],
                    max_grad_norm=kind.max_grad_norm(optimizer),
                ),
            )
            part.parameters.append(parameter.detach())
            part.gradients.append(laid_out_like(parameter.grad, parameter))
            part.settings.append(own)
            for number, name in enumerate(names):
                value = state.get(name)
                value = torch.zeros_like(parameter) if value is None else laid_out_like(value, parameter)
                part.states[number].append(value.detach())
                state[name] = value.detach()
    return list(found.values())


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _probe(optimizer: Any) -> Any:
    """Make an optimizer of the same class and options over small tensors, without its state and hooks."""
    generator = torch.Generator().manual_seed(1)
    cls: Any = type(optimizer)
    probe = cls.__new__(cls)
    probe.__dict__.update(optimizer.__dict__)
    probe.__dict__.update({name: OrderedDict() for name, value in vars(optimizer).items() if name.endswith("_hooks")})
    probe.state = defaultdict(dict)
    probe.param_groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "step")}
        if torch.is_tensor(options.get("lr")):
            options["lr"] = float(options["lr"])
        tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in PROBED_SHAPES]
        tensors[-1].zero_()
        probe.param_groups.append({"params": [torch.nn.Parameter(t) for t in tensors], **options})
    return probe


def rate(group: Mapping[str, Any]) -> float:
    """Return the learning rate as a number. If it is on the device, wait for it, as the library's own loop does."""
    return float(group["lr"])


def all_of(names: Iterable[str]) -> Callable[[Mapping[str, Any]], tuple[str, ...]]:
    """Return a function that returns the given state names for every parameter group."""
    kept = tuple(names)
    return lambda group: kept
