"""Steptune's engine: finds the fastest way to run one training step, proves it, explains it.

In a workload file:      `tuner.Workload`
In a training script:    `tuner.apply(recommendation, workload)`, `tuner.launch_environment(recommendation)`
"""

from typing import TYPE_CHECKING, Any

from tuner.workloads.workload import Workload

if TYPE_CHECKING:
    from tuner.export.apply import apply, launch_environment
    from tuner.export.native import load_recommendation

__version__ = "0.1.0"
__all__ = ["Workload", "__version__", "apply", "launch_environment", "load_recommendation"]

_LAZY = {
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
