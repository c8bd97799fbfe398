"""Comparison of a script's module outputs in 16 bits with those in FP32 from the same inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steptune.tuner.guard.outputs import ModuleOutput, worst_output
from steptune.tuner.records import GuardCheck
from steptune.tuner.trials.guard_checks import OUTPUT_DEVICES, output_check

Outputs = Mapping[str, Sequence[float]]
"""Deviation of each module's output from its output in FP32, as two numbers in unit roundoffs: the relative difference,
and the relative excess along the FP32 output. Empty where it could not be computed.
"""


def check_outputs(outputs: Outputs, device: str) -> list[GuardCheck]:
    """Check the outputs of all modules of a candidate whose precision is lower than today's."""
    seen = (ModuleOutput(name=name, difference=values[0], size=values[1]) for name, values in outputs.items() if values)
    worst = worst_output(seen)
    return [] if worst is None else [output_check(worst, gates=device in OUTPUT_DEVICES)]
