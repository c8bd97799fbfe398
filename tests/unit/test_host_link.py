"""The connection between hosts: only who knows the secret is heard."""

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import steptune
from steptune.tuner.errors import RunnerError
from steptune.tuner.trials import host_group, host_link
from steptune.tuner.trials.connection import READY_TIMEOUT_S
from steptune.tuner.trials.host_files import changed, put, take_back
from steptune.tuner.trials.host_group import HostGroup
from steptune.tuner.trials.host_link import (
    Accepted,
    FromAgent,
    FromDriver,
    Hello,
    HostLink,
    LinkBrokenError,
    Put,
    ToTrials,
    Welcome,
)

SECRET = b"a secret of this test"
HELLO = Hello(host=1, version="0", place="")
Pair = tuple[HostLink, HostLink]


def joined(secret: bytes = SECRET, other: bytes = SECRET) -> tuple[HostLink, HostLink, socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    made: list[HostLink] = []
    thread = threading.Thread(target=lambda: made.append(HostLink(far, other, FromDriver, drives=False)))
    thread.start()
    driver = HostLink(near, secret, FromAgent, drives=True)
    thread.join()
    return driver, made[0], near, far


@pytest.fixture
def pair() -> Iterator[Pair]:
    driver, agent, _, _ = joined()
    yield driver, agent
    driver.close()
    agent.close()


class TestLink:
    def test_messages_arrive_in_both_directions(self, pair: Pair) -> None:
        driver, agent = pair
        agent.send(HELLO)
        assert driver.receive(5) == HELLO
        message = ToTrials(server=3, message=bytes(range(256)))
        driver.send(message)
        assert agent.receive(5) == message

    def test_who_has_another_secret_is_not_heard(self) -> None:
        driver, agent, _, _ = joined(other=b"guessed")
        agent.send(HELLO)
        with pytest.raises(LinkBrokenError, match="not signed with the secret"):
            driver.receive(5)
        agent.close()

    def test_what_was_said_is_not_taken_twice(self) -> None:
        """A frame that somebody between the hosts has recorded is refused: it has another number."""
        driver, agent, _, far = joined()
        sent: list[bytes] = []
        agent._write = lambda data: sent.append(bytes(data)) or len(data)  # type: ignore[method-assign, func-returns-value]
        agent.send(HELLO)
        far.setblocking(True)
        far.sendall(sent[0])
        assert driver.receive(5) == HELLO
        far.sendall(sent[0])
        with pytest.raises(LinkBrokenError, match="not signed with the secret"):
            driver.receive(5)
        agent.close()

    def test_a_changed_message_is_refused(self) -> None:
        driver, agent, _, far = joined()
        sent: list[bytes] = []
        agent._write = lambda data: sent.append(bytes(data)) or len(data)  # type: ignore[method-assign, func-returns-value]
        agent.send(HELLO)
        far.setblocking(True)
        far.sendall(sent[0].replace(b'"host":1', b'"host":2'))
        with pytest.raises(LinkBrokenError, match="not signed with the secret"):
            driver.receive(5)
        agent.close()

    def test_nobody_fills_the_memory_of_the_driver(self) -> None:
        driver, agent, _, far = joined()
        far.setblocking(True)
        far.sendall(struct.pack("<I32s", host_link.MAX_FIRST_BYTES + 1, b""))
        with pytest.raises(LinkBrokenError, match="65537 bytes was announced, but at most 65536 are allowed"):
            driver.receive(5)
        agent.close()

    def test_two_ends_that_send_at_once_do_not_wait_for_each_other(self, pair: Pair) -> None:
        """More than the buffers of both sockets hold."""
        driver, agent = pair
        welcome = Welcome(workload="zoo:synthetic", source_digest="")
        driver.send(welcome)  # the first word of either end is short
        agent.send(HELLO)
        assert agent.receive(5) == welcome
        assert driver.receive(5) == HELLO
        large = Put(path="data/x", data=bytes(8 << 20))
        received: list[object] = []

        def exchange() -> None:
            agent.send(large)
            received.append(agent.receive(20))  # the driver may not have sent all yet

        sending = threading.Thread(target=exchange)
        sending.start()
        driver.send(large)
        assert driver.receive(20) == large
        sending.join(120)
        assert received == [large]


class TestGathering:
    def test_a_silent_stranger_keeps_no_host_from_joining(self, tmp_path: Path) -> None:
        """Strangers who have connected first, and say nothing, or half a challenge, or bytes without end."""
        group = HostGroup(
            num_hosts=2, ranks_per_host=1, address="127.0.0.1", secret=SECRET, workload="zoo:synthetic",
            directory=tmp_path,
        )  # fmt: skip
        place = ("127.0.0.1", group.port)
        strangers = [socket.create_connection(place) for _ in range(20)]
        for stranger in strangers[:5]:
            stranger.sendall(b"half")
        for stranger in strangers[5:10]:
            stranger.sendall(bytes(1000))
        gathering = threading.Thread(target=group.gather, daemon=True)
        gathering.start()
        agent = HostLink(socket.create_connection(place), SECRET, FromDriver, drives=False)
        agent.send(Hello(host=1, version=steptune.__version__, place="b"))
        welcome = agent.receive(host_group.HELLO_S / 2)
        assert isinstance(welcome, Welcome), "it waited for the strangers"
        agent.send(Accepted())
        gathering.join(120)
        assert list(group.hosts) == [1]
        group.close()
        agent.close()
        for stranger in strangers:
            stranger.close()

    def test_strangers_who_come_again_and_again_do_not_hold_up_its_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(host_group, "GATHER_S", 1.0)
        group = HostGroup(
            num_hosts=2, ranks_per_host=1, address="127.0.0.1", secret=SECRET, workload="zoo:synthetic",
            directory=tmp_path,
        )  # fmt: skip
        strangers = [socket.create_connection(("127.0.0.1", group.port)) for _ in range(30)]
        ended: list[RunnerError] = []

        def gather() -> None:
            try:
                group.gather()
            except RunnerError as error:
                ended.append(error)

        gathering = threading.Thread(target=gather, daemon=True)
        gathering.start()
        gathering.join(host_group.HELLO_S)
        assert ended, "thirty strangers held up its end"
        for stranger in strangers:
            stranger.close()
        group.close()


def test_a_host_that_starts_a_trial_server_does_not_count_as_gone() -> None:
    driver, agent, near, _ = joined()
    patience_ms = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert patience_ms == 1000 * host_link.NO_PROGRESS_S > 1000 * READY_TIMEOUT_S
    driver.close()
    agent.close()


class TestFiles:
    def test_what_has_changed_is_sent_and_what_is_gone_removed(self, tmp_path: Path) -> None:
        here, there = tmp_path / "here", tmp_path / "there"
        (here / "data").mkdir(parents=True)
        (here / "logs").mkdir()
        there.mkdir()
        (here / "order.npz").write_bytes(b"x" * 10)
        (here / "data" / "samples").write_bytes(b"y")
        (here / "logs" / "inspect.log").write_bytes(b"of this host")
        sent: dict[str, tuple[int, int]] = {}
        for part in changed(here, sent):
            put(there, part)
        names = sorted(path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file())
        assert names == ["data/samples", "order.npz"]
        assert list(changed(here, sent)) == []
        (here / "order.npz").unlink()
        (here / "data" / "samples").write_bytes(b"other")
        for part in changed(here, sent):
            put(there, part)
        assert not (there / "order.npz").exists()
        assert (there / "data" / "samples").read_bytes() == b"other"

    def test_a_file_longer_than_a_message_arrives_whole(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("steptune.tuner.trials.host_files.CHUNK_BYTES", 3)
        here, there = tmp_path / "here", tmp_path / "there"
        here.mkdir()
        (here / "state").write_bytes(bytes(range(10)))
        for part in changed(here, {}):
            put(there, part)
        assert (there / "state").read_bytes() == bytes(range(10))

    @pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "trials/../../x", ""])
    def test_nothing_is_written_outside_of_the_study(self, tmp_path: Path, name: str) -> None:
        for write in (lambda part: put(tmp_path, part), lambda part: take_back(tmp_path, part, 1)):
            with pytest.raises(RunnerError, match="does not belong to the study"):
                write(Put(path=name, data=b"x"))

    def test_a_host_sends_back_logs_and_traces_only(self, tmp_path: Path) -> None:
        with pytest.raises(RunnerError, match="does not belong to the study"):
            take_back(tmp_path, Put(path="initial_state.tensors", data=b"x"), 1)
        take_back(tmp_path, Put(path="logs/a.log", data=b"text\n"), 1)
        assert (tmp_path / "logs" / "a.log").read_text() == "--- host 1 ---\ntext\n"
        take_back(tmp_path, Put(path="trials/a/rank1.trace.json", data=b"{}"), 1)
        with pytest.raises(RunnerError, match="already exists here"):
            take_back(tmp_path, Put(path="trials/a/rank1.trace.json", data=b"{}"), 1)

    def test_links_inside_arrive_as_files_and_others_are_refused(self, tmp_path: Path) -> None:
        here, there = tmp_path / "here", tmp_path / "there"
        (here / "blobs").mkdir(parents=True)
        (here / "blobs" / "a").write_bytes(b"samples")
        (here / "samples").symlink_to("blobs/a")
        (here / "dangling").symlink_to("gone")
        for part in changed(here, {}):
            put(there, part)
        assert (there / "samples").read_bytes() == b"samples"
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "file").write_bytes(b"x")
        for target in (outside, outside / "file", here / "blobs"):
            (here / "link").symlink_to(target)
            with pytest.raises(RunnerError, match=r"is a link to .*only links to files inside"):
                list(changed(here, {}))
            (here / "link").unlink()

    def test_a_file_that_goes_while_the_folder_is_read_is_left_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "kept").write_bytes(b"x")
        walked = [(str(tmp_path), [], ["gone", "kept"])]
        monkeypatch.setattr("steptune.tuner.trials.host_files.os.walk", lambda directory: walked)
        assert [part.path for part in changed(tmp_path, {})] == ["kept"]

    def test_a_trace_is_there_once_it_is_whole(self, tmp_path: Path) -> None:
        trace = tmp_path / "trials" / "a" / "rank1.trace.json"
        take_back(tmp_path, Put(path="trials/a/rank1.trace.json", data=b"[", last=False), 1)
        assert not trace.exists()
        take_back(tmp_path, Put(path="trials/a/rank1.trace.json", data=b"{", last=False), 1)  # of the next attempt
        take_back(tmp_path, Put(path="trials/a/rank1.trace.json", data=b"}", first=False), 1)
        assert trace.read_bytes() == b"{}"

    def test_what_cannot_be_written_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "trials").write_bytes(b"in the way")
        for write in (lambda part: put(tmp_path, part), lambda part: take_back(tmp_path, part, 1)):
            with pytest.raises(RunnerError, match="trials/a/t cannot be written"):
                write(Put(path="trials/a/t", data=b"x"))
