"""A backup holds what the database held at one moment, and comes back whole or not at all."""

import hashlib
import io
import json
import sqlite3
import stat
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from builders import (
    STUDY_ID,
    TRIAL_ID,
    sample_decision,
    sample_recommendation,
    sample_result,
    sample_study,
    sample_trial,
)
from old_schemas import fill
from sqlalchemy import select

from steptune.service.artifacts import ArtifactStore
from steptune.service.backups import back_up, restore
from steptune.service.connections import create_engine_for, reading
from steptune.service.database import migrate, open_store, revision_of
from steptune.service.models import Base
from steptune.tuner.errors import MissingDependencyError, SchemaTooNewError, StoreError
from steptune.tuner.records import new_id

TRACE = b"a trace" * 1000


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def new_url(kind, request, tmp_path) -> Iterator[Callable[[], str]]:
    """URLs of databases without tables."""
    server = request.getfixturevalue("postgres_server") if kind == "postgresql" else None
    made: list[str] = []

    def create() -> str:
        made.append(f"backup_{new_id()}")
        return f"sqlite:///{tmp_path}/{made[-1]}.db" if server is None else server.create(made[-1])

    yield create
    for name in made if server is not None else ():
        server.drop(name)


@pytest.fixture
def artifacts(tmp_path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def url(new_url, artifacts) -> str:
    """URL of a database with a study, and a trace of it."""
    url = new_url()
    store = open_store(url)
    store.create_study(sample_study())
    store.begin_trials([sample_trial()])
    with artifacts.putting([TRACE]) as file:
        store.add_artifact(STUDY_ID, TRIAL_ID, "trace", file.digest, file.size_bytes)
    store.complete_trials([sample_result()])
    store.replace_decisions(STUDY_ID, [sample_decision()])
    store.save_recommendation(sample_recommendation())
    store.add_event(STUDY_ID, "state", {"text": "é"})
    store.close()
    return url


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "backup.tar"


@pytest.fixture
def elsewhere(tmp_path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "elsewhere")


def rows(url: str) -> dict[str, list[dict[str, object]]]:
    engine = create_engine_for(url)
    with reading(engine) as session:
        found = {
            table.name: [dict(row._mapping) for row in session.execute(select(table).order_by(*table.primary_key))]
            for table in Base.metadata.sorted_tables
        }
    engine.dispose()
    return found


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def write_members(path: Path, contents: dict[str, bytes], **kinds: bytes) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size, member.type = len(content), kinds.get(name, tarfile.REGTYPE)
            tar.addfile(member, io.BytesIO(content))


class TestRoundTrip:
    def test_everything_comes_back_into_an_empty_database(self, url, new_url, artifacts, elsewhere, path):
        """Every row, every file, and the counters behind the numbers of new rows."""
        assert back_up(url, artifacts, path).num_artifacts == 1
        target = new_url()
        report = restore(target, elsewhere, path)
        assert (report.is_current, report.num_artifacts) == (True, 1)
        assert rows(target) == rows(url)
        store = open_store(target)
        [artifact] = store.artifacts(STUDY_ID)
        with elsewhere.open(artifact.digest) as file:
            assert file.read() == TRACE
        store.add_event(STUDY_ID, "state", {})
        first, second = store.events(STUDY_ID)
        assert second.sequence > first.sequence
        store.close()

    def test_what_the_database_holds_is_replaced_only_when_forced(self, url, artifacts, path):
        """With everything that came after the backup."""
        back_up(url, artifacts, path)
        before = rows(url)
        store = open_store(url)
        store.create_study(sample_study(study_id="later"))
        after = rows(url)
        with pytest.raises(StoreError, match=r"already holds studies: .*--force"):
            restore(url, artifacts, path)
        assert rows(url) == after
        restore(url, artifacts, path, force=True)
        assert rows(url) == before
        store.create_study(sample_study(study_id="again"))  # whoever had it open goes on
        store.close()

    def test_a_file_is_replaced_only_when_forced_and_only_its_owner_reads_it(self, url, artifacts, path):
        """It holds what users submitted, and the hashes of their tokens."""
        path.write_text("something else")
        with pytest.raises(StoreError, match=r"backup\.tar exists: .*--force"):
            back_up(url, artifacts, path)
        assert path.read_text() == "something else"
        back_up(url, artifacts, path, force=True)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert [entry.name for entry in path.parent.iterdir() if entry.name.startswith(".backup")] == []

    def test_files_can_be_left_out(self, url, new_url, elsewhere, path):
        """The rows still come back."""
        back_up(url, None, path)
        assert set(members(path)) == {"manifest.json", "database"}
        target = new_url()
        assert restore(target, elsewhere, path).num_artifacts == 0
        assert rows(target) == rows(url)

    def test_a_file_that_is_gone_is_counted_and_stops_nothing(self, url, artifacts, path):
        """One lost trace must not cost the database."""
        [file] = artifacts.list()
        artifacts.delete(file.name)
        report = back_up(url, artifacts, path)
        assert (report.num_artifacts, report.num_missing) == (0, 1)

    def test_it_is_of_one_moment_though_the_database_is_written_to(self, url, new_url, artifacts, elsewhere, path):
        """Studies and their trials are written together, so a backup never has one without the other."""
        stop = threading.Event()

        def write() -> None:
            store = open_store(url)
            number = 0
            while not stop.is_set() and number < 300:
                number += 1
                store.create_study(sample_study(study_id=f"study-{number}"))
                store.begin_trials([sample_trial(trial_id=f"trial-{number}", study_id=f"study-{number}")])
            store.close()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for number in range(2):
                back_up(url, artifacts, path, force=True)
                target = new_url()
                restore(target, elsewhere, path)
                found = rows(target)
                studies, trials = len(found["studies"]), len(found["trials"])
                assert trials in (studies, studies - 1), number
        finally:
            stop.set()
            writer.join()


class TestRevisions:
    def test_an_older_schema_is_backed_up_and_restored_as_it_was(self, new_url, artifacts, elsewhere, path):
        """The copy that one makes before `steptune db upgrade`, also where the upgrade has been done meanwhile."""
        url = new_url()
        engine = create_engine_for(url)
        fill(engine, "0002")
        back_up(url, artifacts, path)
        migrate(engine)
        upgraded = rows(url)
        report = restore(url, elsewhere, path, force=True)
        assert (report.revision, report.is_current) == ("0002", False)
        assert revision_of(engine) == "0002"
        migrate(engine)
        engine.dispose()
        assert rows(url) == upgraded

    def test_a_backup_of_a_newer_version_is_refused(self, url, new_url, artifacts, elsewhere, path):
        """Before anything is touched."""
        back_up(url, artifacts, path)
        contents = members(path)
        manifest = json.loads(contents["manifest.json"]) | {"revision": "9999"}
        write_members(path, contents | {"manifest.json": json.dumps(manifest).encode()})
        with pytest.raises(SchemaTooNewError, match=r"backup\.tar is at revision '9999'.*install that version"):
            restore(new_url(), elsewhere, path)
        assert list(elsewhere.list()) == []

    def test_a_database_without_tables_is_not_backed_up(self, new_url, artifacts, path):
        """An empty backup would look like one."""
        with pytest.raises(StoreError, match="there is nothing to back up"):
            back_up(new_url(), artifacts, path)
        assert not path.exists()


def changed(contents: dict[str, bytes], name: str) -> dict[str, bytes]:
    content = contents[name]
    return contents | {name: bytes([content[0] ^ 1]) + content[1:]}


DAMAGES: dict[str, Callable[[dict[str, bytes]], dict[str, bytes]]] = {
    "its database differs from the one that was backed up": lambda c: changed(c, "database"),
    "the content of artifact .* does not match its digest": lambda c: changed(c, list(c)[2]),
    "'database' has .* bytes instead of": lambda c: c | {"database": b"short"},
    "expected 'manifest.json' next, found 'database'": lambda c: dict(list(c.items())[1:]),
    "next, found its end": lambda c: dict(list(c.items())[:2]),
    "expected 'artifacts/.*' next, found '../../escape'": lambda c: {
        **dict(list(c.items())[:2]),
        "../../escape": b"x",
    },
    "its manifest cannot be read": lambda c: c | {"manifest.json": b'{"format": 1}'},
}


class TestDamage:
    @pytest.fixture
    def backup(self, url, artifacts, path) -> dict[str, bytes]:
        back_up(url, artifacts, path)
        return members(path)

    @pytest.mark.parametrize("message", DAMAGES)
    def test_a_damaged_backup_replaces_nothing(self, backup, url, path, elsewhere, message):
        """The message says what is wrong with it."""
        write_members(path, DAMAGES[message](backup))
        before = rows(url)
        with pytest.raises(StoreError, match=rf"is damaged: .*{message}.*nothing was replaced"):
            restore(url, elsewhere, path, force=True)
        assert rows(url) == before

    def test_a_link_in_place_of_the_database_is_not_followed(self, backup, url, path, elsewhere):
        write_members(path, backup, database=tarfile.SYMTYPE)
        with pytest.raises(StoreError, match="expected 'database' next"):
            restore(url, elsewhere, path, force=True)

    def test_a_truncated_file_replaces_nothing(self, backup, url, path, elsewhere):
        """A full disk or a broken connection leaves such a file."""
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        before = rows(url)
        with pytest.raises(StoreError, match="nothing was replaced"):
            restore(url, elsewhere, path, force=True)
        assert rows(url) == before

    def test_another_file_is_no_backup(self, url, path, elsewhere):
        path.write_text("a text")
        with pytest.raises(StoreError, match="is not a backup"):
            restore(url, elsewhere, path, force=True)

    def test_a_later_format_is_named(self, backup, url, path, elsewhere):
        write_members(path, backup | {"manifest.json": b'{"format": 2, "new": true}'})
        with pytest.raises(StoreError, match="has format 2, but this version reads format 1"):
            restore(url, elsewhere, path, force=True)

    def test_a_database_that_cannot_be_loaded_leaves_what_was_there(self, backup, kind, url, path, elsewhere):
        """The digest is right, and the content is not of a database."""
        database = b"no database" * 1000
        manifest = json.loads(backup["manifest.json"])
        manifest["database"] = {"sha256": hashlib.sha256(database).hexdigest(), "size_bytes": len(database)}
        manifest_text = msgspec.json.encode(manifest)
        write_members(path, backup | {"manifest.json": manifest_text, "database": database})
        before = rows(url)
        with pytest.raises(StoreError):
            restore(url, elsewhere, path, force=True)
        assert rows(url) == before


class TestEngines:
    def test_a_backup_of_the_other_database_is_refused(self, tmp_path, url, kind, artifacts, elsewhere, path):
        """Rows are not translated."""
        back_up(url, artifacts, path)
        contents = members(path)
        other = {"sqlite": "postgresql", "postgresql": "sqlite"}[kind]
        manifest = json.loads(contents["manifest.json"]) | {"engine": other}
        write_members(path, contents | {"manifest.json": json.dumps(manifest).encode()})
        with pytest.raises(StoreError, match=f"is a backup of a {other} database"):
            restore(url, elsewhere, path, force=True)

    def test_missing_tools_are_named_with_their_package(self, postgres_url, artifacts, path, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(MissingDependencyError, match=r"pg_dump is not installed: .*postgresql-client"):
            back_up(postgres_url, artifacts, path)
        assert not path.exists()

    def test_a_password_is_not_on_the_command_line(self, postgres_url, artifacts, path, monkeypatch, tmp_path):
        """Other users of the machine can read that."""
        seen = tmp_path / "seen"
        tool = tmp_path / "pg_dump"
        tool.write_text(f'#!/bin/sh\necho "$@ password:$PGPASSWORD" > {seen}; echo no >&2; exit 1\n')
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        with pytest.raises(StoreError, match=r"pg_dump failed for .*: no") as refused:
            back_up(postgres_url.replace("steptune@", "steptune:secret@"), artifacts, path)
        arguments, _, password = seen.read_text().partition(" password:")
        assert "secret" not in arguments
        assert password.strip() == "secret"
        assert "secret" not in str(refused.value)

    def test_a_restore_that_was_killed_is_not_overwritten(self, postgres_url, artifacts, elsewhere, path):
        """The data that it had set aside may be the only copy."""
        back_up(postgres_url, artifacts, path)
        engine = create_engine_for(postgres_url)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE SCHEMA steptune_replaced")
        engine.dispose()
        with pytest.raises(StoreError, match="which an interrupted restore left behind"):
            restore(postgres_url, elsewhere, path, force=True)

    def test_a_backup_of_sqlite_is_one_file_without_a_log(self, tmp_path, artifacts, path):
        """It can be opened by itself."""
        url = f"sqlite:///{tmp_path}/steptune.db"
        migrate(url)
        back_up(url, artifacts, path)
        copy = tmp_path / "copy.db"
        copy.write_bytes(members(path)["database"])
        with closing(sqlite3.connect(copy)) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path) -> Iterator[None]:
    yield
    assert list(tmp_path.glob("tmp*")) == []
