"""Steptune's engine: finds the fastest way to run one training step, proves it, explains it.

In a workload file:      `tuner.Workload`
In a training script:    `tuner.apply(recommendation, workload)`, `tuner.launch_environment(recommendation)`
"""

from tuner.workloads.workload import Workload

__version__ = "0.1.0"
__all__ = ["Workload", "__version__"]
