"""Real trials of a small workload: what is measured, in which order, and what is reported of it."""

import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from trial_builders import QUICK, THREE_THREADS, Prepared, prepare, reference

from steptune.tuner.protocols import Progress
from steptune.tuner.records import BASELINE, Candidate, Phase
from steptune.tuner.trace_records import Lane, Timeline, TraceAnalysis
from steptune.tuner.trials.capture import WARM_UP_STEPS

WORKERS = Candidate(choices={"data_loading": {"num_workers": 2}})
ROUNDS = QUICK.min_rounds

pytestmark = pytest.mark.xdist_group("trials")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    prepared = prepare(reference("recording", "Recording"), tmp_path_factory.mktemp("study"))
    yield prepared
    prepared.runner.close()


@pytest.fixture
def steps(study: Prepared) -> Path:
    """An empty folder of steps."""
    folder = study.directory / "data"
    for path in folder.glob("*.steps"):
        path.unlink()
    return folder


def timeline(folder: Path) -> list[tuple[int, str, bool]]:
    """Every step of every process in the order of time: when, who, profiled."""
    found = []
    for path in folder.glob("*.steps"):
        for line in path.read_text().splitlines():
            at, watched = line.split()
            found.append((int(at), path.stem, watched == "1"))
    return sorted(found)


class TestOneTrial:
    def test_windows_are_unprofiled_and_come_before_the_profile(self, study: Prepared, steps: Path) -> None:
        (result,) = study.run(study.spec())
        assert result.ok, result.failure
        seen = [watched for _, _, watched in timeline(steps)]
        assert any(seen)
        first = seen.index(True)
        measured = sum(window.num_steps for window in result.windows)
        assert all(seen[first:]), "after the profile nothing is run"
        assert result.startup is not None
        assert result.guard is not None
        # Guard, warm-up, windows, and the profiler's own warm-up step, which it may watch already.
        before = result.guard.num_steps + result.startup.warm_up_steps + measured
        assert before <= first <= before + WARM_UP_STEPS

    def test_the_breakdown_sums_to_the_step_and_to_what_was_measured(self, study: Prepared) -> None:
        (result,) = study.run(study.spec())
        (breakdown,) = result.breakdowns
        assert sum(breakdown.categories.values()) == breakdown.step_time_ns
        assert min(breakdown.categories.values()) >= 0
        clean = result.clean_windows
        mean_ns = sum(w.duration_ns for w in clean) // sum(w.num_steps for w in clean)
        assert breakdown.unprofiled_step_time_ns == pytest.approx(mean_ns, rel=0.01)
        assert breakdown.quality.overhead_ratio > 0
        folder = study.directory / "trials" / result.trial_id
        assert not list(folder.glob("*.trace.json")), "the trace was not to be kept"

    def test_what_the_profile_shows_is_kept_without_the_trace(self, study: Prepared) -> None:
        """For tables and pages, which never read a trace."""
        (result,) = study.run(study.spec())
        (breakdown,) = result.breakdowns
        timelines = msgspec.json.decode(
            (study.directory / "trials" / result.trial_id / "timelines.json").read_bytes(), type=list[Timeline]
        )
        (timeline,) = timelines
        assert timeline.step_boundaries_ns[-1] - timeline.step_boundaries_ns[0] == breakdown.step_time_ns
        together = Counter[str]()
        for bucket in timeline.time_ns:
            together.update(bucket)
        assert dict(together) == {name: ns for name, ns in breakdown.categories.items() if ns}
        assert result.profile is not None
        kept = (study.directory / "trials" / result.trial_id / "analysis.json").read_bytes()
        (rank,) = msgspec.json.decode(kept, type=TraceAnalysis).ranks
        (other,) = rank.breakdowns
        assert other.categories == breakdown.categories
        assert rank.lanes == ()
        lanes = (study.directory / "trials" / result.trial_id / "lanes.json").read_bytes()
        assert {lane.kind for lane in msgspec.json.decode(lanes, type=list[Lane])} >= {"device"}
        assert any(operator.shapes and operator.source for operator in rank.operators)
        assert any(module.forward_ns > 0 and module.backward_ns > 0 for module in rank.modules)
        (memory,) = rank.memory
        assert memory.device == "cpu"
        assert memory.peak_allocated_bytes == max(allocated for _, allocated, _ in memory.timeline) > 0
        assert all(window.input is not None for window in result.windows)

    def test_a_trace_is_kept_on_demand(self, study: Prepared) -> None:
        (result,) = study.run(study.spec(keep_trace=True))
        assert (study.directory / "trials" / result.trial_id / "rank0.trace.json").stat().st_size > 0

    def test_every_phase_and_the_startup_are_accounted_for(self, study: Prepared) -> None:
        (result,) = study.run(study.spec())
        assert set(result.phases_ns) == {phase.value for phase in Phase}
        assert min(result.phases_ns.values()) > 0
        startup = result.startup
        assert startup is not None
        assert 0 < startup.user_code_ns < startup.build_ns <= startup.first_step_ns
        assert startup.warm_up_ns > 0
        assert startup.warm_up_steps > 0
        assert startup.compile_ns == 0, "nothing was compiled"

    def test_the_guard_finds_the_baseline_to_be_itself(self, study: Prepared) -> None:
        (result,) = study.run(study.spec(profile=False, checks_loader=True))
        assert result.guard is not None
        assert result.guard.passed
        assert result.guard.losses == result.guard.reference_losses
        assert {check.kind for check in result.guard.checks} == {"pointwise", "update", "gradient", "state", "loader"}

    def test_effects_and_memory_are_reported(self, study: Prepared) -> None:
        (result,) = study.run(study.spec(WORKERS, guard=False))
        effects = {effect.strategy: effect for effect in result.effects}
        assert effects["data_loading"].took, effects["data_loading"].detail
        assert result.peak_memory_bytes > 0
        assert result.epoch_restart_ns is not None
        assert result.steps_per_epoch == 256 // 8

    def test_variables_that_libraries_read_at_load_get_a_fresh_interpreter(self, study: Prepared) -> None:
        bound = Candidate(choices={"cpu_threads": {"bind": "close"}})
        (result,) = study.run(study.spec(bound, guard=False))
        assert result.ok, result.failure
        assert result.interpreter == "fresh"
        assert {e.strategy: e.took for e in result.effects}["cpu_threads"]

    def test_the_same_trial_twice_starts_from_the_same_state(self, study: Prepared) -> None:
        results = [study.run(study.spec(profile=False))[0] for _ in range(2)]
        assert results[0].guard.losses == results[1].guard.losses

    def test_progress_is_told_phase_by_phase(self, study: Prepared) -> None:
        heard: list[Progress] = []
        spec = study.spec()
        study.run(spec, listener=heard.append)
        assert {progress.trial_id for progress in heard} == {spec.trial_id}
        texts = [progress.text for progress in heard]
        assert [texts[0], texts[-1]] == ["starting", "profiling"]
        assert texts == ["starting", "build", "guard", "warm up", "window 1", "window 2", "profiling"]


class TestGroup:
    def test_trials_take_turns_and_never_run_at_the_same_time(self, study: Prepared, steps: Path) -> None:
        """Seen from the steps themselves: who ran changes only where a turn ends."""
        results = study.run(*(study.spec(candidate) for candidate in (BASELINE, THREE_THREADS, WORKERS)))
        assert [result.failure for result in results] == [None] * 3
        runs = 1 + sum(a != b for (_, a, _), (_, b, _) in pairwise(timeline(steps)))
        starts = windows = profiles = len(results)
        assert runs <= starts + ROUNDS * windows + profiles

    def test_windows_of_a_round_begin_at_the_same_batch(self, study: Prepared) -> None:
        results = study.run(study.spec(guard=False, profile=False), study.spec(WORKERS, guard=False, profile=False))
        for number in range(ROUNDS):
            first, second = (result.windows[number] for result in results)
            assert first.round == second.round == number
            assert first.position == second.position
        assert len({result.group for result in results}) == 1
        positions = [window.position for window in results[0].windows]
        assert len(set(positions)) == len(positions), "each round has other samples"

    def test_a_profile_never_overlaps_a_window_of_another_trial(self, study: Prepared, steps: Path) -> None:
        study.run(study.spec(guard=False), study.spec(THREE_THREADS, guard=False))
        seen = timeline(steps)
        first = next(number for number, (_, _, watched) in enumerate(seen) if watched)
        unwatched = [who for _, who, watched in seen[first:] if not watched]
        assert len(unwatched) <= WARM_UP_STEPS, "only the other profile's own warm-up"

    def test_time_is_counted_for_the_one_whose_turn_it_is(self, study: Prepared) -> None:
        """Waiting is nobody's: the phases of all trials together take no longer than the group."""
        began = time.monotonic_ns()
        results = study.run(study.spec(guard=False), study.spec(WORKERS, guard=False), study.spec(guard=False))
        assert sum(result.duration_ns for result in results) <= time.monotonic_ns() - began

    def test_one_that_dies_does_not_take_the_others_along(self, study: Prepared) -> None:
        misdeed = reference("misbehaving", "Misbehaving", deed="segfault", at="step")
        specs = [
            study.spec(guard=False, profile=False),
            study.spec(THREE_THREADS, workload=misdeed, guard=False, profile=False),
            study.spec(WORKERS, guard=False, profile=False),
        ]
        first, dead, last = study.run(*specs)
        assert dead.failure is not None
        assert first.ok
        assert last.ok


class TestSpawned:
    """Where forking a process that has torch loaded is not safe, ranks get fresh interpreters."""

    def test_a_trial_is_the_same(self, tmp_path: Path) -> None:
        prepared = prepare(reference("regression", "Regression"), tmp_path, start_method="spawn")
        try:
            (result,) = prepared.run(prepared.spec(WORKERS, checks_loader=True))
        finally:
            prepared.runner.close()
        assert result.failure is None, result.failure
        assert result.ok
        assert result.guard.losses == result.guard.reference_losses
        assert sum(result.breakdowns[0].categories.values()) == result.breakdowns[0].step_time_ns
        assert set(result.phases_ns) == {phase.value for phase in Phase}
