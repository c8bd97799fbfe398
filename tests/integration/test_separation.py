"""Attacks of a submitted workload on its worker: by the worker's user and capabilities, and by level.

The worker is a process as it runs in production: as root; as in docker-compose.yml, an ordinary user with the four
capabilities that change users; and as an ordinary user without any.
"""

import functools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from marked import none_left
from postgres import PostgresServer, running_server
from sites import Site
from sqlalchemy import make_url, text
from trial_builders import reference

from steptune.service.access.authentication import Access
from steptune.service.database import migrate, open_store
from steptune.service.queue import StudyQueue
from steptune.service.settings import Settings
from steptune.service.settings.scopes import Scope
from steptune.tuner.records import StudyState

UID = 10001
ORDINARY = ("setpriv", "--reuid", f"{UID}", "--regid", f"{UID}", "--clear-groups")
CAPABILITIES = "+setuid,+setgid,+chown,+kill"
PREFIXES = {
    "root": (),
    "compose": (
        *("setpriv", f"--bounding-set=-all,{CAPABILITIES}", "--inh-caps=-all", "--no-new-privs", "--"),
        *(*ORDINARY, f"--inh-caps=-all,{CAPABILITIES}", f"--ambient-caps={CAPABILITIES}", "--"),
    ),
    "bare root": ("setpriv", f"--bounding-set=-all,{CAPABILITIES}", "--inh-caps=-all", "--no-new-privs", "--"),
    "ordinary": (*ORDINARY, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--"),
}
RUNS = [("root", "limits"), ("root", "bubblewrap"), ("compose", "limits"), ("ordinary", "bubblewrap")]
MORE_RUNS = [("compose", "bubblewrap"), ("bare root", "limits"), ("bare root", "bubblewrap")]
"""They take half a minute each, and differ little from the others."""

pytestmark = [
    pytest.mark.xdist_group("isolation"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs util-linux"),
]


@functools.cache
def interpreter() -> str:
    """One that an ordinary user can run with the packages of the tests; the tests' own may lie in root's home."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for python in filter(None, (sys.executable, shutil.which(version, path="/usr/bin:/usr/local/bin"))):
        # By a shell: setpriv itself still has the rights of root when it looks for a program.
        command = [*PREFIXES["ordinary"], "sh", "-c", 'exec "$0" -c "import torch"', python]
        if subprocess.run(command, env=packages(), capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip("no interpreter here that an ordinary user can run with torch")


def packages() -> dict[str, str]:
    found = [str(Path(__file__).parents[2] / "src"), *(path for path in sys.path if path.endswith("-packages"))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found)}


class Attacked(Site):
    """A site whose worker is another user, and with it the secrets that a trial is after."""

    def __init__(self, folder: Path, who: str, level: str) -> None:
        super().__init__(folder)
        self.who, self.level = who, level
        self.prefix = PREFIXES[who]
        self.python = interpreter()
        self.password = folder / "password"
        self.password.write_text("secret-of-the-database")
        self.password.chmod(0o400)
        for name in ("artifacts/ab/cdef", "studies/another/source/train.py", "uploads/one"):
            path = folder / "data" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("submitted by somebody else")
        self.temporary.chmod(0o1777)
        if who in ("compose", "ordinary"):
            subprocess.run(["chown", "-R", f"{UID}:{UID}", str(folder)], check=True)
        folder.chmod(0o755)

    def environment(self) -> dict[str, str]:
        secrets = {
            "STEPTUNE_DATABASE_PASSWORD_FILE": str(self.password),
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-store",
            "STEPTUNE_STUDY_DISK_BYTES": str(64 << 20),
            "STEPTUNE_STUDY_MEMORY_BYTES": str(1 << 30),
        }
        return {**super().environment(), **packages(), **secrets, "HOME": "/nonexistent"}

    def run_worker(self, *arguments: str, level: str | None = None) -> subprocess.CompletedProcess[str]:
        """A worker that runs what is there, and its end."""
        command = [*self.prefix, self.python, "-m", "steptune", "worker", "--once", "--cpus", "0,1", *arguments]
        return subprocess.run(
            [*command, "--isolation", level or self.level],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )

    @property
    def targets(self) -> list[Path]:
        data = self.folder / "data"
        return [
            *(self.folder / f"steptune.db{ending}" for ending in ("", "-wal", "-shm")),
            self.password,
            data / "artifacts/ab/cdef",
            data / "studies/another/source/train.py",
            data / "uploads/one",
            Path("/etc/shadow"),
            Path.home() / ".bashrc",
        ]

    def attack(self, **arguments: str) -> dict:
        workload = reference("thief", "Thief", paths="|".join(map(str, self.targets)), **arguments)
        study_id = self.submit(workload, trials=1)
        done = self.run_worker()
        self.study = self.folder / "data" / "studies" / study_id
        logs = "\n".join(path.read_text(errors="replace") for path in sorted((self.study / "logs").glob("*.log")))
        found = re.search("^SEEN (.*)$", logs, re.MULTILINE)
        assert found, done.stderr + logs
        assert self.entry(study_id).state is StudyState.FAILED, (done.stderr, self.entry(study_id).message, logs)
        return json.loads(found[1])


ALL_RUNS = [*RUNS, *(pytest.param(run, marks=pytest.mark.soak) for run in MORE_RUNS)]


@pytest.fixture(scope="module", params=ALL_RUNS, ids=" ".join)
def attacked(request: pytest.FixtureRequest) -> Iterator[tuple[Attacked, dict]]:
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as folder:
        site = Attacked(Path(folder), *request.param)
        try:
            yield site, site.attack()
        finally:
            none_left(site.mark)
            site.close()


@pytest.mark.parametrize(("who", "may"), [("root", True), ("compose", False), ("bare root", False)])
def test_the_bounding_set_is_emptied_only_where_that_is_permitted(who: str, may: bool) -> None:
    """The setpriv of Debian 13 ends with an error elsewhere, and no trial would start."""
    command = [
        *PREFIXES[who],
        interpreter(),
        "-c",
        "from steptune.service.isolation.users import become; print(*become(61184))",
    ]
    done = subprocess.run(command, env=packages(), capture_output=True, text=True, check=True)
    assert ("--bounding-set=-all" in done.stdout.split()) is may
    status = [*PREFIXES[who], *done.stdout.split(), "cat", "/proc/self/status"]
    seen = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    held = dict(line.split(":\t", 1) for line in seen.splitlines())
    assert {int(held[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}
    assert held["NoNewPrivs"] == "1"


class TestSubmitter:
    def test_reads_writes_and_links_nothing_of_the_service_or_of_others(self, attacked) -> None:
        _, seen = attacked
        assert (seen["read"], seen["written"], seen["linked"], seen["users"]) == ([], [], [], [])

    def test_reaches_no_process_but_its_own(self, attacked) -> None:
        site, seen = attacked
        assert seen["processes"] == {}
        if site.level == "bubblewrap":
            assert set(seen["command_lines"]) <= {1}  # of bubblewrap itself
        elif site.who == "root":
            assert seen["command_lines"] == []

    def test_inherits_neither_secrets_nor_descriptors(self, attacked) -> None:
        site, seen = attacked
        assert "secret-of" not in json.dumps(seen["environment"])
        assert not any(
            str(site.folder / name) in text for name in ("steptune.db", "password") for text in seen["descriptors"]
        )

    def test_sees_nothing_of_the_worker_in_what_runs_as_its_user(self, attacked) -> None:
        """Commands count and remove its files meanwhile."""
        _, seen = attacked
        assert "secret-of" not in json.dumps(seen["helpers"])
        assert "STEPTUNE_DATABASE" not in json.dumps(seen["helpers"])

    def test_is_a_user_without_rights_for_good(self, attacked) -> None:
        site, seen = attacked
        assert 0 not in seen["ids"]
        assert site.who == "ordinary" or UID not in seen["ids"]
        assert [int(seen["status"][name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")] == [0, 0, 0, 0]
        assert (seen["status"]["NoNewPrivs"], seen["status"]["Seccomp"]) == ("1", "2")
        assert not seen["user_namespace"]
        assert not seen["setuid_root"]
        assert seen["core"] == 0

    def test_leaves_nothing_behind(self, attacked) -> None:
        site, seen = attacked
        assert seen["left"]
        assert [path for path in map(Path, seen["left"]) if path.exists()] == []
        owner = site.folder.stat().st_uid
        assert {path.lstat().st_uid for path in site.study.rglob("*")} <= {owner}
        assert list(site.temporary.glob("steptune-[!u]*")) == []

    def test_the_service_keeps_its_files_to_itself(self, attacked) -> None:
        site, _ = attacked
        for path in [site.folder / "steptune.db", *(site.folder / "data" / "studies").iterdir()]:
            assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0, path
        for name in ("artifacts", "uploads"):
            assert stat.S_IMODE((site.folder / "data" / name).stat().st_mode) == 0o700


class OnPostgres(Attacked):
    """Attacked site on a PostgreSQL server that asks for a password; its socket is open to everybody."""

    PASSWORD = "secret-of-the-database"

    def __init__(self, folder: Path, who: str, level: str, server: PostgresServer) -> None:
        super().__init__(folder, who, level)
        self.store.close()
        self.server = server
        self.url = server.create("attacked")
        migrate(self.url)
        server.ask_for_passwords(self.PASSWORD)
        ours = make_url(self.url).set(password=self.PASSWORD).render_as_string(hide_password=False)
        self.store = open_store(ours)
        self.queue = StudyQueue(self.store.engine)
        Access(self.store.engine, Settings(_env_file=None, database_url=ours)).users.create("mallory", [Scope.SUBMIT])

    def scopes(self) -> str:
        with self.store.engine.connect() as connection:
            return connection.execute(text("SELECT scopes FROM users")).scalar_one()


ON_POSTGRES = [
    ("compose", "limits"),
    *(pytest.param(run, marks=pytest.mark.soak) for run in RUNS if run[0] != "compose"),
]


@pytest.fixture(scope="module", params=ON_POSTGRES, ids=" ".join)
def on_postgres(request: pytest.FixtureRequest) -> Iterator[tuple[OnPostgres, dict]]:
    with running_server() as server, tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as folder:
        site = OnPostgres(Path(folder), request.param[0], request.param[1], server)
        try:
            seen = site.attack(database=f"host={server.folder}|user=steptune|dbname=attacked")
            yield site, seen
        finally:
            none_left(site.mark)
            site.close()


class TestSubmitterOnPostgres:
    def test_does_not_become_an_administrator(self, on_postgres) -> None:
        site, seen = on_postgres
        assert seen["postgres"]["written"] == []
        expected = "No such file or directory" if site.level == "bubblewrap" else "password authentication failed"
        assert any(expected in said for said in seen["postgres"]["said"]), seen["postgres"]
        assert site.scopes() == "submit"

    def test_reads_neither_the_password_nor_where_it_is(self, on_postgres) -> None:
        site, seen = on_postgres
        told = json.dumps([seen["helpers"], seen["environment"], seen["descriptors"]])
        assert OnPostgres.PASSWORD not in told
        assert str(site.password) not in told
        assert str(site.password) not in seen["read"]
        assert seen["processes"] == {}


HOARDED = [run for run in [*RUNS, *MORE_RUNS] if run != ("compose", "limits")]


@pytest.mark.parametrize(
    ("who", "level"), [("compose", "limits"), *(pytest.param(*run, marks=pytest.mark.soak) for run in HOARDED)]
)
def test_files_in_memory_that_nobody_has_mapped_count(who: str, level: str) -> None:
    """Whatever the worker may see of processes that are not its user's."""
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as folder:
        site = Attacked(Path(folder), who, level)
        try:
            study_id = site.submit(reference("thief", "Hoarder"), trials=1)
            done = site.run_worker()
            entry = site.entry(study_id)
            assert entry.state is StudyState.FAILED, (done.stderr, entry.message)
            assert "STEPTUNE_STUDY_MEMORY_BYTES" in entry.message
        finally:
            none_left(site.mark)
            site.close()


class TestWorkerThatCannotSeparate:
    @pytest.fixture
    def ordinary(self) -> Iterator[Attacked]:
        with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as folder:
            site = Attacked(Path(folder), "ordinary", "limits")
            yield site
            site.close()

    def test_refuses_limits_for_a_service_that_asks_who_users_are(self, ordinary: Attacked) -> None:
        done = ordinary.run_worker()
        assert done.returncode == 2
        assert "SETUID, SETGID, CHOWN and KILL" in done.stderr

    def test_takes_none_where_that_is_said_in_words(self, ordinary: Attacked) -> None:
        assert ordinary.run_worker(level="none").returncode == 0
