"""Similarity of workloads, by which a study decides whether to try an earlier study's answer.

Two trainings are alike by the module types of their models, the sizes of model, step and sample, their optimizer, and
the balance of the devices that they run on. Each contributes to one distance; none is a condition, so that another
batch size or a deeper model still learns from what was found before. Where their time goes today is compared when it
is known: what cured one bottleneck is no cure of another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from steptune.tuner.records import Environment, Study, WorkloadFacts

FARTHEST = 0.9
"""Minimum distance at which the answer for one workload is not tried on the other."""
OCTAVES = 6.0
"""Number of doublings between the sizes of two workloads that adds as much to their distance as having no module type
in common.
"""
OTHER_OPTIMIZER, OTHER_UNIT, OTHER_RANKS = 0.25, 0.5, 0.25
SHIFTED = 0.35
"""Minimum share of the step time that must be spent in different categories for two bottlenecks to count as different.
"""


def distance(facts: WorkloadFacts, environment: Environment, past: Study) -> float:
    """Return the distance between a workload with its machine and those of an earlier study; infinite if the earlier
    study has no inspection.
    """
    if past.facts is None or past.environment is None:
        return math.inf
    other = past.facts
    return (
        _unlike_types(facts.model.module_types, other.model.module_types)
        + _doublings(facts.model.num_parameters, other.model.num_parameters) / OCTAVES
        + _doublings(*_work(facts, other)) / OCTAVES
        + _doublings(facts.dataset.sample_bytes or 0, other.dataset.sample_bytes or 0) / OCTAVES
        + _doublings(_balance(environment), _balance(past.environment)) / OCTAVES
        + OTHER_OPTIMIZER * (facts.optimizer.name != other.optimizer.name)
        + OTHER_UNIT * (facts.sample_unit != other.sample_unit)
        + OTHER_RANKS * (environment.num_ranks != past.environment.num_ranks)
    )


def is_alike(shares: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """Say whether two steps spend their time in similar categories; True if one of them is unknown."""
    if not shares or not others:
        return True
    moved = sum(abs(shares.get(name, 0.0) - others.get(name, 0.0)) for name in shares.keys() | others.keys()) / 2
    return moved < SHIFTED


def _unlike_types(one: Mapping[str, int], other: Mapping[str, int]) -> float:
    """Return the weighted Jaccard distance of the log counts of module types: 0 if two models have the same types
    equally often, 1 if they have none in common.
    """
    names = one.keys() | other.keys()
    logs = [(math.log1p(one.get(name, 0)), math.log1p(other.get(name, 0))) for name in names]
    most = sum(max(pair) for pair in logs)
    return 1 - sum(min(pair) for pair in logs) / most if most else 0.0


def _doublings(one: float, other: float) -> float:
    """Return the number of doublings between two sizes; 0 where one of them is unknown."""
    return abs(math.log2(one / other)) if one > 0 and other > 0 else 0.0


def _work(one: WorkloadFacts, other: WorkloadFacts) -> tuple[float, float]:
    """Return the floating-point operations of a step of each workload; if either is unknown, return parameters times
    samples for both.
    """
    counted = one.model.flops_per_step, other.model.flops_per_step
    if counted[0] and counted[1]:
        return counted[0], counted[1]
    return one.model.num_parameters * one.global_batch, other.model.num_parameters * other.global_batch


def _balance(environment: Environment) -> float:
    """Return the ratio of the device's peak FLOP/s to its memory bandwidth; 0 if the device was not calibrated."""
    calibration = environment.calibration
    if not calibration.copy_bytes_per_s or not calibration.matmul_flops_per_s:
        return 0.0
    return max(calibration.matmul_flops_per_s.values()) / calibration.copy_bytes_per_s
