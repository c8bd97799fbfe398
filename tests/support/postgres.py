"""A PostgreSQL server of our own, on a socket in a temporary directory, without the network.

One server a test process; each test gets a database copied from a migrated one. Servers refuse to run as root, so
then it runs as the system's `postgres` user. Its driver is imported late: every test run loads this module, also
where only a GPU is tested.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

TEMPLATE = "steptune_template"
READY_S = 60.0
ROOM_BYTES = 4 << 30
"""Several times the log of a server and the databases of a test."""


def server_binaries() -> Path | None:
    """The directory of the newest installed server."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: float(p.parts[-3]))
    if places:
        return places[-1].parent
    found = shutil.which("postgres")
    return Path(found).resolve().parent if found else None


def skip_without_server() -> None:
    """Skips with a reason on a user's machine; under CI a missing server is a failure."""
    if server_binaries() is None:
        reason = "PostgreSQL is not installed: apt-get install postgresql"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)


class PostgresServer:
    """A server with its data in `folder`; commands run as an ordinary user.

    Attributes:
        folder: Holds the data and the socket.

    Args:
        superuser: Name of the role that may do everything.
        durable: What it says is committed survives a crash; else it is as fast as can be.
    """

    def __init__(self, folder: Path, *, superuser: str = "steptune", durable: bool = False) -> None:
        binaries = server_binaries()
        assert binaries is not None
        self.folder = folder
        self._superuser = superuser
        self._binaries = binaries
        self._durable = durable
        self._process: subprocess.Popen[bytes] | None = None
        self._user = pwd.getpwnam("postgres") if os.getuid() == 0 else None
        if self._user is not None:
            os.chown(folder, self._user.pw_uid, self._user.pw_gid)
        options = ["-D", str(folder / "data"), "-A", "trust", "-U", superuser, "--locale=C", "-E", "UTF8"]
        options += [] if durable else ["--no-sync"]
        subprocess.run([*self._as_user(), str(binaries / "initdb"), *options], check=True, capture_output=True)

    def start(self) -> None:
        import psycopg

        quick = ["-c", "fsync=off", "-c", "full_page_writes=off", "-c", "synchronous_commit=off"]
        if self._durable:
            quick = ["-c", "fsync=on", "-c", "synchronous_commit=on"]
        # Without a network: the socket alone.
        where = ["-D", str(self.folder / "data"), "-k", str(self.folder), "-c", "listen_addresses="]
        command = [*self._as_user(), str(self._binaries / "postgres"), *where, *quick, "-c", "max_connections=200"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + READY_S
        while True:
            try:
                psycopg.connect(self._conninfo("postgres")).close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < deadline, (self.folder / "log").read_text()
                time.sleep(0.02)

    def stop(self) -> None:
        """At once, open connections or not."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
            self._process = None

    def crash(self) -> None:
        """`kill -9` of the postmaster: nothing is written any more, and the next start has to recover."""
        assert self._process is not None
        backends = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait()
        self._process = None
        psutil.wait_procs(backends, timeout=READY_S)  # they hold the shared memory until they see it

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://steptune@/{database}?host={self.folder}"

    def create(self, database: str, template: str = "template1") -> str:
        """The URL of a new database."""
        self._execute(f'CREATE DATABASE "{database}" TEMPLATE "{template}"')
        return self.url(database)

    def ask_for_passwords(self, password: str) -> None:
        """From here on nobody gets in without one, as in production; that of the superuser is given."""
        self._execute(f"ALTER ROLE {self._superuser} PASSWORD '{password}'")
        rules = self.folder / "data" / "pg_hba.conf"
        rules.write_text("local all all scram-sha-256\n")
        self._execute("SELECT pg_reload_conf()")

    def drop(self, database: str) -> None:
        self._execute(f'DROP DATABASE "{database}" WITH (FORCE)')

    def _execute(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(self._conninfo("postgres"), autocommit=True) as connection:
            connection.execute(statement)

    def _conninfo(self, database: str) -> str:
        return f"host={self.folder} user={self._superuser} dbname={database}"

    def _as_user(self) -> list[str]:
        if self._user is None:
            return []
        return ["setpriv", f"--reuid={self._user.pw_uid}", f"--regid={self._user.pw_gid}", "--clear-groups"]


def in_memory() -> str | None:
    """Where files need no disk, which tests that run beside keep busy; None where there is too little room."""
    place = Path("/dev/shm")
    return str(place) if place.is_dir() and shutil.disk_usage(place).free > ROOM_BYTES else None


@contextmanager
def running_server(*, durable: bool = False) -> Iterator[PostgresServer]:
    """A started server; its files are gone afterwards.

    Args:
        durable: On a disk, and all that is committed is there after a crash.
    """
    skip_without_server()
    # Not below pytest's own folders: others may not enter those, and the path of a socket is short.
    folder = Path(tempfile.mkdtemp(prefix="stp-pg-", dir=None if durable else in_memory()))
    folder.chmod(0o755)
    server = PostgresServer(folder, durable=durable)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A server with a migrated template."""
    from steptune.service.database import migrate

    with running_server() as server:
        migrate(server.create(TEMPLATE))
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A migrated database of its own."""
    name = f"test_{time.monotonic_ns()}"
    yield postgres_server.create(name, TEMPLATE)
    postgres_server.drop(name)


@pytest.fixture
def empty_postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A database without tables."""
    name = f"empty_{time.monotonic_ns()}"
    yield postgres_server.create(name)
    postgres_server.drop(name)
