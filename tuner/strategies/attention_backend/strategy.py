"""attention_backend: which implementation `scaled_dot_product_attention` calls.

Mechanism: PyTorch picks a back end by its own rules; the choice restricts it to one: `flash` (tiled,
no attention matrix in memory), `efficient` (the same idea with arbitrary masks), `cudnn`, `math`
(matrix products and a softmax).

Helps: when PyTorch's rule of thumb is wrong for the shape; `math` can win on tiny sequences.
Hurts: `math` on long sequences, in time and memory.

Numerics: `rounding`. Dropout inside attention draws another mask.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, without
from steptune.tuner.costs.categories import COMPUTE, Category
from steptune.tuner.records import Choice, Effect, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported, needs_cuda
from steptune.tuner.strategies.attention_backend.choice import AttentionBackendSetting
from steptune.tuner.strategies.attention_backend.conflicts import CONFLICTS

if TYPE_CHECKING:
    from steptune.tuner.training.plan import Plan

_BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}
_OPERATORS = {
    "cudnn": r"cudnn_attention|cudnn_generated_\w*sdpa|cudnn::fusion::compute_dot_do_o",
    "efficient": r"efficient_attention|fmha_cutlass",
    "math": r"attention_math",
    "flash": r"flash",
}
"""Patterns of each back end's operators and kernels. The first match is taken, because cuDNN's names also contain
"flash".
"""


class AttentionBackend(Strategy):
    setting = AttentionBackendSetting
    conflicts = CONFLICTS
    summary = "back end of scaled_dot_product_attention"
    needs_workload = "the back end is set around the forward pass, which requires Steptune's own training step"
    attacks = (Category.ATTENTION,)
    touches = COMPUTE
    recompiles = True
    usual_realisation = 0.2

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return tuple({"backend": name} for name in _BACKENDS)

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if not workload.model.uses_attention:
            return Unsupported("the model does not call scaled_dot_product_attention")
        if choice["backend"] in ("efficient", "cudnn"):
            return needs_cuda(environment)
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        if choice["backend"] is None:
            return

        def restrict_attention() -> Any:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            return sdpa_kernel(getattr(SDPBackend, _BACKENDS[str(choice["backend"])]))

        def compile_apart() -> None:
            from steptune.tuner.training.compilation import compile_apart

            compile_apart(f"attention_backend={choice['backend']}")

        plan.environment.append(compile_apart)
        plan.step.contexts.append(restrict_attention)

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        # The math back end appears as matrix products and softmax, so leaving it can save those too.
        if situation.choices[self.name]["backend"] == "math":
            return without(situation, Category.ATTENTION, Category.MATMUL, Category.REDUCTION, Category.ELEMENTWISE)
        return without(situation, Category.ATTENTION)

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        """Judge by the operators and kernels of the profiled steps, which contain all attention. A compiler turns the
        math back end into plain matmuls and a softmax; it is then recognised by the absence of all other back ends.
        """
        backend, operators = choice["backend"], evidence.get("operators", ())
        ran = {name: found for name in operators if (found := backend_of(name))}
        if backend is None:
            return Effect(strategy=self.name, took=True, detail=f"ran {next(iter(ran))}" if ran else "left to torch")
        if not operators:
            return Effect(
                strategy=self.name, took=True, detail="the step was not profiled, so the back end that ran is unknown"
            )
        if not ran:
            took = backend == "math"
            return Effect(strategy=self.name, took=took, detail="the profiled steps ran no fused attention operator")
        first = next((name for name, found in ran.items() if found == backend), next(iter(ran)))
        return Effect(strategy=self.name, took=backend in ran.values(), detail=f"ran {first}")


def backend_of(operator: str) -> str | None:
    """Return the back end that an operator or kernel belongs to, by its name; None if it computes no attention."""
    return next((name for name, pattern in _OPERATORS.items() if re.search(pattern, operator.lower())), None)
