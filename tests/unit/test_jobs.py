"""Delivering what servers say to the jobs it concerns."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from steptune.tuner.errors import RunnerError
from steptune.tuner.records import Deadlines, Failure, FailureKind, Phase
from steptune.tuner.trials import jobs
from steptune.tuner.trials.jobs import Job, JobBoard
from steptune.tuner.trials.messages import (
    Channel,
    Failed,
    FromServer,
    JobEnded,
    Kill,
    PhaseBegan,
    Profile,
    RankExited,
    RankMessage,
    Start,
    TaskDone,
    TaskProgress,
    Tell,
    ToServer,
    decoder_of,
    encode,
)


class Server:
    """The parent's end of a real stream; the test speaks for the server at `other`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel, self.other = Channel(ours), Channel(theirs)
        self._decoder = decoder_of(FromServer)

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, message: Any) -> None:
        self._channel.send(message)

    def take_messages(self) -> list[Any]:
        self._channel.read_available()
        return [self._decoder.decode(line) for line in self._channel.take_messages()]

    def heard(self) -> Any:
        line = self.other.receive(5.0)
        assert line is not None
        return decoder_of(ToServer).decode(line)

    def say(self, message: Any, job: str = "j", rank: int = 0) -> None:
        self.other.send(RankMessage(job=job, rank=rank, message=encode(message)))

    def close(self) -> None:
        self._channel.close()
        self.other.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def board(server: Server) -> Iterator[JobBoard]:
    board = JobBoard()
    board.add_server(server)  # type: ignore[arg-type]
    yield board
    board._selector.close()


def start(board: JobBoard, server: Server, job_id: str = "j", **deadlines: float) -> Job:
    return board.start(
        server,  # type: ignore[arg-type]
        job_id=job_id,
        entry="trial",
        payload=Profile(unprofiled_step_time_ns=1),
        deadlines=Deadlines(**deadlines),
    )


def exited(job: str = "j", rank: int = 0, code: int | None = 0, signal: int | None = None) -> RankExited:
    return RankExited(job=job, rank=rank, code=code, signal=signal, out_of_memory=False)


FAILURE = Failure(kind=FailureKind.NUMERICS, phase=Phase.GUARD, message="not finite")


class SlowWatch:
    """A watch whose look takes until it is told to end: hundreds of busy processes are slow to read."""

    def __init__(self, failure: Failure | None = None) -> None:
        self.may_end = threading.Event()
        self.is_counted_again = False
        self._failure = failure

    def exceeded(self, phase: Phase) -> Failure | None:
        self.may_end.wait(60)
        return self._failure

    def count_again(self) -> None:
        self.is_counted_again = True


class TestQuota:
    def test_a_deadline_holds_while_the_quota_is_read(self, server: Server) -> None:
        watch = SlowWatch()
        board = JobBoard(watch)  # type: ignore[arg-type]
        board.add_server(server)  # type: ignore[arg-type]
        job = start(board, server, build_s=0.01)
        assert isinstance(server.heard(), Start)
        with ThreadPoolExecutor(1) as waiting:
            following = waiting.submit(board.next_message, job)
            assert server.heard() == Kill(job="j")
            server.other.send(JobEnded(job="j"))
            assert following.result() is None
        watch.may_end.set()
        assert job.failure is not None
        assert job.failure.kind is FailureKind.TIMEOUT

    def test_an_exceeded_quota_ends_the_jobs_that_ran_when_it_was_read_and_no_later_one(self, server: Server) -> None:
        watch = SlowWatch(FAILURE)
        board = JobBoard(watch)  # type: ignore[arg-type]
        board.add_server(server)  # type: ignore[arg-type]
        early = start(board, server, "early")
        server.say(TaskProgress(text="x"), job="early")
        assert board.next_message(early) == TaskProgress(text="x")
        late = start(board, server, "late")
        watch.may_end.set()
        with ThreadPoolExecutor(1) as waiting:
            following = waiting.submit(board.next_message, early)
            assert [type(server.heard()) for _ in range(2)] == [Start, Start]
            assert server.heard() == Kill(job="early")
            server.other.send(JobEnded(job="early"))
            assert following.result() is None
        assert early.failure is not None
        assert early.failure.message == FAILURE.message
        assert late.failure is None
        assert not watch.is_counted_again

    def test_an_exceeded_quota_is_counted_again_where_the_jobs_have_ended_meanwhile(self, server: Server) -> None:
        """A watch tells of files once, until there are more of them."""
        watch = SlowWatch(FAILURE)
        board = JobBoard(watch)  # type: ignore[arg-type]
        board.add_server(server)  # type: ignore[arg-type]
        early = start(board, server, "early")
        server.say(TaskProgress(text="x"), job="early")
        board.next_message(early)
        server.other.send(JobEnded(job="early"))
        assert board.next_message(early) is None
        late = start(board, server, "late")
        watch.may_end.set()
        while not watch.is_counted_again:
            server.say(TaskProgress(text="x"), job="late")
            assert board.next_message(late) == TaskProgress(text="x")
        assert late.failure is None


class TestDelivery:
    def test_a_job_gets_its_own_messages_in_order(self, board: JobBoard, server: Server) -> None:
        first, second = start(board, server, "a"), start(board, server, "b")
        for number in range(3):
            server.say(TaskProgress(text=f"a{number}"), job="a")
            server.say(TaskProgress(text=f"b{number}"), job="b")
        for job in ("b", "a"):
            server.other.send(JobEnded(job=job))
        for job, letter in ((second, "b"), (first, "a")):
            texts = [board.next_message(job).text for _ in range(3)]  # type: ignore[union-attr]
            assert texts == [f"{letter}{number}" for number in range(3)]
            assert board.next_message(job) is None
        assert board.running() == []

    def test_a_command_reaches_rank_0_through_the_server(self, board: JobBoard, server: Server) -> None:
        job = start(board, server)
        assert isinstance(server.heard(), Start)
        board.tell(job, Profile(unprofiled_step_time_ns=5))
        told = server.heard()
        assert (told, bytes(told.command)) == (
            Tell(job="j", command=told.command),
            encode(Profile(unprofiled_step_time_ns=5)),
        )

    def test_messages_of_a_forgotten_job_are_dropped(self, board: JobBoard, server: Server) -> None:
        """A killed job may still have sent them before it went."""
        old, new = start(board, server, "old"), start(board, server, "new")
        board.forget(old)
        server.say(TaskProgress(text="late"), job="old")
        server.say(TaskProgress(text="x"), job="new")
        assert board.next_message(new) == TaskProgress(text="x")
        assert not old.inbox

    def test_phases_are_followed(self, board: JobBoard, server: Server) -> None:
        job = start(board, server)
        server.say(PhaseBegan(phase=Phase.GUARD, at_ns=1))
        server.say(TaskProgress(text="x"))
        board.next_message(job)
        assert job.phase is Phase.GUARD
        assert job.phases_ns.keys() == {"build"}


class TestFailures:
    def ended(self, board: JobBoard, server: Server, job: Job) -> Failure | None:
        server.other.send(JobEnded(job="j"))
        while board.next_message(job) is not None:
            pass
        return job.failure

    def test_the_first_failure_is_the_cause(self, board: JobBoard, server: Server) -> None:
        """The other ranks fail in a collective, because of the first."""
        job = start(board, server)
        server.say(Failed(failure=FAILURE), rank=1)
        server.say(Failed(failure=msgspec.structs.replace(FAILURE, message="peer is gone")))
        server.other.send(exited(rank=1, code=1))
        assert self.ended(board, server, job) == FAILURE

    def test_a_rank_that_dies_without_a_word_is_a_crash_of_its_phase(self, board: JobBoard, server: Server) -> None:
        job = start(board, server)
        server.say(PhaseBegan(phase=Phase.MEASURE, at_ns=1))
        server.other.send(exited(rank=1, code=None, signal=11))
        failure = self.ended(board, server, job)
        assert failure is not None
        assert (failure.kind, failure.phase, failure.rank, failure.signal) == (FailureKind.CRASH, Phase.MEASURE, 1, 11)

    def test_a_crash_is_of_the_phase_that_its_own_rank_was_in(self, board: JobBoard, server: Server) -> None:
        """Ranks are as much as a step apart."""
        job = start(board, server)
        server.say(PhaseBegan(phase=Phase.WARM_UP, at_ns=1), rank=1)
        server.other.send(exited(rank=1, code=None, signal=11))
        failure = self.ended(board, server, job)
        assert failure is not None
        assert (failure.phase, failure.rank) == (Phase.WARM_UP, 1)
        assert job.phase is Phase.BUILD, "deadlines are those of the first rank's"

    @pytest.mark.parametrize("kind", [FailureKind.TIMEOUT, FailureKind.INFRASTRUCTURE])
    def test_what_may_be_a_consequence_gives_way_to_its_cause(
        self, board: JobBoard, server: Server, kind: FailureKind
    ) -> None:
        """Both were said at once; whose word the server reads first is chance."""
        job = start(board, server)
        server.say(Failed(failure=msgspec.structs.replace(FAILURE, kind=kind), consequence=True))
        server.say(Failed(failure=FAILURE), rank=1)
        server.say(Failed(failure=msgspec.structs.replace(FAILURE, kind=kind), consequence=True), rank=2)
        assert self.ended(board, server, job) == FAILURE

    def test_a_consequence_whose_cause_nobody_tells_is_the_failure(self, board: JobBoard, server: Server) -> None:
        job = start(board, server)
        server.say(Failed(failure=msgspec.structs.replace(FAILURE, kind=FailureKind.TIMEOUT), consequence=True))
        failure = self.ended(board, server, job)
        assert failure is not None
        assert failure.kind is FailureKind.TIMEOUT

    def test_a_rank_that_ends_well_is_no_failure(self, board: JobBoard, server: Server) -> None:
        job = start(board, server)
        server.say(TaskDone(result=msgspec.Raw(encode("done"))))
        server.other.send(exited())
        assert self.ended(board, server, job) is None

    def test_a_rank_that_ends_early_with_status_0_is_a_crash(self, board: JobBoard, server: Server) -> None:
        """User code that calls `sys.exit()` or `os._exit(0)` in the middle of a step."""
        job = start(board, server)
        server.other.send(exited())
        failure = self.ended(board, server, job)
        assert failure is not None
        assert failure.message == "the process exited with status 0 during the trial"

    def test_a_job_that_we_killed_did_not_crash(self, board: JobBoard, server: Server) -> None:
        job = start(board, server)
        server.heard()
        board.kill(job)
        board.kill(job)
        assert server.heard() == Kill(job="j")
        server.other.send(exited(code=None, signal=9))
        assert self.ended(board, server, job) is None
        assert server.other.receive(0.0) is None, "one kill is enough"

    def test_a_phase_that_overruns_is_killed_and_says_so(self, board: JobBoard, server: Server) -> None:
        job = start(board, server, build_s=0.0)
        server.heard()
        server.other.send(JobEnded(job="j"))
        assert board.next_message(job) is None
        assert job.failure is not None
        assert (job.failure.kind, job.failure.phase) == (FailureKind.TIMEOUT, Phase.BUILD)
        assert job.failure.message == "the build phase did not end within 0 s"
        assert server.heard() == Kill(job="j")

    def test_the_rank_that_others_waited_for_is_named(self, board: JobBoard, server: Server) -> None:
        job = start(board, server, warm_up_s=0.0)
        server.say(PhaseBegan(phase=Phase.BUILD, at_ns=1), rank=1)
        server.say(PhaseBegan(phase=Phase.WARM_UP, at_ns=2))
        board.next_message(job)
        failure = self.ended(board, server, job)
        assert failure is not None
        assert (failure.kind, failure.phase, failure.rank) == (FailureKind.TIMEOUT, Phase.WARM_UP, 1)
        assert failure.message == "the warm_up phase did not end within 0 s: the other ranks waited for rank 1 in build"

    def test_a_job_that_waits_for_a_command_has_no_deadline(self, board: JobBoard, server: Server) -> None:
        """Its turn comes when the others of its group have had theirs."""
        job = start(board, server, build_s=0.0)
        job.pause()
        server.say(TaskProgress(text="still here"))
        assert board.next_message(job) == TaskProgress(text="still here")
        assert job.failure is None

    def test_a_job_that_cannot_be_killed_is_our_failure(
        self, board: JobBoard, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(jobs, "END_TIMEOUT_S", 0.0)
        job = start(board, server)
        with pytest.raises(RunnerError, match="job j could not be ended within 0 s"):
            board.end(job)
