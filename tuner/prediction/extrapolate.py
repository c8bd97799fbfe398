"""Extrapolation to other communication methods and numbers of hosts, with its error where measurements exist.

Every rank keeps the samples that it computes: the global batch grows with the ranks (weak scaling).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from steptune.tuner.errors import StoreError
from steptune.tuner.prediction.basis import Basis, measured_step_ns, units_per_step
from steptune.tuner.prediction.cluster import Cluster
from steptune.tuner.prediction.forecast import Check, Extrapolation, Forecast
from steptune.tuner.prediction.plans import (
    COMMUNICATION,
    WAYS,
    Family,
    WayToCommunicate,
    candidate_of,
    on_cluster,
    refusal,
)
from steptune.tuner.prediction.timeline import Lane
from steptune.tuner.records import Candidate, Link, Study, Trial, TrialResult
from steptune.tuner.strategies.combine import complete_choices, numerics_of

MAX_HOSTS = 1024
MAX_RANKS = 8192
GRADIENTS = (
    "gradients become ready at a constant rate during the backward pass; in practice the largest tensors may come "
    "first or last",
    "the global batch grows with the ranks: each rank computes as many samples as in the measurement",
    "hosts and devices are identical, and no other job uses the links",
    "collectives use rings in host order and run one at a time, overlapping compute",
)
LINKS = "links reach the given bandwidth and add only their latency; TCP often reaches a lower bandwidth"


def extrapolate(
    study_id: str, basis: Basis, cluster: Cluster, checks: Sequence[Check] = (), *, assumed: Sequence[str] = ()
) -> Extrapolation:
    """Return forecasts of all communication methods on a cluster, and of the fastest method of each family on fewer
    hosts.

    Args:
        assumed: Assumptions about the cluster.
    """
    forecasts: list[Forecast] = []
    refused: dict[str, str] = {}
    curves: list[Forecast] = []
    for num_hosts in host_counts(cluster.num_hosts):
        here = replace(cluster, num_hosts=num_hosts)
        found, not_possible = _forecasts(basis, here)
        for family in Family:
            of_family = [forecast for forecast in found if forecast.family == family]
            curves += sorted(of_family, key=_step_time)[:1]
        if num_hosts == cluster.num_hosts:
            forecasts, refused = sorted(found, key=_step_time), not_possible
    without_loss = [f for f in forecasts if not f.numerics.needs_consent]
    best = without_loss[0] if without_loss else None
    fastest = forecasts[0] if forecasts else None
    return Extrapolation(
        study_id=study_id,
        basis=basis.facts,
        num_hosts=cluster.num_hosts,
        devices_per_host=cluster.devices_per_host,
        inside=cluster.inside,
        between=cluster.between,
        forecasts=tuple(forecasts),
        best=best,
        best_lossy=fastest if fastest != best else None,
        curves=tuple(curves),
        refused=refused,
        assumptions=(*basis.assumptions, *assumed, *GRADIENTS, *_about_links(cluster), *_about_compressing(basis)),
        checks=tuple(checks),
        median_error=statistics.median(abs(check.error) for check in checks) if checks else None,
    )


def host_counts(num_hosts: int) -> list[int]:
    """Return the powers of two below a number of hosts, and that number."""
    counts = [1 << power for power in range(num_hosts.bit_length()) if 1 << power < num_hosts]
    return [*counts, num_hosts]


def _step_time(forecast: Forecast) -> float:
    return forecast.step_time_ns


def _forecasts(basis: Basis, cluster: Cluster) -> tuple[list[Forecast], dict[str, str]]:
    """Return forecasts of the communication methods that can be run, and the reasons why the other methods cannot."""
    environment = on_cluster(basis.environment, cluster.num_ranks, cluster.num_hosts)
    found: list[Forecast] = []
    refused: dict[str, str] = {}
    for way in WAYS:
        candidate = candidate_of(way, basis.candidate, basis.workload)
        reason = refusal(candidate, environment, basis.workload)
        if reason is None:
            found.append(_forecast(basis, way, candidate, cluster))
        else:
            refused[way.label] = reason
    return found, refused


def _forecast(basis: Basis, way: WayToCommunicate, candidate: Candidate, cluster: Cluster) -> Forecast:
    model = basis.model
    timeline = model.timeline(basis.choices(candidate), cluster)
    step_ns = timeline.step_ns + model.unexplained_ns
    communicates = Candidate(choices={n: c for n, c in candidate.choices.items() if n in COMMUNICATION})
    return Forecast(
        family=way.family.value,
        label=way.label,
        candidate=candidate,
        numerics=numerics_of(communicates, basis.workload),
        num_hosts=cluster.num_hosts,
        num_ranks=cluster.num_ranks,
        step_time_ns=step_ns,
        communication_ns=timeline.work_ns[Lane.COMMUNICATION],
        exposed_ns=timeline.exposed_ns,
        units_per_s=basis.facts.units_per_rank * cluster.num_ranks / step_ns * 1e9,
        efficiency=model.alone_ns / step_ns,
    )


# --- compared with measurements -------------------------------------------------------------------


def checks_of(basis: Basis, study: Study, trials: Sequence[Trial], cluster: Cluster) -> list[Check]:
    """Compare predictions with all measured configurations of a study that differ from the basis only in communication.

    Args:
        study: The basis's own study, or another of the same workload.
        cluster: Ranks and links of that study.

    Raises:
        StoreError: The other study is of another workload, or its ranks compute other batches.
    """
    if study.facts is None:
        return []
    if study.facts.model != basis.workload.model:
        raise StoreError(
            f"study {study.study_id} has a different model, so its steps cannot be compared with a prediction"
        )
    results = [t.result for t in trials if t.result is not None]
    per_rank = {round(units_per_step(r) / cluster.num_ranks / basis.facts.units_per_rank, 2) for r in results if r.ok}
    for factor in sorted(per_rank - {1.0}):
        raise StoreError(
            f"a rank of study {study.study_id} computes {factor:g} times as many samples in a step as a rank of the "
            "basis, but a prediction requires equal numbers"
        )
    sequences = {t.result.candidate.key: t.sequence for t in reversed(trials) if t.result is not None}
    found = []
    for candidate in _distinct(results):
        if not _comparable(basis, candidate, cluster):
            continue
        choices = complete_choices(candidate, study.facts)
        measured_ns = measured_step_ns(results, candidate)
        predicted_ns = basis.model.step_ns(choices, cluster)
        found.append(
            Check(
                sequence=sequences[candidate.key],
                label=candidate.label,
                num_ranks=cluster.num_ranks,
                num_hosts=cluster.num_hosts,
                measured_ns=measured_ns,
                predicted_ns=predicted_ns,
                error=predicted_ns / measured_ns - 1,
            )
        )
    return found


def _distinct(results: Iterable[TrialResult]) -> list[Candidate]:
    return list({r.candidate.key: r.candidate for r in results if r.ok}.values())


def _comparable(basis: Basis, candidate: Candidate, cluster: Cluster) -> bool:
    """Say whether a candidate differs from the basis only in how its ranks communicate; False for the basis itself on
    the cluster where it was measured.
    """
    rest = [{n: c for n, c in one.choices.items() if n not in COMMUNICATION} for one in (candidate, basis.candidate)]
    return rest[0] == rest[1] and not (candidate == basis.candidate and cluster == basis.cluster)


# --- what was assumed -----------------------------------------------------------------------------


def _about_links(cluster: Cluster) -> list[str]:
    links: Mapping[str, Link | None] = {"inside": cluster.inside, "between": cluster.between}
    given = [link for link in links.values() if link is not None and not link.timings]
    return [LINKS] if given else []


def _about_compressing(basis: Basis) -> list[str]:
    if not basis.environment.calibration.copy_bytes_per_s:
        return [
            (
                "copying gradients is assumed to take no time, because the bandwidth of the device's memory was not "
                "measured"
            )
        ]
    return ["the time of compression is estimated from the bytes and operators of each method, not measured"]
