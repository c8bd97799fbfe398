"""Specification of a candidate's trial: choices, guard settings, deadlines, windows."""

from __future__ import annotations

from steptune.tuner.guard.curves import Protocol
from steptune.tuner.network.collective_costs import ALL_REDUCE, ring_ns
from steptune.tuner.records import (
    Candidate,
    Deadlines,
    MeasureSettings,
    Phase,
    Purpose,
    Study,
    Topology,
    TrialResult,
    TrialSpec,
    WorkloadFacts,
    new_id,
)
from steptune.tuner.search.space import Space
from steptune.tuner.strategies.combine import environment_variables
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.dataset_cache.choice import DatasetCacheSetting
from steptune.tuner.strategies.device_prefetch.choice import DevicePrefetchSetting
from steptune.tuner.strategies.knobs import is_knob
from steptune.tuner.trials.guard_protocol import NUM_REFERENCE_DRAWS
from steptune.tuner.trials.loader_check import NUM_CONTENT_BATCHES
from steptune.tuner.trials.reference import NUM_HORIZON_RUNS, NUM_SEEDS

PATIENCE = 20
"""Maximum duration of a phase, as a multiple of the baseline's."""
MIN_DEADLINE_S = 30.0
MIN_STARTING_S = 5.0
"""Minimum seconds granted to a trial until its first window, however little time is left."""
FIRST_DEADLINE_S = 180.0
COMPILE_PATIENCE = 4
LOADING = frozenset(kind.strategy for kind in (DataLoadingSetting, DatasetCacheSetting, DevicePrefetchSetting))
BATCHES_HASHED = 3 * NUM_CONTENT_BATCHES
"""Number of batch loads in a check of the loader: each batch is loaded once by the candidate's loader, and twice from
the dataset alone.
"""
LONGEST_HASHING_S = 1.0
MAX_POINTWISE, MIN_POINTWISE = 4, 2
MAX_AUDITS = 2
MAX_DISTURBED = 2
NUM_CURVE = 8
NUM_HORIZON, MIN_HORIZON = 60, 16
HORIZON_TIMES = 2
"""Maximum time of the longer training runs by which lossy candidates are judged (the horizon), as a multiple of the
time for the rest of the reference.
"""


class SpecMaker:
    """Maker of one study's trial specs."""

    def __init__(self, study: Study, space: Space, reference: Candidate) -> None:
        self._study = study
        self._space = space
        self._reference = reference
        self._phases_s: dict[str, float] = {}

    def learn(self, result: TrialResult) -> None:
        """Record the durations of the reference's phases, from which deadlines are computed."""
        for name, duration in result.phases_ns.items():
            self._phases_s[name] = max(self._phases_s.get(name, 0.0), duration / 1e9)

    def spec(self, candidate: Candidate, purpose: Purpose, replicate: int, longest_s: float | None = None) -> TrialSpec:
        """Make the spec of a trial.

        Args:
            longest_s: Maximum seconds of the trial until its first window.
        """
        space, settings = self._space, self._study.settings
        choices = space.complete(candidate)
        numerics = space.numerics(candidate)
        first = replicate == 0 and purpose in (Purpose.BASELINE, Purpose.EXPLORE, Purpose.AUDIT)
        own = {name for name in candidate.choices if candidate.choices[name] != self._reference.choices.get(name)}
        return TrialSpec(
            trial_id=new_id(),
            workload=self._study.workload,
            candidate=candidate,
            choices=choices,
            study_directory=self._study.directory,
            num_ranks=settings.num_ranks,
            device=space.environment.hardware.device_kind,
            seed=settings.seed,
            guard=first and purpose is not Purpose.BASELINE,  # which is what others are held to
            lossy=numerics.needs_consent,
            unit_roundoff=space.unit_roundoff(candidate),
            checks_loader=any(self._may_change_batches(name) for name in own)
            or (not numerics.needs_consent and self._is_cheap_to_hash()),
            profile=first,
            keep_trace=first,
            environment_variables=environment_variables(choices, space.strategies),
            memory_limit_bytes=settings.memory_limit_bytes,
            deadlines=self._deadlines(candidate, longest_s),
        )

    def _may_change_batches(self, name: str) -> bool:
        """Say whether a strategy's choices promise the same batches but may give others."""
        return name in LOADING or (is_knob(name) and not self._space.strategy(name).numerics({}).needs_consent)

    def _is_cheap_to_hash(self) -> bool:
        """Say whether batches can be checked for every candidate at low cost. Every candidate is worth a check, because
        any may have unknown side effects.
        """
        facts = self._space.workload
        if facts.dataset.sample_ns is None:
            return False
        return BATCHES_HASHED * facts.global_batch * facts.dataset.sample_ns <= LONGEST_HASHING_S * 1e9

    def _deadlines(self, candidate: Candidate, longest_s: float | None) -> Deadlines:
        """Return the deadlines: generous multiples of the reference's durations, and a fixed time for the reference
        itself.
        """
        added = COMPILE_PATIENCE * self._space.trial_cost_s(candidate)
        fixed = self._study.settings.phase_timeout_s
        limits = {}
        for phase in Phase:
            usual = self._phases_s.get(phase.value)
            limit = FIRST_DEADLINE_S if usual is None else max(MIN_DEADLINE_S, PATIENCE * usual)
            limit = fixed if fixed is not None else limit + added
            limits[f"{phase.value}_s"] = limit if longest_s is None else min(limit, max(MIN_DEADLINE_S, longest_s))
        return Deadlines(**limits, starting_s=None if longest_s is None else max(MIN_STARTING_S, longest_s))


def measure_settings(base: MeasureSettings, cap_s: float) -> MeasureSettings:
    """Return the study's window settings with a cap that fits its budget."""
    import msgspec

    return msgspec.structs.replace(base, cap_s=min(base.cap_s, cap_s))


def expected_step_ns(facts: WorkloadFacts, topology: Topology | None) -> float:
    """Return the expected step time of the reference in nanoseconds, before it has run: the step time inspected on one
    device, plus the time to all-reduce all gradients over the measured links without overlap.
    """
    if topology is None:
        return facts.sample_step_ns
    return facts.sample_step_ns + ring_ns(ALL_REDUCE, facts.model.parameter_bytes, topology.num_ranks, topology.whole)


def guard_protocol(
    facts: WorkloadFacts,
    *,
    step_ns: float,
    seconds: float,
    num_roundoffs: int,
    bias_corrections: bool,
    lossy: bool,
    seed: int,
    draws: bool = False,
) -> Protocol:
    """Plan as many guarded steps as the time allows, within limits that keep the check meaningful. If the time does not
    even allow the minimum, the effect of rounding is measured once for each roundoff instead of twice.

    Args:
        draws: Whether masks are drawn at steps from the initial parameters, by the first run alone
            (`trials/reference.py`).
    """
    is_random = facts.randomness != "none"
    step_s = max(1e-3, step_ns / 1e9)
    curves = is_random and not draws  # a second part in each run, and runs over further seeds
    parts = 2 if curves else 1
    affordable = max(0.0, seconds / step_s - (NUM_REFERENCE_DRAWS if is_random and draws else 0))

    def runs(num_disturbed: int) -> int:
        return 2 + num_disturbed * num_roundoffs + bias_corrections + (NUM_SEEDS - 1 if curves else 0)

    num_disturbed = MAX_DISTURBED if parts * MIN_POINTWISE * runs(MAX_DISTURBED) <= affordable else 1
    steps = affordable / runs(num_disturbed) / parts
    num_audits = int(min(MAX_AUDITS, max(0, steps - MIN_POINTWISE)))
    num_pointwise = int(min(MAX_POINTWISE, max(MIN_POINTWISE, steps - num_audits)))
    num_curve = int(min(NUM_CURVE, max(MIN_POINTWISE, steps))) if is_random else 0
    return Protocol(
        num_pointwise=num_pointwise,
        num_audits=num_audits,
        num_curve=num_curve,
        num_horizon=_num_horizon(seconds, step_s, num_pointwise + num_curve) if lossy else 0,
        num_disturbed=num_disturbed,
        randomness=facts.randomness,
        seed=seed,
    )


def _num_horizon(seconds: float, step_s: float, num_before: int) -> int:
    """Return the number of steps of the horizon; they follow the guard's steps in the same run."""
    steps = HORIZON_TIMES * seconds / step_s / NUM_HORIZON_RUNS - num_before
    return int(min(NUM_HORIZON, max(MIN_HORIZON, steps)))
