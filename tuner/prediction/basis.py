"""Basis of a prediction: one configuration that a study measured and profiled.

Its step is taken apart (`step`); what copying and contention added is taken off, so that other ways to communicate can
be put in their place. Simulated on the study's own ranks and links, the model gives a step time that
differs from the measured one; this unexplained difference is added to every prediction. So the configuration itself is
predicted as it was measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from steptune.tuner.costs.sockets import with_sockets
from steptune.tuner.errors import ChoiceError, StoreError
from steptune.tuner.estimates import units_per_s
from steptune.tuner.prediction.cluster import Cluster
from steptune.tuner.prediction.contention import default_contention, measured_contention
from steptune.tuner.prediction.forecast import BasisFacts
from steptune.tuner.prediction.model import Model
from steptune.tuner.prediction.overheads import copies_ns
from steptune.tuner.prediction.step import NO_PHASES, UPDATE_BYTES, ComputeStep, backward_share, compute_step
from steptune.tuner.prediction.volumes import volumes_of
from steptune.tuner.records import (
    BASELINE,
    Breakdown,
    Candidate,
    Choice,
    Environment,
    Link,
    ModelFacts,
    Study,
    Trial,
    TrialResult,
    WorkloadFacts,
)
from steptune.tuner.strategies.api import Settings
from steptune.tuner.strategies.combine import complete_choices
from steptune.tuner.strategies.local_sgd.choice import LocalSgdSetting
from steptune.tuner.strategies.micro_batch.choice import MicroBatchSetting
from steptune.tuner.strategies.parallel_mesh.choice import ParallelMeshSetting
from steptune.tuner.strategies.situations import exchange_of
from steptune.tuner.training.compression.own_cost import OwnCost


@dataclass(frozen=True, kw_only=True)
class Basis:
    """Basis of a prediction: the measured configuration, its model and its cluster.

    Attributes:
        candidate: The measured configuration.
        cluster: Ranks and links of the study.
        environment: Environment of the study, its links adjusted to the configuration's number of sockets.
        assumptions: Quantities that were assumed, not measured.
    """

    candidate: Candidate
    cluster: Cluster
    model: Model
    environment: Environment
    workload: WorkloadFacts
    facts: BasisFacts
    assumptions: tuple[str, ...]

    def choices(self, candidate: Candidate) -> dict[str, Choice]:
        return complete_choices(candidate, self.workload)


def basis_of(
    study: Study,
    trials: Sequence[Trial],
    trial: Trial,
    *,
    inside: Link | None = None,
    contention: float | None = None,
    own_costs: Mapping[str, OwnCost] | None = None,
) -> Basis:
    """Return the basis of a prediction from a profiled trial of a study.

    Args:
        trial: The configuration's trial, with a profile; its other runs count for its step time.
        inside: Link between devices of a host, for a study of several hosts that has not measured it.
        contention: Share of its speed that compute loses while communication runs, where the study has not measured it.
        own_costs: Measured compute time of compressions.

    Raises:
        StoreError: The trial was not profiled, or the study has not inspected its workload, or its ranks do not reduce
            their gradients in every step.
        ChoiceError: The study ran on several ranks, whose links are not known.
    """
    facts, environment, result = _profiled(study, trial)
    results = [t.result for t in trials if t.result is not None]
    assumptions: list[str] = []
    contention, is_measured = _contention(environment, results, contention, assumptions)
    assumptions += (f"the prediction starts from an unreliable profile: {p}" for p in _problems(result))
    if backward_share(result.breakdowns[0]) is None:
        assumptions.append(NO_PHASES)
    choices = complete_choices(result.candidate, facts)
    if reason := why_not_predicted(choices):
        raise StoreError(
            f"trial {trial.sequence} {reason}, which cannot be predicted: choose another trial, for example with "
            "--from baseline"
        )
    environment = _with_sockets(environment, exchange_of(choices).sockets, facts, assumptions)
    cluster = _own_cluster(environment, inside)
    measured_ns = measured_step_ns(results, result.candidate)
    model = Model(
        step=_bare_step(result.breakdowns[0], measured_ns, choices, facts.model, environment, contention),
        facts=facts.model,
        calibration=environment.calibration,
        contention=contention,
        own_costs=own_costs or {},
        has_streams=environment.hardware.device_kind != "cpu",
    )
    model = replace(model, unexplained_ns=measured_ns - model.step_ns(choices, cluster))
    return Basis(
        candidate=result.candidate,
        cluster=cluster,
        model=model,
        environment=environment,
        workload=facts,
        facts=_told(trial.sequence, result, cluster, model, measured_ns, contention_measured=is_measured),
        assumptions=tuple(assumptions),
    )


def _profiled(study: Study, trial: Trial) -> tuple[WorkloadFacts, Environment, TrialResult]:
    """Return the facts, environment and result that a prediction needs; refuse a trial that lacks one of them."""
    facts, environment, result = study.facts, study.environment, trial.result
    if facts is None or environment is None:
        raise StoreError(f"study {study.study_id} has not inspected its workload yet: wait for its first trial")
    if result is None or not result.breakdowns or not result.ok:
        raise StoreError(
            f"trial {trial.sequence} of study {study.study_id} must be measured and profiled: choose another trial "
            "with --from"
        )
    return facts, environment, result


def _problems(result: TrialResult) -> Sequence[str]:
    return result.breakdowns[0].quality.problems


def why_not_predicted(choices: Mapping[str, Choice]) -> str:
    """Return the reason why a configuration cannot be predicted; empty if it can. The model covers only the reduction
    of all gradients over all ranks in every step.
    """
    if Settings(choices)[LocalSgdSetting].every != 1:
        return "averages models between its steps (local_sgd)"
    if Settings(choices)[ParallelMeshSetting].splits_model:
        return "divides the model among ranks (parallel_mesh)"
    return ""


def _bare_step(
    breakdown: Breakdown,
    measured_ns: float,
    choices: Mapping[str, Choice],
    model: ModelFacts,
    environment: Environment,
    contention: float,
) -> ComputeStep:
    """Return the compute time of an unprofiled step, without the copies and the contention that communication adds."""
    rate = environment.calibration.copy_bytes_per_s
    step = compute_step(
        breakdown,
        moving_ns=UPDATE_BYTES * model.num_trained / rate * 1e9 if rate else 0.0,
        num_micro_batches=Settings(choices)[MicroBatchSetting].num_micro_batches,
        contention=contention,
    )
    step = step.scaled(measured_ns / sum(breakdown.per_step_ns.values()))
    if environment.num_ranks == 1:
        return step
    copies = copies_ns(choices, volumes_of(model, choices, environment.num_ranks), environment.calibration)
    return replace(step, backward_ns=max(0.0, step.backward_ns - copies))


def _told(
    sequence: int, result: TrialResult, cluster: Cluster, model: Model, measured_ns: float, *, contention_measured: bool
) -> BasisFacts:
    """Return the facts about the basis that a forecast shows."""
    step = model.step
    return BasisFacts(
        sequence=sequence,
        label=result.candidate.label,
        num_ranks=cluster.num_ranks,
        num_hosts=cluster.num_hosts,
        step_time_ns=measured_ns,
        before_ns=step.before_ns,
        forward_ns=step.forward_ns,
        backward_ns=step.backward_ns,
        optimizer_ns=step.optimizer_ns,
        unexplained_ns=model.unexplained_ns,
        units_per_rank=units_per_step(result) / cluster.num_ranks,
        contention=model.contention,
        contention_measured=contention_measured,
    )


def measured_step_ns(results: Sequence[TrialResult], candidate: Candidate) -> float:
    """Return the geometric mean of the step time over all runs of a configuration, epoch restarts included."""
    starts = [r for r in results if r.ok and r.candidate == candidate]
    logs = [math.log(units_per_step(result) / units_per_s(result)) for result in starts]
    return math.exp(statistics.fmean(logs)) * 1e9


def units_per_step(result: TrialResult) -> float:
    """Return the samples or tokens of one step over all ranks."""
    windows = result.clean_windows
    return sum(window.num_units for window in windows) / sum(window.num_steps for window in windows)


def _contention(
    environment: Environment, results: Sequence[TrialResult], given: float | None, assumptions: list[str]
) -> tuple[float, bool]:
    if given is not None:
        if not 0 <= given < 1:
            raise ChoiceError(
                f"--contention must be in [0, 1), got {given:g}: give the share of its speed that compute loses "
                "during communication"
            )
        assumptions.append(f"compute loses {given:.0%} of its speed while communication runs, as given")
        return given, False
    found = measured_contention(results) if environment.num_ranks > 1 else None
    if found is not None:
        return found, True
    default = default_contention(environment.hardware.device_kind)
    assumptions.append(
        (
            f"compute loses {default:.0%} of its speed while communication runs: assumed, because the study has not "
            "measured it"
        )
        + (" (0.5 and 0.7 were seen on H200)" if default else "")
    )
    return default, False


def _with_sockets(
    environment: Environment, sockets: int, workload: WorkloadFacts, assumptions: list[str]
) -> Environment:
    """Return the environment with its links adjusted to the configuration's number of sockets."""
    if environment.topology is None:
        return environment
    topology = with_sockets(environment.topology, sockets, exchange_of(complete_choices(BASELINE, workload)).sockets)
    if topology != environment.topology:
        assumptions.append(
            f"the throughput of {sockets} sockets per connection between hosts is taken from other networks: this "
            "study's links were measured with today's number of sockets"
        )
    return structs.replace(environment, topology=topology)


def _own_cluster(environment: Environment, inside: Link | None) -> Cluster:
    """Return the cluster of ranks and links on which the study ran."""
    topology, ranks, hosts = environment.topology, environment.num_ranks, environment.num_hosts
    hosts = min(hosts, ranks)
    if ranks % hosts:
        raise ChoiceError(
            f"the study ran {ranks} ranks on {hosts} hosts: a prediction requires the same number of ranks on every "
            "host"
        )
    measured_inside, between = (topology.inside, topology.between) if topology is not None else (None, None)
    if hosts > 1 and between is None:
        raise ChoiceError(
            f"the study ran on {hosts} hosts but did not measure the link between them: use a study that ran on one "
            "host"
        )
    return Cluster(num_hosts=hosts, devices_per_host=ranks // hosts, inside=measured_inside or inside, between=between)
