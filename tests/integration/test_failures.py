"""A candidate that crashes, hangs, runs out of memory or worse costs one failed trial, and the next one runs."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from marked import VARIABLE, marked, new_mark, none_left, wait_until
from trial_builders import THREE_THREADS, Prepared, prepare, reference

from steptune.tuner.errors import WorkloadError
from steptune.tuner.records import Candidate, Deadlines, Failure, FailureKind, Phase, TrialResult

WORKERS = Candidate(choices={"data_loading": {"num_workers": 1}})
MEMORY_LIMIT = 1 << 30
MARK = new_mark()
GUARD = {"guard": True, "profile": False}
NO_GUARD = {"guard": False, "profile": False}
PROFILED = {"guard": False, "profile": True}

pytestmark = pytest.mark.xdist_group("failures")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, MARK)
        prepared = prepare(
            reference("misbehaving", "Misbehaving"), tmp_path_factory.mktemp("study"), memory_limit_bytes=MEMORY_LIMIT
        )
    yield prepared
    prepared.runner.close()
    none_left(MARK)


@contextmanager
def closing_runner(workload: str, folder: Path, **options) -> Iterator[Prepared]:
    prepared = prepare(workload, folder / "study", **options)
    try:
        yield prepared
    finally:
        prepared.runner.close()


def run_deed(study: Prepared, deed: str, at: str = "step", candidate: Candidate = THREE_THREADS, **changes):
    spec = study.spec(candidate, workload=reference("misbehaving", "Misbehaving", deed=deed, at=at), **changes)
    (result,) = study.run(spec)
    return result


def failure_of(study: Prepared, result: TrialResult) -> Failure:
    """The failure of a trial, after which the next trial runs."""
    assert not result.ok
    assert study.run_baseline().ok, "the next trial must run"
    assert result.failure is not None
    return result.failure


class TestRaising:
    @pytest.mark.parametrize(
        ("at", "changes", "phase"),
        [
            ("build", GUARD, Phase.BUILD),
            ("step", GUARD, Phase.GUARD),
            ("step", NO_GUARD, Phase.WARM_UP),
            ("window", NO_GUARD, Phase.MEASURE),
            ("profile", PROFILED, Phase.PROFILE),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_is_reported_with_its_phase_and_message(
        self, study: Prepared, at: str, changes: dict, phase: Phase
    ) -> None:
        failure = failure_of(study, run_deed(study, "raise", at, **changes))
        assert (failure.kind, failure.phase) == (FailureKind.WORKLOAD_ERROR, phase)
        assert failure.message.startswith("RuntimeError: the candidate went astray")
        assert "misbehaving.py" in failure.traceback

    def test_windows_before_the_failure_are_kept(self, study: Prepared) -> None:
        result = run_deed(study, "raise", "profile", **PROFILED)
        assert len(result.clean_windows) == 2
        assert result.startup is not None

    def test_sys_exit_is_a_failure_too(self, study: Prepared) -> None:
        failure = failure_of(study, run_deed(study, "sys_exit", **NO_GUARD))
        assert failure.kind is FailureKind.WORKLOAD_ERROR
        assert failure.message.startswith("SystemExit: 4")

    def test_a_loss_that_becomes_nan_while_it_is_measured_is_a_matter_of_numerics(self, study: Prepared) -> None:
        failure = failure_of(study, run_deed(study, "spoil", "window", **NO_GUARD))
        assert (failure.kind, failure.phase) == (FailureKind.NUMERICS, Phase.MEASURE)
        assert "nan" in failure.message


class TestHanging:
    @pytest.mark.parametrize(
        ("at", "changes", "phase"),
        [
            ("build", NO_GUARD, Phase.BUILD),
            ("step", GUARD, Phase.GUARD),
            ("step", NO_GUARD, Phase.WARM_UP),
            ("window", NO_GUARD, Phase.MEASURE),
            ("profile", PROFILED, Phase.PROFILE),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_ends_at_the_deadline_of_its_phase(self, study: Prepared, at: str, changes: dict, phase: Phase) -> None:
        limited = Deadlines(**{f"{phase.value}_s": 1.5})
        failure = failure_of(study, run_deed(study, "hang", at, deadlines=limited, **changes))
        assert (failure.kind, failure.phase) == (FailureKind.TIMEOUT, phase)
        assert failure.message == f"the {phase.value} phase did not end within 1.5 s"

    def test_a_loader_that_gives_nothing_any_more_ends_at_the_deadline(self, study: Prepared) -> None:
        limited = Deadlines(warm_up_s=1.5)
        failure = failure_of(study, run_deed(study, "worker_hangs", candidate=WORKERS, deadlines=limited, **NO_GUARD))
        assert (failure.kind, failure.phase) == (FailureKind.TIMEOUT, Phase.WARM_UP)


class TestOutOfMemory:
    @pytest.mark.parametrize("deed", ["out_of_memory", "out_of_python_memory"])
    def test_is_recognised_under_the_limit_of_the_study(self, study: Prepared, deed: str) -> None:
        """The allocations are real: the process hits its resource limit, not the machine's memory."""
        failure = failure_of(study, run_deed(study, deed, **NO_GUARD))
        assert (failure.kind, failure.phase) == (FailureKind.OUT_OF_MEMORY, Phase.WARM_UP)
        assert "memory" in failure.message.lower()


class TestDying:
    def test_by_a_segmentation_fault(self, study: Prepared) -> None:
        failure = failure_of(study, run_deed(study, "segfault", **NO_GUARD))
        assert (failure.kind, failure.phase, failure.signal) == (FailureKind.CRASH, Phase.WARM_UP, signal.SIGSEGV)
        assert "SIGSEGV" in failure.message

    def test_by_the_profiler_it_is_measured_without_one(self, study: Prepared) -> None:
        """A GPU's profiler crashes where training does not: the candidate is as fast as it was measured."""
        result = run_deed(study, "segfault", "profile", **PROFILED)
        assert result.ok
        assert (result.breakdowns, bool(result.memory)) == ((), True)
        (attempt,) = result.repeated
        assert (attempt.failure.phase, attempt.failure.signal) == (Phase.PROFILE, signal.SIGSEGV)

    @pytest.mark.parametrize(("deed", "status"), [("exit", 3), ("exit_quietly", 0)])
    def test_by_leaving_the_interpreter(self, study: Prepared, deed: str, status: int) -> None:
        """Status 0 in the middle of a trial is as much of a failure as any other."""
        failure = failure_of(study, run_deed(study, deed, "window", **NO_GUARD))
        assert (failure.kind, failure.phase) == (FailureKind.CRASH, Phase.MEASURE)
        assert f"exited with status {status}" in failure.message


class TestKilledByOthers:
    """An operator's `kill -9` says nothing of the workload: what it ended runs again, twice at most."""

    @pytest.fixture
    def left(self, tmp_path: Path) -> Path:
        """How often somebody still kills."""
        path = tmp_path / "left"
        path.write_text("0")
        return path

    @pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
    def test_what_was_killed_runs_again(self, left: Path, tmp_path: Path, by: signal.Signals) -> None:
        with closing_runner(reference("misbehaving", "Killed", left=str(left), by=int(by)), tmp_path) as prepared:
            left.write_text("2")
            result = prepared.run_baseline()
            assert result.ok
            assert [(a.failure.kind, a.failure.signal) for a in result.repeated] == [(FailureKind.CRASH, by)] * 2
            assert all(attempt.duration_ns > 0 for attempt in result.repeated)

    def test_what_is_killed_every_time_fails(self, left: Path, tmp_path: Path) -> None:
        with closing_runner(reference("misbehaving", "Killed", left=str(left)), tmp_path) as prepared:
            left.write_text("9")
            result = prepared.run_baseline()
            assert result.failure is not None
            assert (result.failure.kind, result.failure.signal) == (FailureKind.CRASH, signal.SIGKILL)
            assert (len(result.repeated), left.read_text()) == (2, "6")

    @pytest.mark.parametrize("by", [signal.SIGSEGV, signal.SIGABRT])
    def test_a_crash_of_its_own_is_not_repeated(self, left: Path, tmp_path: Path, by: signal.Signals) -> None:
        with closing_runner(reference("misbehaving", "Killed", left=str(left), by=int(by)), tmp_path) as prepared:
            left.write_text("1")
            result = prepared.run_baseline()
            assert result.failure is not None
            assert (result.failure.signal, result.repeated) == (by, ())

    def test_one_of_several_ranks_that_was_killed_meets_the_others_again(self, left: Path, tmp_path: Path) -> None:
        """In a place where no rank of the earlier run waits."""
        with closing_runner(reference("misbehaving", "Killed", left=str(left)), tmp_path, num_ranks=2) as prepared:
            left.write_text("1")
            result = prepared.run(prepared.spec(guard=False, profile=False, deadlines=Deadlines(build_s=30)))[0]
            assert result.ok
            assert [(a.failure.rank, a.failure.signal) for a in result.repeated] == [(1, signal.SIGKILL)]

    def test_all_that_took_turns_run_again_together(self, left: Path, tmp_path: Path) -> None:
        with closing_runner(reference("misbehaving", "Killed", left=str(left)), tmp_path) as prepared:
            left.write_text("1")
            specs = [prepared.spec(guard=False, profile=False) for _ in range(2)]
            first, second = prepared.run(*specs)
            assert first.ok
            assert second.ok
            kinds = [[attempt.failure.kind for attempt in result.repeated] for result in (first, second)]
            assert kinds == [[FailureKind.CRASH], [FailureKind.INFRASTRUCTURE]]

    def test_a_trial_server_that_dies_is_replaced(self, left: Path, tmp_path: Path) -> None:
        workload = reference("misbehaving", "Killed", left=str(left), victim="server")
        with closing_runner(workload, tmp_path) as prepared:
            left.write_text("1")
            result = prepared.run_baseline()
            assert result.ok
            (attempt,) = result.repeated
            assert attempt.failure.kind is FailureKind.INFRASTRUCTURE
            assert "trial server exited" in attempt.failure.message

    def test_a_trial_server_that_dies_under_the_first_of_a_group_is_replaced(self, left: Path, tmp_path: Path) -> None:
        workload = reference("misbehaving", "Killed", left=str(left), victim="server")
        with closing_runner(workload, tmp_path) as prepared:
            left.write_text("1")
            results = prepared.run(*[prepared.spec(guard=False, profile=False) for _ in range(2)])
            assert all(result.ok for result in results)
            kinds = [[attempt.failure.kind for attempt in result.repeated] for result in results]
            assert kinds == [[FailureKind.INFRASTRUCTURE]] * 2

    def test_a_trial_server_that_dies_between_trials_costs_nothing(self, left: Path, tmp_path: Path) -> None:
        others = set(psutil.Process().children())  # of the module's own study
        with closing_runner(reference("misbehaving", "Killed", left=str(left)), tmp_path) as prepared:
            (server,) = set(psutil.Process().children()) - others
            server.kill()
            wait_until(lambda: server.status() == psutil.STATUS_ZOMBIE, "it has ended")
            result = prepared.run_baseline()
            assert result.ok
            assert result.repeated == ()

    def test_a_task_that_is_killed_every_time_fails(self, left: Path, tmp_path: Path) -> None:
        left.write_text("9")
        with pytest.raises(WorkloadError, match="killed by SIGKILL"):
            prepare(reference("misbehaving", "Killed", left=str(left)), tmp_path / "study")
        assert left.read_text() == "6"


class TestLoaderWorkers:
    def test_one_that_is_killed_is_a_crash_by_that_signal(self, study: Prepared) -> None:
        failure = failure_of(study, run_deed(study, "worker_killed", candidate=WORKERS, **NO_GUARD))
        assert (failure.kind, failure.phase, failure.signal) == (FailureKind.CRASH, Phase.WARM_UP, signal.SIGKILL), (
            failure
        )
        assert "loader worker" in failure.message

    def test_one_that_leaves_is_a_crash(self, study: Prepared) -> None:
        failure = failure_of(study, run_deed(study, "worker_exits", candidate=WORKERS, **NO_GUARD))
        assert (failure.kind, failure.phase, failure.signal) == (FailureKind.CRASH, Phase.WARM_UP, None)
        assert "loader worker" in failure.message
        assert "5" in failure.message

    def test_one_that_raises_on_the_seventh_batch_is_quoted(self, study: Prepared) -> None:
        failure = failure_of(study, run_deed(study, "worker_raises", candidate=WORKERS, **NO_GUARD))
        assert (failure.kind, failure.phase) == (FailureKind.WORKLOAD_ERROR, Phase.WARM_UP)
        assert "ValueError: this sample is damaged" in failure.message


class TestHarmless:
    def test_megabytes_of_output_go_to_the_log_of_the_trial(self, study: Prepared, capfd) -> None:
        result = run_deed(study, "print", **NO_GUARD)
        assert result.ok
        log = study.directory / "logs" / f"{result.trial_id}.log"
        assert log.stat().st_size >= 8 << 20
        assert capfd.readouterr().out == ""

    def test_children_that_outlive_the_trial_are_gone_when_it_ends(self, study: Prepared) -> None:
        """Those in its session, in one of their own, and orphans; the server itself lives on."""
        study.run_baseline()
        wait_until(lambda: len(marked(MARK)) == 1, "nothing but the server lives")
        server = [process.pid for process in marked(MARK)]
        assert run_deed(study, "children", **NO_GUARD).ok
        wait_until(lambda: [process.pid for process in marked(MARK)] == server, "its children are gone")
