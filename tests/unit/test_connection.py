"""The parent's end of a server that never comes up, or that has gone."""

import os
import sys
from pathlib import Path

import pytest

from steptune.tuner.errors import RunnerError
from steptune.tuner.trials.connection import ServerConnection, default_start_method
from steptune.tuner.trials.messages import Exit, ServerReady, encode

GREET = f"""
message = bytes.fromhex("{encode(ServerReady(pid=1, preload_ns=2)).hex()}")
channel = socket.socket(fileno=int(sys.argv[3]))
channel.sendall(len(message).to_bytes(4, "little") + message)
"""


def interpreter(directory: Path, body: str) -> str:
    """A script that stands where the user's interpreter does, called as that is."""
    script = directory / "python"
    script.write_text(f"#!{sys.executable} -ES\nimport os, socket, sys\nfrom pathlib import Path\n{body}\n")
    script.chmod(0o755)
    return str(script)


def connect(directory: Path, body: str, **variables: str) -> ServerConnection:
    log = directory / "logs" / "server.log"
    return ServerConnection(
        python=interpreter(directory, body),
        variables=variables,
        preload=[],
        imports=directory / "imports.json",
        log=log,
    )


def test_a_server_that_does_not_start_is_reported_with_its_log(tmp_path: Path) -> None:
    body = 'Path(sys.argv[sys.argv.index("--log") + 1]).write_text("No module named torch"); sys.exit(3)'
    with pytest.raises(RunnerError, match=r"the trial server did not start .*server\.log:\nNo module named torch"):
        connect(tmp_path, body)


def test_the_user_s_variables_reach_the_server(tmp_path: Path) -> None:
    seen = f'Path("{tmp_path}/seen").write_text(os.environ["OMP_NUM_THREADS"] + os.environ["HOME"])'
    connect(tmp_path, f"{seen}\n{GREET}\nchannel.recv(100)", OMP_NUM_THREADS="3").close()
    assert (tmp_path / "seen").read_text() == "3" + os.environ["HOME"]


def test_a_server_that_ends_is_reported_when_read_and_when_written_to(tmp_path: Path) -> None:
    connection = connect(tmp_path, f"{GREET}\nsys.exit(5)")
    connection.channel.receive(10.0)
    with pytest.raises(RunnerError, match=r"the trial server exited with status 5; see its log .*server\.log"):
        connection.take_messages()
    with pytest.raises(RunnerError, match=r"the connection to the trial server broke: .*server\.log"):
        connection.send(Exit())
    connection.close()


def test_forks_only_where_that_is_safe() -> None:
    assert default_start_method() == ("fork" if sys.platform == "linux" else "spawn")
