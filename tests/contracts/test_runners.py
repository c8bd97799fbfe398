"""Promises of every `TrialRunner`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from host_agents import two_agents
from ray_clusters import ray_cluster, reserved_by_ray
from trial_builders import QUICK, THREE_THREADS, prepare, reference

from steptune.tuner.protocols import Progress, TrialRunner
from steptune.tuner.records import BASELINE, Candidate, FailureKind, Phase, Purpose, TrialSpec, new_id
from steptune.tuner.trials.fake import WALL, FakeRunner

pytestmark = pytest.mark.xdist_group("runners")

MakeSpec = Callable[[Candidate], TrialSpec]


class Case:
    """A runner, how to ask it for a trial, and a candidate that fails on it."""

    def __init__(self, runner: TrialRunner, spec: MakeSpec, good: Candidate, bad: Candidate) -> None:
        self.runner = runner
        self.spec = spec
        self.good = good
        self.bad = bad
        self.heard: list[Progress] = []

    def run(self, *candidates: Candidate, group: str = "group"):
        purposes = [Purpose.BASELINE, *[Purpose.EXPLORE] * len(candidates)][: len(candidates)]
        specs = [self.spec(candidate) for candidate in candidates]
        return specs, self.runner.run(specs, purposes, QUICK, group, self.heard.append)


def fake_spec(candidate: Candidate) -> TrialSpec:
    return TrialSpec(trial_id=new_id(), workload="fake:surface", candidate=candidate, choices={}, study_directory="")


@pytest.fixture(scope="module", params=["fake", "local", "hosts", "ray"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    if request.param == "fake":
        out_of_memory = Candidate(choices={"loader": {"level": 2}, "cache": {"level": 1}})
        yield Case(FakeRunner(WALL), fake_spec, Candidate(choices={"fusion": {"level": 1}}), out_of_memory)
        return
    workload = reference("misbehaving", "Misbehaving", deed="out_of_memory")
    directory = tmp_path_factory.mktemp("study")
    good = Candidate(choices={"optimizer_implementation": {"implementation": "fused"}})
    with ExitStack() as stack:
        options: dict[str, Any] = {"memory_limit_bytes": 1 << 30}
        if request.param == "hosts":
            options |= {"num_ranks": 2, "hosts": stack.enter_context(two_agents(workload, directory)).group}
            directory = directory / "first"
        if request.param == "ray":
            directory = directory / "first"
            cluster = stack.enter_context(ray_cluster(1, 1))
            group = stack.enter_context(reserved_by_ray(cluster, workload, directory, num_ranks=2, num_hosts=2))
            options |= {"num_ranks": 2, "hosts": group}
        prepared = prepare(workload, directory, **options)
        yield Case(prepared.runner, prepared.spec, good, THREE_THREADS)
        prepared.runner.close()


class TestRunner:
    def test_results_are_those_of_the_specs_in_their_order(self, case: Case) -> None:
        specs, results = case.run(BASELINE, case.good, case.bad, group="three")
        assert [r.trial_id for r in results] == [s.trial_id for s in specs]
        assert [r.candidate for r in results] == [s.candidate for s in specs]
        assert [r.purpose for r in results] == [Purpose.BASELINE, Purpose.EXPLORE, Purpose.EXPLORE]
        assert {r.group for r in results} == {"three"}

    def test_a_measured_trial_has_windows_memory_and_a_breakdown_that_sums(self, case: Case) -> None:
        _, (result,) = case.run(BASELINE)
        assert result.ok
        assert result.failure is None
        assert result.clean_windows
        assert all(window.duration_ns > 0 and window.num_units > 0 for window in result.windows)
        assert result.peak_memory_bytes > 0
        assert result.startup is not None
        assert result.guard is not None
        assert result.guard.passed
        (breakdown,) = result.breakdowns
        assert sum(breakdown.categories.values()) == breakdown.step_time_ns

    def test_phases_are_named_and_their_time_is_counted(self, case: Case) -> None:
        _, (result,) = case.run(BASELINE)
        assert result.phases_ns.keys() <= {phase.value for phase in Phase}
        assert result.phases_ns[Phase.MEASURE] > 0
        assert result.duration_ns == sum(result.phases_ns.values())

    def test_a_failure_is_a_record_and_the_next_trial_runs(self, case: Case) -> None:
        _, (failed,) = case.run(case.bad)
        assert failed.failure is not None
        assert failed.failure.kind is FailureKind.OUT_OF_MEMORY
        assert failed.failure.message
        assert not failed.ok
        _, (result,) = case.run(BASELINE)
        assert result.ok

    def test_a_failure_in_a_group_leaves_the_others_their_results(self, case: Case) -> None:
        _, (first, failed, last) = case.run(BASELINE, case.bad, case.good)
        assert failed.failure is not None
        assert first.ok
        assert last.ok

    def test_progress_names_trials_that_were_asked_for(self, case: Case) -> None:
        case.heard.clear()
        specs, _ = case.run(BASELINE, case.good)
        assert {progress.trial_id for progress in case.heard} <= {spec.trial_id for spec in specs}

    def test_what_fits_together_is_decided_by_the_sum(self, case: Case) -> None:
        assert not case.runner.fits_together([1 << 60, 1 << 60])


class TestClosing:
    def test_closing_twice_is_closing_once_and_a_closed_runner_starts_again_when_asked(self, case: Case) -> None:
        """A study can go on after an interrupt in the same process."""
        case.runner.close()
        case.runner.close()
        _, (result,) = case.run(BASELINE)
        assert result.ok


class TestInterrupting:
    def test_an_interrupt_ends_the_running_trial_and_leaves_the_runner_usable(self, case: Case) -> None:
        """Ctrl-C while a trial is running reaches the caller; nothing of the trial is left."""
        if isinstance(case.runner, FakeRunner):
            pytest.skip("no time passes in a fake trial, so nothing can interrupt it")

        def interrupt(progress: Progress) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            case.runner.run([case.spec(BASELINE)], [Purpose.BASELINE], QUICK, "group", interrupt)
        _, (result,) = case.run(BASELINE)
        assert result.ok
