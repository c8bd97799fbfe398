"""The answer of a study: the changes, their gain, and a certificate about all other configurations."""

from __future__ import annotations

from enum import StrEnum

from steptune.tuner.records.base import SCHEMA_VERSION, Record
from steptune.tuner.records.choices import Candidate, Choice, Numerics, Scalar
from steptune.tuner.records.decisions import Decision
from steptune.tuner.records.guard import GuardVerdict
from steptune.tuner.records.hardware import HardwareProfile
from steptune.tuner.records.workload_facts import SampleUnit, ScriptFacts


class Verdict(StrEnum):
    """Verdict of a recommendation.

    `no_significant_gain`: candidates were judged, and none is proven faster. `unconfirmed`: a faster candidate was
    seen, and there was no time to confirm it. `not_searched`: the study ended before any candidate was judged.
    `inconclusive`: the interval of the gain is wide, or the machine was busy and a gain that is worthwhile could not be
    told from none. `enables_training`: today's settings ran out of memory when they were run alone.
    """

    FASTER = "faster"
    NO_SIGNIFICANT_GAIN = "no_significant_gain"
    ENABLES_TRAINING = "enables_training"
    UNCONFIRMED = "unconfirmed"
    NOT_SEARCHED = "not_searched"
    INCONCLUSIVE = "inconclusive"


class Interval(Record):
    """Range that holds a figure with a stated probability.

    Attributes:
        low: Lower end of the range.
        high: Upper end of the range.
        level: Probability that the range holds the figure.
    """

    low: float
    high: float
    level: float = 0.95


class Gain(Record):
    """Rate of a confirmed candidate divided by the baseline's rate; 1.0 is no gain.

    Attributes:
        ratio: Estimated ratio of the rates.
        num_blocks: Number of paired comparisons that it rests on.
        num_finalists: Number of finalists in the confirmation.
    """

    ratio: float
    interval: Interval
    """Confidence interval of the ratio, simultaneous over the finalists."""
    prediction: Interval
    """Prediction interval: where the ratio would fall in one more confirmation of the same size."""
    num_blocks: int
    num_finalists: int


class Part(Record):
    """One accepted change of the recommendation.

    Attributes:
        strategy: The strategy.
        choice: The choice to which it is set.
        interval: Interval of `gain`, simultaneous over the parts; None where `gain` is None.
        bound: Upper limit predicted for its gain, as a share of the step.
        reason: Reason, in a readable form.
        numerics: Effect on the numbers.
        num_blocks: Number of paired comparisons that `gain` rests on; 0 where none was made.
        together: Other strategies of the answer that cannot run without this one; `gain` is that of all of them.
    """

    strategy: str
    choice: Choice
    bound: float | None
    reason: str
    numerics: Numerics
    gain: float | None = None
    """Contribution of this part: the speed with the whole answer divided by the speed without this part, measured in
    new runs with alternating windows. None where it was not measured. In older records, whose `num_blocks` is 0, it is
    an unconfirmed estimate from the search, and is not shown. If the answer has a single part, it is the gain of the
    whole answer.
    """
    interval: Interval | None = None
    num_blocks: int = 0
    together: tuple[str, ...] = ()


class Certificate(Record):
    """Summary of the knowledge about all configurations that were not recommended.

    Attributes:
        not_tried: Choices that were not tried, each with the reason.
        audits: Number of pruned choices that were run to check their bounds.
        audit_violations: Number of these that gained more than their bound.
        probability_left: Probability, when the search ended, that another candidate shortens the step by more than 2 %;
            None where the search does not estimate it.
    """

    remaining_bound: float
    """Upper limit on what any untried, legal choice could still gain, as a share of the step."""
    status: str
    """Status of the upper limits on gains: "estimated", or "audited" once enough pruned choices were run to check them.
    """
    noise: float
    """Smallest gain that this study could distinguish from zero."""
    ended: str
    """Reason why the search ended: "no bound above noise", "budget spent", "trials spent" or "interrupted"."""
    not_tried: tuple[Decision, ...] = ()
    audits: int = 0
    audit_violations: int = 0
    probability_left: float | None = None


class Alternative(Record):
    """Measured candidate other than the recommended one.

    Attributes:
        candidate: The candidate: changes to today's settings.
        gain: Rate over the baseline's.
        peak_memory_bytes: Peak memory of the rank that uses the most.
        numerics: Effect on the numbers.
        guard: Summary of the guard's verdict.
        interval: Interval of `gain`, from the trials of the search; None in older records.
        confirmed: Gain measured by the confirmation, which takes precedence over `gain`; None unless it was a finalist.
    """

    candidate: Candidate
    gain: float
    peak_memory_bytes: int
    numerics: Numerics
    guard: str
    interval: Interval | None = None
    confirmed: Gain | None = None


class Cost(Record):
    """Cost of finding the recommendation.

    Attributes:
        tuning_s: Time of the whole study.
        num_trials: Number of trials that were run.
        compile_s: Compile time of the recommendation.
        payback_tuning_steps: Number of steps after which the time of the study is recovered.
    """

    tuning_s: float
    num_trials: int
    compile_s: float = 0.0
    payback_steps: float | None = None
    """Number of steps after which the compile time of the recommendation is recovered."""
    payback_tuning_steps: float | None = None


class ScriptChanges(Record):
    """Changes that a recommendation makes to a training script; `steptune.enable` makes them as the trials did.

    Attributes:
        script: Findings of the inspection: which script, and which of its objects are changed.
        changes: Values of the changes, by name (`scripts/agent/changes.py`).
        words: Description of the changes, one for each strategy.
    """

    script: ScriptFacts
    changes: dict[str, Scalar]
    words: tuple[str, ...]


class Recommendation(Record):
    """Recommendation that a study makes, with its gain and its certificate.

    Attributes:
        study_id: Id of the study.
        created_at: Time at which it was made, in ISO 8601, UTC.
        workload: Reference of the workload, as the user wrote it.
        workload_signature: Hash that similar workloads share.
        global_batch: Samples of one step.
        sample_unit: Unit of the throughput.
        verdict: Verdict of the study.
        candidate: Changes to today's settings.
        choices: The complete choice of every strategy.
        environment_variables: Variables to set before torch is imported.
        hardware: Hardware on which it was measured.
        baseline_units_per_s: Rate with today's settings.
        units_per_s: Rate as recommended.
        gain: Gain of the recommendation, with its intervals; None unless it is proven.
        parts: Each accepted change.
        shares_before: Shares of the step by category, with today's settings.
        shares_after: Shares of the step by category, as recommended.
        bottleneck_before: Category that took the most time with today's settings.
        bottleneck_after: Category that takes the most time as recommended.
        guard: Verdict on whether it is the same training.
        certificate: Certificate about what was not recommended.
        cost: Cost of finding it.
        num_ranks: Processes of the training.
        alternatives: Other good candidates.
        peak_memory_bytes: Peak memory of the rank that uses the most.
        baseline_peak_memory_bytes: Peak memory with today's settings.
        schema_version: Version of the record's schema.
        steptune_version: Version of Steptune that made it.
    """

    study_id: str
    created_at: str
    workload: str
    workload_signature: str
    global_batch: int
    sample_unit: SampleUnit
    verdict: Verdict
    candidate: Candidate
    choices: dict[str, Choice]
    environment_variables: dict[str, str]
    hardware: HardwareProfile
    baseline_units_per_s: float
    units_per_s: float
    gain: Gain | None
    parts: tuple[Part, ...]
    shares_before: dict[str, float]
    shares_after: dict[str, float]
    bottleneck_before: str
    bottleneck_after: str
    guard: GuardVerdict | None
    certificate: Certificate
    cost: Cost
    num_ranks: int = 1
    alternatives: tuple[Alternative, ...] = ()
    peak_memory_bytes: int = 0
    baseline_peak_memory_bytes: int = 0
    unproven_gain: Gain | None = None
    """Gain of the best finalist, if the confirmation proved no finalist faster; that finalist is not recommended."""
    unproven_candidate: Candidate | None = None
    """Finalist whose gain is `unproven_gain`; None in older records."""
    search_interval: Interval | None = None
    """Interval of the ratio of the candidate's rate to the baseline's, from the search's trials, if no confirmation was
    made.
    """
    no_time_for: tuple[str, ...] = ()
    """Parts of the study omitted because of an interrupt or the budget, each as a phrase."""
    needed_budget_s: float | None = None
    """Budget, in seconds, expected to suffice for trying and confirming candidates; None if this study's budget
    sufficed.
    """
    objective: str = "throughput"
    """Objective by which all gains are measured, as ratios. Rates are in units per second, whatever the objective."""
    objective_before: str = ""
    """Objective's value with today's settings, with its unit; empty for throughput."""
    objective_after: str = ""
    """Objective's value as recommended, with its unit; empty for throughput."""
    prospect: str = ""
    """Sentence about the probable gain of more time; empty unless the search ended because its budget was spent."""
    foreign_cpu_share: float = 0.0
    """Share of the cores that other programs used: the larger of the median during the baseline's trials and the median
    during the confirmation."""
    of_trial: int | None = None
    """Number of the trial whose configuration a user chose instead of the recommended one; never stored."""
    in_script: ScriptChanges | None = None
    """Changes of the recommendation to a training script; None for a workload."""
    schema_version: int = SCHEMA_VERSION
    steptune_version: str = ""
