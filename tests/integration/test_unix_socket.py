"""The Unix socket behind which a reverse proxy is believed: nobody else may open it."""

import contextlib
import http.client
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from steptune.service.app import create_app
from steptune.service.database import migrate
from steptune.service.serving import Server, listen
from steptune.service.settings import Settings
from steptune.tuner.errors import ChoiceError

CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that others may enter, with a short name: the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def settings_for(folder: Path, **settings) -> Settings:
    url = f"sqlite:///{folder}/steptune.db"
    return Settings(
        _env_file=None,
        database_url=url,
        data_directory=folder / "data",
        unix_socket=folder / "socket",
        proxy_user_header="X-User",
        new_user_scopes="read",
        **settings,
    )


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[None]:
    migrate(settings.database_url)
    listener = listen(settings)
    server = Server(uvicorn.Config(create_app(settings), log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(120)


def ask(path: Path, target: str, headers: dict[str, str]) -> tuple[int, str]:
    """The status, and the cookies that are set."""
    with contextlib.closing(http.client.HTTPConnection("service", timeout=30)) as connection:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        connection.request("GET", target, headers=headers)
        with connection.getresponse() as answer:
            return answer.status, answer.headers.get("set-cookie", "")


def test_a_proxy_of_the_same_user_logs_people_in(folder: Path) -> None:
    settings = settings_for(folder)
    with serving(settings):
        status, cookie = ask(folder / "socket", "/login?next=/", {"X-User": "ada"})
    assert status == 303
    assert "steptune_session" in cookie


def test_only_its_own_user_may_open_it(folder: Path) -> None:
    listener = listen(settings_for(folder))
    try:
        path = folder / "socket"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        subprocess.run([sys.executable, "-c", CONNECT, str(path)], check=True)
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            pytest.skip("only root can try it as somebody else")
        other = ["setpriv", "--reuid", "10001", "--regid", "10001", "--clear-groups", "--inh-caps=-all"]
        python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
        refused = subprocess.run(
            [*other, python, "-c", CONNECT, str(path)], capture_output=True, text=True, check=False
        )
        assert refused.returncode != 0
        assert "PermissionError" in refused.stderr or "Permission denied" in refused.stderr
    finally:
        listener.close()


def test_a_socket_that_a_killed_server_left_is_taken_over_and_a_living_one_is_not(folder: Path) -> None:
    settings = settings_for(folder)
    first = listen(settings)
    with pytest.raises(ChoiceError, match="--unix-socket"):
        listen(settings)
    first.close()
    listen(settings).close()


def test_a_file_is_never_removed(folder: Path) -> None:
    (folder / "socket").write_text("mine")
    with pytest.raises(ChoiceError, match="--unix-socket"):
        listen(settings_for(folder))
    assert (folder / "socket").read_text() == "mine"
