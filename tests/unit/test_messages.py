"""Messages between parent, server and ranks, and the stream that carries them."""

import math
import os
import resource
import socket
import struct
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from builders import sample_breakdown, sample_guard, sample_profile, sample_result, sample_window
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.records import Failure, FailureKind, GuardCheck, Phase
from steptune.tuner.trials import messages as m
from steptune.tuner.trials.messages import Channel, Command, FromRank, FromServer, ToServer, decoder_of, encode

FD_SETSIZE = 1024
RAW = msgspec.Raw(encode(m.Finish()))
RESULT = sample_result()
SAMPLES: dict[Any, tuple[Any, ...]] = {
    ToServer: (
        m.Start(job="j", entry="trial", payload=RAW, num_ranks=2, log="/tmp/log"),
        m.Tell(job="j", command=RAW),
        m.Kill(job="j"),
        m.Preload(path="/tmp/imports"),
        m.Exit(),
    ),
    FromServer: (
        m.ServerReady(pid=7, preload_ns=8),
        m.RankMessage(job="j", rank=1, message=b"\xc1 is no message"),
        m.RankExited(job="j", rank=1, code=None, signal=9, out_of_memory=True),
        m.JobEnded(job="j"),
    ),
    Command: (
        m.TakeWindow(round=3, position=96, num_steps=8, foreign_limit=0.1),
        m.MeasureRestart(),
        m.Profile(unprofiled_step_time_ns=20_000_000),
        m.Finish(),
    ),
    FromRank: (
        m.PhaseBegan(phase=Phase.WARM_UP, at_ns=5),
        m.Guarded(verdict=sample_guard()),
        m.Ready(startup=RESULT.startup, step_time_ns=1, loader_capacity=4, num_positions=32, steps_per_epoch=None),
        m.WindowTaken(window=sample_window(2, void="others")),
        m.RestartMeasured(epoch_restart_ns=None),
        m.Profiled(breakdowns=(sample_breakdown(),), profile=sample_profile(), trace=None),
        m.Reported(memory=RESULT.memory[0], effects=RESULT.effects, unmeasured=("power: no driver",)),
        m.Failed(failure=Failure(kind=FailureKind.CRASH, phase=Phase.MEASURE, message="…", signal=11)),
        m.TaskDone(result=RAW),
        m.TaskProgress(text="reference run 3"),
    ),
}
CASES = [(union, message) for union, samples in SAMPLES.items() for message in samples]


class TestMessages:
    @pytest.mark.parametrize(("union", "message"), CASES, ids=[type(message).__name__ for _, message in CASES])
    def test_come_back_as_they_were(self, union: Any, message: Any) -> None:
        back = decoder_of(union).decode(encode(message))
        assert type(back) is type(message)
        assert encode(back) == encode(message)

    def test_every_kind_is_tried(self) -> None:
        for union, samples in SAMPLES.items():
            assert {type(sample) for sample in samples} == set(get_args(union))

    def test_what_a_message_carries_is_passed_on_unread(self) -> None:
        """The server does not know the commands and answers that it relays."""
        told = decoder_of(ToServer).decode(encode(m.Tell(job="j", command=RAW)))
        assert decoder_of(Command).decode(told.command) == m.Finish()

    def test_infinities_and_nan_survive(self) -> None:
        """A rejected candidate's losses are made of them; JSON would lose them."""
        check = GuardCheck(name="loss", kind="pointwise", passed=False, observed=math.inf, tolerance=-math.inf)
        verdict = sample_guard(checks=(check,), losses=(math.nan, math.inf))
        back = decoder_of(FromRank).decode(encode(m.Guarded(verdict=verdict))).verdict
        assert math.isnan(back.losses[0])
        assert (back.losses[1], back.checks[0].observed, back.checks[0].tolerance) == (math.inf, math.inf, -math.inf)

    @pytest.mark.parametrize(
        "data",
        [
            encode({"type": "Unheard"}),
            encode({"type": "TakeWindow", "round": 1}),
            encode({"type": "Finish", "more": 1}),
            encode({"type": "TakeWindow", "round": "x", "position": 0, "num_steps": 1, "foreign_limit": 0.1}),
            encode(m.Kill(job="j")),
            b"",
            b"\xc1",
            encode(m.Profile(unprofiled_step_time_ns=1))[:-2],
        ],
        ids=["unknown type", "missing field", "unknown field", "wrong type", "other union", "empty", "no data", "cut"],
    )
    def test_what_is_no_command_is_refused(self, data: bytes) -> None:
        with pytest.raises(msgspec.DecodeError):
            decoder_of(Command).decode(data)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def framed(*contents: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(content)) + content for content in contents)


class TestChannel:
    def test_a_message_that_is_announced_too_large_is_refused_before_it_comes(
        self, ends: tuple[Channel, socket.socket]
    ) -> None:
        channel, theirs = ends
        theirs.sendall(framed(b"fine") + struct.pack("<I", m.MAX_MESSAGE_BYTES + 1) + b"x")
        with pytest.raises(m.MessageTooLargeError, match=str(m.MAX_MESSAGE_BYTES + 1)):
            channel.read_available()
        assert channel.take_messages() == [b"fine"]

    def test_a_process_may_have_more_files_open_than_select_takes(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard < 2 * FD_SETSIZE:
            pytest.skip(f"a process may have no more than {hard} files open here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * FD_SETSIZE), hard))
        files: list[int] = []
        try:
            while not files or files[-1] <= FD_SETSIZE:
                files.append(os.open(os.devnull, os.O_RDONLY))
            ours, theirs = socket.socketpair()
            assert ours.fileno() > FD_SETSIZE
            channel, other = Channel(ours), Channel(theirs)
            assert channel.receive(0.0) is None
            other.send(m.Finish())
            assert channel.receive(5.0) == encode(m.Finish())
            channel.close()
            other.close()
        finally:
            for file in files:
                os.close(file)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_messages_arrive_in_order_and_whole(self, ends: tuple[Channel, socket.socket]) -> None:
        channel, theirs = ends
        other = Channel(theirs)
        for number in range(5):
            other.send(m.Profile(unprofiled_step_time_ns=number))
        other.close()
        decoder = decoder_of(Command)
        found = [decoder.decode(channel.receive(5.0)).unprofiled_step_time_ns for _ in range(5)]
        assert found == [0, 1, 2, 3, 4]
        assert channel.receive(5.0) is None
        assert channel.closed

    @given(data=st.data(), contents=st.lists(st.binary(max_size=40), min_size=1, max_size=5))
    def test_a_stream_cut_anywhere_gives_the_same_messages(self, data: st.DataObject, contents: list[bytes]) -> None:
        stream = framed(*contents)
        cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=5).map(sorted))
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        found: list[bytes] = []
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            if end > start:
                theirs.sendall(stream[start:end])
                assert channel.read_available()
                found += channel.take_messages()
        theirs.close()
        channel.close()
        assert found == contents

    def test_a_message_larger_than_one_read_arrives_whole(self, ends: tuple[Channel, socket.socket]) -> None:
        """Such as a breakdown of a large model, or a traceback."""
        channel, theirs = ends
        theirs.setblocking(False)
        stream = memoryview(framed(b"x" * 3_000_000, b"next"))
        while len(stream):
            try:
                stream = stream[theirs.send(stream) :]
            except BlockingIOError:
                assert channel.read_available()
        assert len(channel.receive(5.0) or b"") == 3_000_000
        assert channel.receive(5.0) == b"next"

    @pytest.mark.parametrize("part", [b"", framed(b"complete")[:2], framed(b"complete")[:-1]])
    def test_a_message_that_was_cut_by_the_end_is_none(self, ends: tuple[Channel, socket.socket], part: bytes) -> None:
        """The other end died in the middle of sending."""
        channel, theirs = ends
        theirs.sendall(framed(b"first") + part)
        theirs.close()
        assert channel.receive(5.0) == b"first"
        assert channel.receive(5.0) is None
        assert channel.closed

    def test_silence_is_not_the_end(self, ends: tuple[Channel, socket.socket]) -> None:
        channel, _ = ends
        assert channel.receive(0.0) is None
        assert not channel.closed

    def test_sending_to_a_dead_end_raises(self, ends: tuple[Channel, socket.socket]) -> None:
        channel, theirs = ends
        theirs.close()
        with pytest.raises(OSError, match="Broken pipe"):
            channel.send(m.Finish())

    def test_a_channel_is_made_from_an_inherited_descriptor(self, ends: tuple[Channel, socket.socket]) -> None:
        channel, theirs = ends
        child = Channel.from_descriptor(theirs.dup().detach())
        child.send(m.Finish())
        assert channel.receive(5.0) == encode(m.Finish())
        child.close()
