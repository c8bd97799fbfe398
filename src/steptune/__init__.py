"""Steptune finds the fastest way to run one training step, proves it, and explains it.

In a workload file:      `steptune.Workload`
In a training script:    `steptune.apply(recommendation, workload)`, `steptune.launch_environment(recommendation)`,
                         `steptune.cached(dataset)`, `steptune.compile_blocks(model)`, `steptune.epochs_ahead(loader)`,
                         `steptune.watch(loader)`, `steptune.enable("steptune.json")`
Of existing traces:      `steptune.analyse_traces([Path("rank0.json.gz"), ...])`

The subpackages `tuner`, `service`, `dashboards`, `kernels`, `migrations` and `examples` are links to the folders at the
top of the repository.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steptune._version import __version__
    from steptune.tuner.export.apply import apply, launch_environment
    from steptune.tuner.export.in_loops import cached, compile_blocks, epochs_ahead
    from steptune.tuner.export.native import load_recommendation
    from steptune.tuner.profiling.analysis import analyse_traces
    from steptune.tuner.scripts.enable import enable
    from steptune.tuner.scripts.watch import watch
    from steptune.tuner.workloads.workload import Workload

__all__ = [
    "Workload",
    "__version__",
    "analyse_traces",
    "apply",
    "cached",
    "compile_blocks",
    "enable",
    "epochs_ahead",
    "launch_environment",
    "load_recommendation",
    "watch",
]

_MODULES = {
    "Workload": "steptune.tuner.workloads.workload",
    "__version__": "steptune._version",
    "analyse_traces": "steptune.tuner.profiling.analysis",
    "apply": "steptune.tuner.export.apply",
    "cached": "steptune.tuner.export.in_loops",
    "compile_blocks": "steptune.tuner.export.in_loops",
    "enable": "steptune.tuner.scripts.enable",
    "epochs_ahead": "steptune.tuner.export.in_loops",
    "launch_environment": "steptune.tuner.export.apply",
    "load_recommendation": "steptune.tuner.export.native",
    "watch": "steptune.tuner.scripts.watch",
}
"""Module of each public name, imported on first use: a workload file needs only `Workload`."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'steptune' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
