"""Definition of a kernel: its function, its reference, cases on which both must agree, and the model pattern that it
replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """Test case of a kernel: the shapes of its input tensors and its options.

    Attributes:
        label: Names the case in tests and benchmarks.
        shapes: Shape of each tensor, by the name of its parameter.
        options: Parameters that are no tensors.
        positive: Names of tensors whose elements are positive: scales, variances.
    """

    label: str
    shapes: Mapping[str, tuple[int, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    positive: frozenset[str] = frozenset()

    def make(self, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
        """Draw the case's tensors on the generator's device, as leaves that require gradients."""
        tensors = {}
        for name, shape in self.shapes.items():
            tensor = torch.randn(shape, generator=generator, device=generator.device)
            tensor = tensor.abs() + 0.5 if name in self.positive else tensor
            tensors[name] = tensor.to(dtype).requires_grad_()
        return tensors


MODULES, OPTIMIZER = "modules", "optimizer"


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Pattern of what a kernel can replace: modules of a model, parts of a loss, or an optimizer.

    Attributes:
        what: Human-readable description of the modules or the optimizer, and the libraries that they come from.
        refusal: Called with each module of a model and each part of a loss (attributes of the workload, and of modules
            in them), or with the optimizer. Returns None where the subject does not match, "" where the kernel
            can compute it, else why it cannot.
        replace: Changes such a module, part or optimizer, in place, so that it calls the kernel. Parameters, their
            names, inputs and outputs must stay, and so must an optimizer's groups and state; the class may become a
            subclass.
        operators: Names, or parts of names, by which a profile shows that the kernel ran: those of its operator, and
            those of the device kernels that the operator launches.
        subject: `MODULES` or `OPTIMIZER`.
        unavailable: Returns why the kernel cannot run on a device; empty where it can.
    """

    what: str
    refusal: Callable[[Any], str | None]
    replace: Callable[[Any], None]
    operators: tuple[str, ...]
    subject: str = MODULES
    unavailable: Callable[[torch.device], str] = lambda device: ""

    def __post_init__(self) -> None:
        if not self.operators:
            raise ValueError("a pattern requires operators: the names by which a profile shows that the kernel ran")
        if self.subject not in (MODULES, OPTIMIZER):
            raise ValueError(f"the subject of a pattern must be {MODULES} or {OPTIMIZER}, not {self.subject!r}")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A fused kernel with its definition, its cases and its pattern.

    Attributes:
        name: Name of the kernel's folder, also used by the strategy `fused_kernels`; for another package's kernel, the
            name of its entry point.
        summary: One line for tables.
        function: The kernel, called with the tensors and options of a case by name.
        reference: The definition in plain PyTorch, called with the same arguments.
        cases: Small inputs that cover what is easy to get wrong: odd shapes, padding, every option.
        tolerances: Largest relative error, by dtype: norm of the difference to the reference in float64, over its norm.
        without_gradient: Tensors that get no gradient from the kernel, as (label of the case or "*", name).
        has_gradients: Whether the kernel can be differentiated: an assignment or an update cannot.
        in_graphs: Whether the kernel runs inside compiled graphs: an optimizer's step runs outside.
        pattern: Pattern of what the kernel replaces in a training; None where it replaces nothing by itself.
    """

    name: str
    summary: str
    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    cases: tuple[Case, ...]
    tolerances: Mapping[torch.dtype, float]
    without_gradient: frozenset[tuple[str, str]] = frozenset()
    has_gradients: bool = True
    in_graphs: bool = True
    pattern: Pattern | None = None

    def gradients_of(self, case: Case) -> tuple[str, ...]:
        """Return the names of the tensors that get a gradient in a case."""
        if not self.has_gradients:
            return ()
        none = {name for label, name in self.without_gradient if label in ("*", case.label)}
        return tuple(name for name in case.shapes if name not in none)
