"""Prediction of a study's step time on other hosts, from the user's question to the answer, for the `predict` command
and the scaling page.
"""

from __future__ import annotations

from dataclasses import dataclass

from steptune.dashboards.starts import leading_candidate
from steptune.service.comparing import trial_in
from steptune.service.quantities import parse_bandwidth, parse_latency_ns
from steptune.tuner.errors import ChoiceError
from steptune.tuner.prediction.basis import basis_of, why_not_predicted
from steptune.tuner.prediction.cluster import Cluster
from steptune.tuner.prediction.extrapolate import MAX_HOSTS, MAX_RANKS, checks_of, extrapolate
from steptune.tuner.prediction.forecast import Extrapolation
from steptune.tuner.prediction.links import between_link, inside_link
from steptune.tuner.protocols import StudyStore
from steptune.tuner.records import Study
from steptune.tuner.strategies.combine import complete_choices


@dataclass(frozen=True, kw_only=True)
class Question:
    """A user's question: on which cluster a step is to be predicted, and from which trial.

    Attributes:
        hosts: Number of hosts.
        devices: Devices on each host; None for as many as the study has ranks on a host.
        network: Bandwidth of a host's network, as "25gbps"; empty where the study has measured it.
        latency: Latency of a message between hosts, as "20us".
        inside: Bandwidth from a device to its neighbour, as "400GBps"; empty where the study has measured it.
        which: The trial to predict from:  "best", "baseline", "recommended" or a number.
        contention: Share of its speed that compute loses to communication, where it is known.
    """

    hosts: int = 1
    devices: int | None = None
    network: str = ""
    latency: str = ""
    inside: str = ""
    which: str = "best"
    contention: float | None = None


def predicted(store: StudyStore, study: Study, question: Question, against: Study | None = None) -> Extrapolation:
    """Predict a study's step on the cluster in question.

    Args:
        against: Another study of the workload, with whose measurements the prediction is compared as well.

    Raises:
        ChoiceError: The cluster cannot be read, or lacks what has not been measured.
        StoreError: The study has nothing to begin with.
    """
    trials = store.trials(study.study_id)
    topology = study.environment.topology if study.environment is not None else None
    inside, assumed = inside_link(topology, parse_bandwidth(question.inside) if question.inside else None)
    which, assumed_start = _start(store, study, question.which)
    trial = trial_in(store, study, which)
    basis = basis_of(study, trials, trial, inside=inside, contention=question.contention)
    between, assumed_between = between_link(
        basis.environment.topology,
        parse_bandwidth(question.network) if question.network else None,
        parse_latency_ns(question.latency) if question.latency else None,
    )
    devices = question.devices if question.devices is not None else basis.cluster.devices_per_host
    if question.hosts > MAX_HOSTS or question.hosts * devices > MAX_RANKS:
        raise ChoiceError(
            f"a prediction covers at most {MAX_HOSTS} hosts and {MAX_RANKS} devices, got {question.hosts} hosts "
            f"with {devices} devices each"
        )
    cluster = Cluster(num_hosts=question.hosts, devices_per_host=devices, inside=inside, between=between)
    checks = checks_of(basis, study, trials, basis.cluster)
    if against is not None:
        theirs = _cluster_of(against, cluster)
        checks += checks_of(basis, against, store.trials(against.study_id), theirs)
    return extrapolate(study.study_id, basis, cluster, checks, assumed=(*assumed_start, *assumed, *assumed_between))


def _start(store: StudyStore, study: Study, which: str) -> tuple[str, list[str]]:
    """Return the trial on which the prediction is based, and notes for the user. The trial is the baseline if no
    configuration is better, or, with a note, if the best configuration cannot be predicted.
    """
    if which != "best":
        return which, []
    leading = leading_candidate(store, study.study_id)
    if leading is None or study.facts is None:
        return "baseline", []
    reason = why_not_predicted(complete_choices(leading[1], study.facts))
    if not reason:
        return which, []
    return "baseline", [
        f"the prediction starts from today's settings: the best configuration {reason}, which cannot be predicted"
    ]


def _cluster_of(study: Study, given: Cluster) -> Cluster:
    """Return the study's own cluster; links that the study has not measured are taken from the given cluster."""
    environment = study.environment
    if environment is None:
        raise ChoiceError(
            f"study {study.study_id} has not begun, so it has no trial to compare with: name another study"
        )
    topology, hosts = environment.topology, min(environment.num_hosts, environment.num_ranks)
    inside = topology.inside if topology is not None else None
    between = topology.between if topology is not None else None
    return Cluster(
        num_hosts=hosts,
        devices_per_host=environment.num_ranks // hosts,
        inside=inside or given.inside,
        between=between or given.between,
    )
