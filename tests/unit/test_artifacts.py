"""Files by their content, in a directory and in a place that fsspec knows."""

import errno
import hashlib
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from steptune.service.artifacts import ArtifactStore, open_artifacts
from steptune.service.artifacts.files import RemoteFiles
from steptune.service.artifacts.lock import CollectionBusyError, FileLock, PostgresLock
from steptune.service.artifacts.opening import files_at
from steptune.service.artifacts.store import ArtifactTooLargeError
from steptune.service.settings import Settings
from steptune.tuner.errors import MissingDependencyError, StorageFullError, StoreError, StoreUnavailableError
from steptune.tuner.records import new_id

CONTENT = b"a trace\n" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def local(tmp_path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture(params=["directory", "file", "memory"])
def artifacts(request, tmp_path) -> Iterator[ArtifactStore]:
    """Store at a path, and at URLs, with the same behaviour."""
    name = new_id()
    places = {"directory": tmp_path / "artifacts", "file": f"file://{tmp_path}/by-url", "memory": f"memory://{name}"}
    yield ArtifactStore(files_at(places[request.param]), FileLock(tmp_path / "lock"))
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)


def pieces(*texts: bytes) -> Iterator[bytes]:
    yield from texts


def test_the_clock_is_that_of_the_files(artifacts):
    """A file put between two readings of the clock lies between them, and reading leaves nothing."""
    before = artifacts.clock_s()
    artifacts.put([b"content"])
    (file,) = artifacts._files.list()
    assert before <= file.modified_s <= artifacts.clock_s()


class TestPutting:
    @pytest.mark.parametrize("move", [False, True])
    def test_a_file_is_found_by_its_digest(self, artifacts, source, move):
        """The digest is the SHA-256 of the content."""
        kept = artifacts.put(source, move=move)
        assert (kept.digest, kept.size_bytes) == (DIGEST, len(CONTENT))
        with artifacts.open(DIGEST) as file:
            assert file.read() == CONTENT
            file.seek(8)
            assert file.read(7) == b"a trace"
        with artifacts.local_copy(DIGEST) as path:
            assert path.read_bytes() == CONTENT
        assert source.exists() is not move

    def test_a_stream_is_hashed_as_it_comes(self, artifacts):
        """An upload need not be a file first."""
        kept = artifacts.put(pieces(CONTENT[:100], b"", CONTENT[100:]), limit=len(CONTENT))
        assert kept.digest == DIGEST

    def test_the_same_content_is_kept_once(self, artifacts, source):
        """Ten trials with the same trace cost one file."""
        artifacts.put(source)
        artifacts.put(pieces(CONTENT))
        artifacts.put(source, move=True)
        assert artifacts.total_bytes() == len(CONTENT)
        assert [file.name for file in artifacts.list()] == [DIGEST]
        assert not source.exists()

    def test_too_much_is_refused_and_nothing_is_left(self, artifacts):
        """At the first piece that is too much, not at the end."""
        asked = []

        def endless() -> Iterator[bytes]:
            while True:
                asked.append(1)
                yield bytes(100)

        with pytest.raises(ArtifactTooLargeError, match="at most 1,000 bytes"):
            artifacts.put(endless(), limit=1000)
        assert len(asked) == 11
        assert artifacts.delete_abandoned(time.time() + 1000) == 0
        assert artifacts.total_bytes() == 0

    def test_a_stream_that_breaks_leaves_nothing(self, artifacts):
        """The client hung up."""

        def broken() -> Iterator[bytes]:
            yield CONTENT
            raise ConnectionResetError

        with pytest.raises((StoreError, ConnectionResetError)):
            artifacts.put(broken())
        assert list(artifacts.list()) == []
        assert artifacts.delete_abandoned(time.time() + 1000) == 0

    def test_a_missing_source_is_named(self, artifacts, tmp_path):
        """The message is about the source, not about the store."""
        for move in (False, True):
            with pytest.raises(StoreError, match=r"absent\.json cannot be used: .*No such file"):
                artifacts.put(tmp_path / "absent.json", move=move)

    def test_moving_within_a_file_system_copies_nothing(self, local, source):
        """A trace has hundreds of megabytes: the kept file is the same file."""
        inode = source.stat().st_ino
        local.put(source, move=True)
        with local.local_copy(DIGEST) as path:
            assert path.stat().st_ino == inode

    @pytest.mark.parametrize("move", [False, True])
    def test_a_full_disk_leaves_nothing_half_written(self, local, source, tmp_path, monkeypatch, move):
        """The message says to free space; the source is still there."""

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(StorageFullError, match=r"artifacts or the disk that holds it is full.*free some space"):
            local.put(source, move=move)
        assert source.read_bytes() == CONTENT
        assert [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()] == []

    def test_what_a_killed_process_left_is_removed_when_it_is_old(self, local, tmp_path):
        """And is never taken for an artifact."""
        incoming = tmp_path / "artifacts" / "incoming"
        incoming.mkdir(parents=True)
        (incoming / "half").write_bytes(b"x")
        assert list(local.list()) == []
        assert local.delete_abandoned(time.time() - 1000) == 0
        assert local.delete_abandoned(time.time() + 1000) == 1
        assert list(incoming.iterdir()) == []


class TestGiving:
    def test_a_deleted_file_is_gone(self, artifacts, source):
        """Deleting what is gone is no error."""
        artifacts.put(source)
        artifacts.delete(DIGEST)
        artifacts.delete(DIGEST)
        assert artifacts.total_bytes() == 0
        for use in (artifacts.open, artifacts.size_bytes, lambda digest: artifacts.local_copy(digest).__enter__()):
            with pytest.raises(StoreError, match=f"there is no artifact {DIGEST}"):
                use(DIGEST)

    def test_what_was_changed_since_it_was_put_is_not_given(self, artifacts, source):
        """It would be unpacked and run: a place that others can write to decides nothing."""
        artifacts.put(source)
        (file,) = artifacts._files.list()
        artifacts._files.delete(file.name)
        artifacts._files.write(file.name, [b"another's code\n"])
        with pytest.raises(StoreError, match="has been changed"), artifacts.local_copy(DIGEST):
            pass

    def test_an_empty_store_takes_no_space(self, artifacts):
        """Its directory need not exist."""
        assert artifacts.total_bytes() == 0

    @pytest.mark.parametrize("digest", ["", "ab", "../../etc/passwd", DIGEST.upper(), DIGEST + "0", DIGEST + "\n"])
    def test_only_a_digest_names_a_file(self, artifacts, digest):
        """A path that someone sends in is not followed."""
        for use in (artifacts.open, artifacts.size_bytes, artifacts.delete):
            with pytest.raises(StoreError, match="a digest must be the 64"):
                use(digest)


class TestPlaces:
    def test_settings_name_the_place(self, tmp_path):
        """The default is the data directory."""
        settings = Settings(data_directory=tmp_path, artifacts_url=None)
        assert open_artifacts(settings).place == str(tmp_path / "artifacts")
        elsewhere = settings.model_copy(update={"artifacts_url": "memory://elsewhere"})
        assert open_artifacts(elsewhere).place == "memory://elsewhere"

    def test_a_url_without_its_library_names_the_extra(self):
        """S3 is an extra; where it is installed, no connection is made before it is used."""
        try:
            import s3fs  # noqa: F401
        except ImportError:
            with pytest.raises(MissingDependencyError, match=r"s3://bucket.* needs a library: .*steptune\[s3\]"):
                files_at("s3://bucket/folder")
        else:
            assert files_at("s3://bucket/folder").place == "s3://bucket/folder"

    def test_a_url_that_nothing_knows_is_refused_without_its_password(self):
        with pytest.raises(StoreError, match="cannot hold artifacts") as refused:
            files_at("gopher://me:secret@host/folder")
        assert "secret" not in str(refused.value)


class TestPlacesElsewhere:
    @pytest.fixture
    def files(self):
        return RemoteFiles(f"memory://{uuid.uuid4().hex}")

    @pytest.mark.parametrize(
        "error",
        [
            ConnectionResetError("reset by peer"),
            TimeoutError("timed out"),
            OSError(errno.EBUSY, "SlowDown"),
            type("EndpointConnectionError", (type("ConnectionError", (Exception,), {}),), {})("no endpoint"),
        ],
    )
    def test_what_cannot_be_reached_may_be_later(self, files, monkeypatch, error):
        monkeypatch.setattr(files._system, "info", raising(error))
        with pytest.raises(StoreUnavailableError, match=r"memory://.* cannot be reached at this moment"):
            files.find("ab/cdef")

    @pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Forbidden"), ValueError("no bucket")])
    def test_what_may_not_be_used_may_not_be_later(self, files, monkeypatch, error):
        monkeypatch.setattr(files._system, "info", raising(error))
        with pytest.raises(StoreError, match="cannot be used") as refused:
            files.find("ab/cdef")
        assert not isinstance(refused.value, StoreUnavailableError)

    def test_a_full_place_is_full(self, files, monkeypatch):
        monkeypatch.setattr(files._system, "info", raising(OSError(errno.ENOSPC, "full")))
        with pytest.raises(StorageFullError):
            files.find("ab/cdef")


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


class TestLock:
    @pytest.fixture(params=["file", "postgresql"])
    def lock(self, request, tmp_path):
        """Locks for one host and for several, with the same rules of who excludes whom."""
        if request.param == "file":
            return FileLock(tmp_path / "lock")
        return PostgresLock(request.getfixturevalue("postgres_url"))

    def test_a_server_that_is_cut_off_is_noticed(self, postgres_url):
        """Every other connection to the database notices it too."""
        with PostgresLock(postgres_url)._connected() as connection:
            parameters = connection.connection.driver_connection.info.get_parameters()
        assert {"connect_timeout", "keepalives_idle", "tcp_user_timeout"} <= parameters.keys()

    def test_putting_excludes_collecting_and_nobody_else(self, lock, monkeypatch):
        """A collection that finds no pause gives up, and says so."""
        monkeypatch.setattr("steptune.service.artifacts.lock.COLLECTION_PATIENCE_S", 0.05)
        with lock.shared(), lock.shared(), pytest.raises(CollectionBusyError, match="next run"), lock.exclusive():
            pass
        with lock.exclusive(), pytest.raises(CollectionBusyError), lock.exclusive():
            pass

    def test_putting_waits_for_the_end_of_a_collection(self, lock):
        """It is a matter of milliseconds."""
        held = threading.Event()

        def put() -> None:
            with lock.shared():
                held.set()

        thread = threading.Thread(target=put)
        with lock.exclusive():
            thread.start()
            assert not held.wait(0.1)
        assert held.wait(30)
        thread.join()
