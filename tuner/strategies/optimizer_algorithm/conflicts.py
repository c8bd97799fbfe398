"""Combinations that `optimizer_algorithm` refuses."""

from __future__ import annotations

from steptune.tuner.records import WorkloadFacts
from steptune.tuner.strategies.api import Conflict, Settings
from steptune.tuner.strategies.cuda_graph.choice import CudaGraphSetting
from steptune.tuner.strategies.optimizer_algorithm.choice import IMPLEMENTATIONS, OptimizerAlgorithmSetting
from steptune.tuner.strategies.optimizer_implementation.choice import OptimizerImplementationSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting


def _fused_sgd(settings: Settings, facts: WorkloadFacts) -> bool:
    implementation = settings[OptimizerImplementationSetting].implementation or facts.optimizer.implementation
    own = settings[OptimizerAlgorithmSetting].algorithm is None
    return own and facts.optimizer.name == "SGD" and implementation == "fused"


CONFLICTS = (
    Conflict(
        between=(OptimizerImplementationSetting, PrecisionSetting),
        when=lambda s, e, w: e.hardware.device_kind == "cpu" and s[PrecisionSetting].level == "O3" and _fused_sgd(s, w),
        reason="torch's fused SGD on a CPU silently leaves 16-bit parameters unchanged",
    ),
    Conflict(
        between=(OptimizerAlgorithmSetting, CudaGraphSetting),
        when=lambda s, e, w: (
            s[CudaGraphSetting].scope == "step" and s[OptimizerAlgorithmSetting].algorithm not in (None, "adamw")
        ),
        reason="the algorithm reads its learning rate on the host (LAMB and Adafactor also read their step count "
        "there), but a CUDA graph would keep the first value",
    ),
    Conflict(
        between=(OptimizerAlgorithmSetting, OptimizerImplementationSetting),
        when=lambda s, e, w: (
            s[OptimizerAlgorithmSetting].algorithm is not None
            and s[OptimizerImplementationSetting].implementation
            not in (None, *IMPLEMENTATIONS.get(str(s[OptimizerAlgorithmSetting].algorithm), ()))
        ),
        reason="the algorithm does not have this implementation",
    ),
    Conflict(
        between=(OptimizerAlgorithmSetting, OptimizerImplementationSetting),
        when=lambda s, e, w: (
            s[OptimizerAlgorithmSetting].algorithm not in (None, "adamw")
            and s[OptimizerImplementationSetting].contiguous
        ),
        reason="the algorithm needs the shape or norm of each parameter, but `contiguous` flattens all parameters into "
        "one tensor",
    ),
)
