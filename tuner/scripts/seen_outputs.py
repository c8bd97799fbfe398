"""Comparison of a script's module outputs in 16 bits with those in FP32 from the same inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steptune.tuner.guard.outputs import ModuleOutput, worst_output
from steptune.tuner.records import GuardCheck
from steptune.tuner.trials.guard import OUTPUT_DEVICES, output_check

Outputs = Mapping[str, Sequence[float]]
"""Difference and excess of size of each module's output, in unit roundoffs; empty where it could not be computed."""


def check_outputs(reference: Outputs, candidate: Outputs, device: str) -> list[GuardCheck]:
    """Check the outputs of all modules except those that exceed the limit already with today's settings."""
    known = {name for name, values in reference.items() if values and _output(name, values).ratio > 1}
    outputs = (_output(name, values) for name, values in candidate.items() if values and name not in known)
    worst = worst_output(outputs)
    return [] if worst is None else [output_check(worst, gates=device in OUTPUT_DEVICES)]


def _output(name: str, values: Sequence[float]) -> ModuleOutput:
    return ModuleOutput(name=name, difference=values[0], size=values[1])
