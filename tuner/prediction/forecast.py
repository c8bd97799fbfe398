"""Records of a prediction: its basis, its forecasts and its checks."""

from __future__ import annotations

from steptune.tuner.records import Candidate, Link, Numerics, Record

VALIDATED = (
    "validated with up to 4 ranks and emulated links (benchmarks/prediction.py); larger predictions have not been "
    "compared with measurements"
)


class Forecast(Record):
    """Forecast of one communication method on one number of hosts.

    Attributes:
        family: Family of the communication method; each family is shown as one curve.
        label: Readable name.
        candidate: All changes to today's settings.
        numerics: Effect of the communication method on the numbers.
        num_hosts: Number of hosts.
        num_ranks: Number of ranks on all hosts.
        step_time_ns: Predicted time of a step.
        communication_ns: Time of all its collectives by themselves, compression included.
        exposed_ns: Time that communication adds to the step.
        units_per_s: Rate of all ranks, in samples or tokens per second.
        efficiency: Time of a step without communication, as a share of the predicted step.
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
    """A measured configuration, and its prediction from the basis.

    Attributes:
        sequence: Number of its trial; 0 for a mean over several.
        label: Readable name of its way to communicate.
        measured_ns: Measured time of a step.
        predicted_ns: Predicted time of a step.
        error: Error of the prediction, as a share of the measured time.
    """

    sequence: int
    label: str
    num_ranks: int
    num_hosts: int
    measured_ns: float
    predicted_ns: float
    error: float


class BasisFacts(Record):
    """Measured facts on which a prediction is based.

    Attributes:
        sequence: Number of the trial that was measured and profiled.
        label: Readable name of its configuration.
        num_ranks: Number of ranks on which it ran.
        num_hosts: Number of hosts on which it ran.
        step_time_ns: Measured time of a step.
        before_ns: Time before the forward pass, without communication: waiting for the batch and copying it.
        forward_ns: Time of the forward passes, without communication.
        backward_ns: Time of the backward passes, without communication.
        optimizer_ns: Time of the update, without communication.
        unexplained_ns: Measured time of the step beyond its modelled time; added to every prediction.
        units_per_rank: Samples or tokens that a rank computes in a step.
        contention: Share of its speed that compute loses while communication runs.
        contention_measured: Whether the contention was measured in trials of the study.
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
        study_id: Id of the study that it is based on.
        basis: Measured facts on which it is based.
        num_hosts: Number of hosts asked for.
        devices_per_host: Number of devices on each host.
        inside: Link between devices of a host; None with one.
        between: Link of a host to others; None with one host.
        forecasts: Ways to communicate on these hosts, the fastest first.
        best: The fastest forecast that drops no information; None where none can be run.
        best_lossy: The fastest forecast of all, if it drops information.
        curves: The fastest forecast of every family, by number of hosts.
        refused: Ways that cannot be run, by label, with the reason.
        assumptions: Quantities that were assumed, not measured.
        checks: Further configurations that the study measured, with their predictions.
        median_error: Median absolute error of the checks; None without any.
        validated: Extent to which predictions were compared with measurements.
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
