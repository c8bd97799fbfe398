"""The records of a prediction."""

from __future__ import annotations

from steptune.tuner.records import Candidate, Link, Numerics, Record

VALIDATED = (
    "validated to 4 ranks and emulated links (benchmarks/prediction.py): beyond that nothing was compared with a "
    "measurement"
)


class Forecast(Record):
    """One way to communicate on one number of hosts.

    Attributes:
        family: Its group, and curve.
        label: For people.
        candidate: All that differs from today's settings.
        numerics: What the way to communicate does to the numbers.
        num_hosts: As many hosts.
        num_ranks: Ranks on all of them.
        step_time_ns: Predicted.
        communication_ns: Of all its collectives by themselves, compressing included.
        exposed_ns: What communicating adds to the step.
        units_per_s: Samples or tokens of all ranks.
        efficiency: Share of the step that a rank would take without communication.
    """

    family: str
    label: str
    candidate: Candidate
    numerics: Numerics
    num_hosts: int
    num_ranks: int
    step_time_ns: float
    communication_ns: float
    exposed_ns: float
    units_per_s: float
    efficiency: float


class Check(Record):
    """A measured configuration, with its prediction from the basis.

    Attributes:
        sequence: Number of its trial; 0 for a mean over several.
        label: How it communicates.
        measured_ns: Its step.
        predicted_ns: The same as predicted.
        error: Of the prediction, as a share of what was measured.
    """

    sequence: int
    label: str
    num_ranks: int
    num_hosts: int
    measured_ns: float
    predicted_ns: float
    error: float


class BasisFacts(Record):
    """Facts that a prediction begins with.

    Attributes:
        sequence: Number of the trial that was measured and profiled.
        label: Its configuration.
        num_ranks: On which it ran.
        num_hosts: That they were on.
        step_time_ns: Measured.
        before_ns: Of a step without communication: waiting for the batch, copying it.
        forward_ns: The same: forward passes.
        backward_ns: The same: backward passes.
        optimizer_ns: The same: the update.
        unexplained_ns: What the measured step has beyond the model of it; every prediction has it too.
        units_per_rank: Samples or tokens that a rank computes in a step.
        contention: Share of its speed that compute loses while communication runs.
        contention_measured: From trials of the study.
    """

    sequence: int
    label: str
    num_ranks: int
    num_hosts: int
    step_time_ns: float
    before_ns: float
    forward_ns: float
    backward_ns: float
    optimizer_ns: float
    unexplained_ns: float
    units_per_rank: float
    contention: float
    contention_measured: bool


class Extrapolation(Record):
    """The answer of `steptune predict`.

    Attributes:
        study_id: The study that it begins with.
        basis: What was measured.
        num_hosts: That were asked for.
        devices_per_host: On each.
        inside: Link between devices of a host; None with one.
        between: Link of a host to others; None with one host.
        forecasts: Ways to communicate on these hosts, the fastest first.
        best: The fastest that drops no information; None where none can be run.
        best_lossy: The fastest of all, where it drops information.
        curves: By number of hosts and family the fastest.
        refused: Ways that cannot be run, by label, with the reason.
        assumptions: What was not measured.
        checks: What the study measured besides, and what is predicted of that.
        median_error: Of the checks, without sign; None without any.
        validated: How far predictions were compared with measurements.
    """

    study_id: str
    basis: BasisFacts
    num_hosts: int
    devices_per_host: int
    inside: Link | None
    between: Link | None
    forecasts: tuple[Forecast, ...]
    best: Forecast | None
    best_lossy: Forecast | None
    curves: tuple[Forecast, ...]
    refused: dict[str, str]
    assumptions: tuple[str, ...]
    checks: tuple[Check, ...]
    median_error: float | None
    validated: str = VALIDATED
