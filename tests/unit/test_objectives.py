"""Objectives: what decides the answer, the confirmation and the words, with every kind of search."""

import math

import pytest
from builders import sample_hardware
from msgspec.structs import replace
from search_builders import RECOMPILING, SMALL, Machine, StudyRun, candidate

from steptune.dashboards.headline import get_headline_info
from steptune.tuner.errors import BaselineError, ChoiceError
from steptune.tuner.estimates import log_ratio, units_per_s
from steptune.tuner.export import exporter_named
from steptune.tuner.objectives import Objective, parse_objective
from steptune.tuner.records import DeviceReading, SampleUnit, Verdict

SEARCHES = ["model", "random"]
HUNGRY_W, USUAL_W = 300.0, 100.0


class Metered(Machine):
    """A device that draws three times the power where products are fast; its driver may not tell."""

    def __init__(self, *arguments, tells=True, **options):
        super().__init__(*arguments, **options)
        self.tells = tells

    def describe(self):
        environment = super().describe()
        devices = tuple(replace(device, kind="cuda") for device in environment.hardware.devices)
        return replace(environment, hardware=replace(environment.hardware, devices=devices))

    def run(self, *arguments):
        return [self._read(result) for result in super().run(*arguments)]

    def _read(self, result):
        hungry = result.candidate.choices.get("products") == {"level": 2}
        reading = DeviceReading(power_w=(HUNGRY_W if hungry else USUAL_W) if self.tells else None)
        return replace(result, windows=tuple(replace(window, device=reading) for window in result.windows))


def what_counts(answer):
    """Without a choice that changes nothing."""
    return answer.candidate.with_choice("update", {})


def studied(objective, search="model", machine=None, **settings):
    run = study_of(machine or Metered(SMALL), objective=objective, search=search, **settings)
    return run, run.run()


def study_of(machine, **settings):
    strategies = machine.surface.strategies
    for strategy in strategies:
        strategy.recompiles = strategy.name in RECOMPILING
    return StudyRun(machine, strategies, **{"max_trials": 14, **settings})


FAST, FRUGAL = candidate(loader=2, products=2), candidate(loader=2)


@pytest.mark.parametrize("search", SEARCHES)
class TestTheAnswer:
    def test_throughput_takes_what_is_fast(self, search):
        assert what_counts(studied("throughput", search)[1]) == FAST

    def test_energy_leaves_out_what_is_fast_and_hungry(self, search):
        _, answer = studied("energy", search)
        assert what_counts(answer) == FRUGAL
        assert answer.verdict is Verdict.FASTER
        assert answer.gain.ratio == pytest.approx(100 / 64, rel=0.04), "four standard errors of two blocks"
        assert answer.gain.prediction.low < 100 / 64 < answer.gain.prediction.high
        assert float(answer.objective_before.removesuffix(" J per sample")) == pytest.approx(10 / 32, rel=0.03)
        assert float(answer.objective_after.removesuffix(" J per sample")) == pytest.approx(6.4 / 32, rel=0.03)

    @pytest.mark.parametrize(("steps", "expected"), [(1_000, FRUGAL), (1_000_000, FAST)])
    def test_a_short_training_is_not_worth_a_long_compilation(self, search, steps, expected):
        machine = Machine(SMALL, compile_s={"products": 60.0})
        _, answer = studied(f"steps:{steps}", search, machine)
        assert what_counts(answer) == expected

    def test_cost_is_that_of_the_fastest(self, search):
        _, answer = studied("cost:3.6", search)
        assert what_counts(answer) == FAST
        assert answer.objective_before.endswith("per million samples")


def test_the_confirmation_compares_by_the_objective():
    """Compilation counts in its ratio, although its own starts find the cache filled."""
    run, answer = studied("steps:10000", machine=Machine(SMALL, compile_s={"products": 60.0}))
    assert what_counts(answer) == FAST
    true_s = 0.048 + 60 / 10_000
    assert answer.gain.ratio == pytest.approx(0.1 / true_s, rel=0.03)
    assert answer.units_per_s / answer.baseline_units_per_s == pytest.approx(100 / 48, rel=0.03), "rates stay rates"
    assert float(answer.objective_before.removesuffix(" min for 10,000 steps")) == pytest.approx(1000 / 60, rel=0.03)
    confirmed = [d for d in run.decisions if d.verdict == "confirmed"]
    assert confirmed[0].measured_gain == pytest.approx(answer.gain.ratio - 1)


@pytest.mark.parametrize("objective", ["energy", "steps:10000"])
def test_what_is_stored_is_what_was_measured(objective):
    run, _ = studied(objective)
    plain, _ = studied("throughput")
    first = [study.trials[0].result.windows for study in (run, plain)]
    assert first[0] == first[1]


def test_what_compiles_less_keeps_a_bound_where_compilation_counts():
    """Today's settings compile for long: the choice that does not is tried though its step is no faster."""
    settled = Objective("steps", 10_000.0)
    run, _ = studied("throughput")
    result = run.trials[0].result
    compiled = replace(result, startup=replace(result.startup, compile_ns=10**12))
    counted = settled.counted(compiled, 10**12)
    assert settled.compile_share(counted) == pytest.approx(0.1 / 0.2, rel=0.05)
    assert Objective().compile_share(compiled) == 0.0


class TestResuming:
    @pytest.mark.parametrize("search", SEARCHES)
    def test_an_interrupted_study_goes_on_under_its_own_objective(self, search):
        straight, _ = studied("energy", search, Metered(SMALL, noise_sd=0.0))
        stopped = study_of(Metered(SMALL, noise_sd=0.0, interrupt_at=4), objective="energy", search=search)
        stopped.run()
        assert what_counts(stopped.run()) == FRUGAL
        assert stopped.story() == straight.story()

    def test_a_confirmed_one_goes_on_with_more_time(self):
        run, first = studied("energy", machine=Metered(SMALL, start_s=1.0), budget_s=25.0)
        assert first.gain is not None
        before = len(run.trials)
        run.store.set_budget(run.study_id, 300.0)
        again = run.run()
        assert (what_counts(again), again.objective) == (FRUGAL, "energy")
        assert again.objective_before.endswith(" J per sample")
        assert len(run.trials) >= before


class TestRefusing:
    @pytest.mark.parametrize(
        "text", ["speed", "steps", "steps:", "steps:0", "steps:1.5", "cost", "cost:free", "cost:-1"]
    )
    def test_what_is_none_is_refused_with_the_way_out(self, text):
        with pytest.raises(ChoiceError, match=r"choose one of throughput, steps:N|write a"):
            parse_objective(text)

    def test_energy_of_a_cpu_is_refused(self):
        cpu = sample_hardware(devices=(replace(sample_hardware().devices[0], kind="cpu"),))
        with pytest.raises(ChoiceError, match="objective energy requires a CUDA device"):
            parse_objective("energy").check(cpu, 1)

    def test_energy_of_several_ranks_is_refused_because_one_device_is_read(self):
        with pytest.raises(ChoiceError, match="got 2: use one rank, or choose throughput"):
            parse_objective("energy").check(sample_hardware(), 2)

    def test_a_driver_that_tells_no_power_is_named(self):
        with pytest.raises(BaselineError, match="the driver does not report the power of the device"):
            studied("energy", machine=Metered(SMALL, tells=False))


class TestCounting:
    def test_energy_pairs_trials_by_their_joules(self):
        run, _ = studied("throughput", machine=Metered(SMALL, noise_sd=0.0))
        results = {trial.candidate.key: trial.result for trial in run.trials if trial.result.ok}
        energy = Objective("energy")
        frugal, fast = (energy.counted(results[c.key], 0) for c in (FRUGAL, FAST))
        assert units_per_s(fast) == pytest.approx(units_per_s(results[FAST.key]) / HUNGRY_W, rel=1e-6)
        paired = log_ratio(replace(fast, group="g"), replace(frugal, group="g"))
        assert math.exp(paired.mean) == pytest.approx(64 / 48 / 3, rel=1e-6)

    def test_a_window_without_a_reading_does_not_count(self):
        run, _ = studied("throughput", machine=Metered(SMALL))
        result = run.trials[0].result
        blind = replace(result, windows=(replace(result.windows[0], device=None), *result.windows[1:]))
        assert len(Objective("energy").counted(blind, 0).clean_windows) == len(result.clean_windows) - 1

    @pytest.mark.parametrize(
        ("text", "rate", "words"),
        [
            ("steps:7200", 100.0, "12 min for 7,200 steps"),
            ("energy", 4.0, "0.25 J per sample"),
            ("cost:3.6", 100.0, "20 per million samples"),
        ],
    )
    def test_figures_have_their_units(self, text, rate, words):
        objective = parse_objective(text)
        assert objective.figure(rate, unit=SampleUnit.SAMPLE, units_per_step=10.0, num_devices=2) == words


class TestWords:
    @pytest.mark.parametrize(
        ("objective", "claim"),
        [
            ("energy", "today's work per joule"),
            ("steps:10000", "over 10,000 steps, including compilation"),
        ],
    )
    def test_pages_and_exports_say_what_was_optimised(self, objective, claim):
        run, answer = studied(objective)
        info = get_headline_info(run.store, run.study_id)
        assert claim in info.title
        assert answer.objective_before in info.sentence
        facts = {fact.name: fact for fact in info.facts}
        assert facts["Optimised"].value == parse_objective(objective).words
        assert claim in exporter_named("yaml").header(answer)

    def test_a_limit_of_memory_is_said(self):
        run, _ = studied("throughput", memory_limit_bytes=8 << 30)
        facts = {fact.name: fact for fact in get_headline_info(run.store, run.study_id).facts}
        assert facts["Optimised"].value == "throughput within 8.00 GiB per rank"

    def test_throughput_without_a_limit_needs_no_word(self):
        run, _ = studied("throughput")
        assert "Optimised" not in {fact.name for fact in get_headline_info(run.store, run.study_id).facts}
