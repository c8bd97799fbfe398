"""A study on two hosts whose agent runs on this machine, too: no launcher and no network of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from steptune.tuner.trials.host_group import HostGroup

SECRET = "a secret of tests, which is as long as it has to be"
PATIENCE_S = 120.0
"""An agent that is started imports torch first, which takes long on a busy machine."""
AGENT = """
import sys
from pathlib import Path
from steptune.tuner.trials.host_agent import HostAgent
port, directory, place = sys.argv[1:]
secret = sys.stdin.buffer.readline().strip()
HostAgent(host=1, address="127.0.0.1", port=int(port), secret=secret, directory=Path(directory), place=place).serve()
"""


def start_agent(
    port: int, directory: Path, secret: str = SECRET, *, place: str = "b", within: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    directory.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    command = [*within, sys.executable, "-c", AGENT, str(port), str(directory), place]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert agent.stdin is not None
    agent.stdin.write(secret.encode() + b"\n")
    agent.stdin.close()
    agent.stdin = None
    return agent


@dataclass
class TwoHosts:
    """One rank on each of two hosts."""

    group: HostGroup
    directory: Path
    agent: subprocess.Popen[bytes]

    def lose_second(self) -> None:
        """Kill the second host's agent, and with it what it has started."""
        self.agent.kill()
        self.agent.communicate(timeout=PATIENCE_S)

    def start_second(self, *, place: str = "b", within: Sequence[str] = ()) -> None:
        self.agent = start_agent(self.group.port, self.directory / "again", place=place, within=within)


@contextmanager
def two_agents(workload: str, directory: Path) -> Iterator[TwoHosts]:
    group = HostGroup(
        num_hosts=2,
        ranks_per_host=1,
        address="127.0.0.1",
        secret=SECRET.encode(),
        workload=workload,
        directory=directory / "first",
        patience_s=PATIENCE_S,
    )
    hosts = TwoHosts(group, directory, start_agent(group.port, directory / "second"))
    try:
        yield hosts
    finally:
        group.close()
        _, said = hosts.agent.communicate(timeout=PATIENCE_S)
        assert hosts.agent.returncode in (0, -9), said.decode()
