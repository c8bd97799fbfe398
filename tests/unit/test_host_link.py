"""The connection between hosts: only who knows the secret is heard."""

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from steptune.tuner.errors import RunnerError
from steptune.tuner.trials import host_link
from steptune.tuner.trials.host_files import changed, put, take_back
from steptune.tuner.trials.host_link import FromAgent, FromDriver, Hello, HostLink, LinkBroken, Put, ToTrials, Welcome

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
        with pytest.raises(LinkBroken, match="not signed with the secret"):
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
        with pytest.raises(LinkBroken, match="not signed with the secret"):
            driver.receive(5)
        agent.close()

    def test_a_changed_message_is_refused(self) -> None:
        driver, agent, _, far = joined()
        sent: list[bytes] = []
        agent._write = lambda data: sent.append(bytes(data)) or len(data)  # type: ignore[method-assign, func-returns-value]
        agent.send(HELLO)
        far.setblocking(True)
        far.sendall(sent[0].replace(b'"host":1', b'"host":2'))
        with pytest.raises(LinkBroken, match="not signed with the secret"):
            driver.receive(5)
        agent.close()

    def test_nobody_fills_the_memory_of_the_driver(self) -> None:
        driver, agent, _, far = joined()
        far.setblocking(True)
        far.sendall(struct.pack("<I32s", host_link.MAX_FIRST_BYTES + 1, b""))
        with pytest.raises(LinkBroken, match="65537 bytes was announced; 65536 are allowed"):
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
        sending = threading.Thread(target=agent.send, args=(large,))
        sending.start()
        driver.send(large)
        assert driver.receive(20) == large
        sending.join(20)
        assert not sending.is_alive()
        assert agent.receive(5) == large


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
        with pytest.raises(RunnerError, match="here already"):
            take_back(tmp_path, Put(path="trials/a/rank1.trace.json", data=b"{}"), 1)
