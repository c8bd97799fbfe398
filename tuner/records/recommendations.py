"""The answer of a study: what to change, what that gains, and what is known about everything else."""

from __future__ import annotations

from enum import StrEnum

from steptune.tuner.records.base import SCHEMA_VERSION, Record
from steptune.tuner.records.choices import Candidate, Choice, Numerics, Scalar
from steptune.tuner.records.decisions import Decision
from steptune.tuner.records.guard import GuardVerdict
from steptune.tuner.records.hardware import HardwareProfile
from steptune.tuner.records.workload_facts import SampleUnit, ScriptFacts


class Verdict(StrEnum):
    """The claim of a recommendation.

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
        low: Its lower end.
        high: Its upper end.
        level: The probability.
    """

    low: float
    high: float
    level: float = 0.95


class Gain(Record):
    """Rate of a confirmed candidate over the baseline's; 1.0 is no gain.

    Attributes:
        ratio: The estimate.
        num_blocks: Paired comparisons behind it.
        num_finalists: Candidates that were compared at the end.
    """

    ratio: float
    interval: Interval
    """Confidence interval of the ratio, simultaneous over the finalists."""
    prediction: Interval
    """Range of the ratio of one more confirmation of the same size, with this probability."""
    num_blocks: int
    num_finalists: int


class Part(Record):
    """One accepted change of the recommendation.

    Attributes:
        strategy: The strategy.
        choice: What it is set to.
        interval: Of `gain`, simultaneous over the parts; None with it.
        bound: The most it was predicted to gain, as a share of the step.
        reason: For people.
        numerics: What it does to the numbers.
        num_blocks: Paired comparisons behind `gain`; 0 where none was made.
    """

    strategy: str
    choice: Choice
    bound: float | None
    reason: str
    numerics: Numerics
    gain: float | None = None
    """Contribution as a ratio of speeds: the answer over the answer without this part, both started anew, in turns.
    None where that was not measured. In older records, whose `num_blocks` is 0, it is an estimate of the search, and is
    not shown. Where a part is the only one, the gain of the answer is its gain."""
    interval: Interval | None = None
    num_blocks: int = 0


class Certificate(Record):
    """Knowledge about everything that was not recommended.

    Attributes:
        not_tried: Each with its reason.
        audits: Pruned choices that were tried all the same.
        audit_violations: Those that gained more than their bound.
        probability_left: That something else makes the step shorter by more than 2 %, when the search ended; None
            where the search says nothing of it.
    """

    remaining_bound: float
    """The most that any untried, legal choice could still gain, as a share of the step."""
    status: str
    """"estimated" until enough pruned choices were audited, then "audited"."""
    noise: float
    """Smallest gain that this study could tell from none."""
    ended: str
    """"no bound above noise", "budget spent", "trials spent", "interrupted"."""
    not_tried: tuple[Decision, ...] = ()
    audits: int = 0
    audit_violations: int = 0
    probability_left: float | None = None


class Alternative(Record):
    """Another candidate that was measured.

    Attributes:
        candidate: What it changes.
        gain: Rate over the baseline's.
        peak_memory_bytes: Of its hungriest rank.
        numerics: What it does to the numbers.
        guard: What the guard said.
        interval: Of `gain`, by the trials of the search; None in older records.
        confirmed: Its gain by the confirmation, which goes before `gain`; None where it was no finalist.
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
        tuning_s: All of the study.
        num_trials: Trials that were run.
        compile_s: What the recommendation compiles before it is fast.
        payback_tuning_steps: Steps after which the study has paid for itself.
    """

    tuning_s: float
    num_trials: int
    compile_s: float = 0.0
    payback_steps: float | None = None
    """Steps after which the recommendation's compilation has paid for itself."""
    payback_tuning_steps: float | None = None


class ScriptChanges(Record):
    """The changes of a recommendation in a training script, as its trials made them and `steptune.enable` does.

    Attributes:
        script: Findings of the inspection: which script, and which of its objects are changed.
        changes: By name (`scripts/agent/changes.py`).
        words: The same as a user would write it, one for each strategy.
    """

    script: ScriptFacts
    changes: dict[str, Scalar]
    words: tuple[str, ...]


class Recommendation(Record):
    """The answer of a study.

    Attributes:
        study_id: The study.
        created_at: ISO 8601, UTC.
        workload: The reference that the user gave.
        workload_signature: Of similar workloads.
        global_batch: Samples of one step.
        sample_unit: What the throughput counts.
        verdict: What is claimed.
        candidate: What to change.
        choices: The complete choice of every strategy.
        environment_variables: To be set before torch is imported.
        hardware: On which it was measured.
        baseline_units_per_s: Of today's settings.
        units_per_s: Of the recommendation.
        gain: Of the recommendation, with its intervals; None unless it is proven.
        parts: Each accepted change.
        shares_before: Of the step by category, with today's settings.
        shares_after: The same with the recommendation.
        bottleneck_before: What took the most time.
        bottleneck_after: What takes the most time now.
        guard: Whether it is the same training.
        certificate: About what was not recommended.
        cost: Of finding it.
        num_ranks: Processes of the training.
        alternatives: Other good candidates.
        peak_memory_bytes: Of the hungriest rank.
        baseline_peak_memory_bytes: The same with today's settings.
        schema_version: Of this record.
        steptune_version: That made it.
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
    """Gain of the best finalist, where the confirmation proved none faster: it is not recommended."""
    unproven_candidate: Candidate | None = None
    """The finalist of `unproven_gain`; None in older records."""
    search_interval: Interval | None = None
    """Interval of the ratio of the rates, by the trials of the search, where nothing confirmed it."""
    no_time_for: tuple[str, ...] = ()
    """Parts of the study that an interrupt or the budget left out, each as a phrase."""
    needed_budget_s: float | None = None
    """Budget, in seconds, that is expected to suffice for trying and confirming candidates; None where this one did."""
    objective: str = "throughput"
    """The objective: all gains are ratios of it. Rates are units per second whatever it is."""
    objective_before: str = ""
    """Figure of today's settings by it, with its unit; empty for throughput."""
    objective_after: str = ""
    """Figure of the recommendation by it, with its unit; empty for throughput."""
    prospect: str = ""
    """The probable gain of more time, as a sentence; empty where the search did not end by its budget."""
    foreign_cpu_share: float = 0.0
    """Median share of the cores that other programs used while the baseline was measured, or during the confirmation:
    the larger one."""
    of_trial: int | None = None
    """Number of the trial whose configuration a user put in the place of the recommended one; never stored."""
    in_script: ScriptChanges | None = None
    """Its changes in a training script; None for a workload."""
    schema_version: int = SCHEMA_VERSION
    steptune_version: str = ""
