"""Steptune's engine: finds the fastest way to run one training step, proves it, explains it.

In a workload file:      `tuner.Workload`
In a training script:    `tuner.apply(recommendation, workload)`, `tuner.launch_environment(recommendation)`
Of traces one has:       `tuner.analyse_traces([Path("rank0.json.gz"), ...])`
"""

from typing import TYPE_CHECKING, Any

from tuner.workloads.workload import Workload

if TYPE_CHECKING:
    from tuner.export.apply import apply, launch_environment
    from tuner.export.native import load_recommendation
    from tuner.profiling.analysis import analyse_traces

__version__ = "0.1.0"
__all__ = ["Workload", "__version__", "analyse_traces", "apply", "launch_environment", "load_recommendation"]

_LAZY = {
    "analyse_traces": "tuner.profiling.analysis",
    "apply": "tuner.export.apply",
    "launch_environment": "tuner.export.apply",
    "load_recommendation": "tuner.export.native",
}
"""Imported when first asked for: a workload file needs none of it."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tuner' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
