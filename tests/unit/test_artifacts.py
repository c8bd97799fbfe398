"""Files by their content."""

import errno
import hashlib
from pathlib import Path

import pytest

from service.artifacts import ArtifactStore
from tuner.errors import StorageFull, StoreError

CONTENT = b"a trace\n" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def artifacts(tmp_path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


def test_a_file_is_found_by_its_digest(artifacts, source, tmp_path):
    """The digest is the SHA-256 of the content, and the place follows from it."""
    assert artifacts.put(source) == DIGEST
    assert artifacts.path(DIGEST) == tmp_path / "artifacts" / DIGEST[:2] / DIGEST[2:]
    assert artifacts.path(DIGEST).read_bytes() == CONTENT
    assert source.exists()


def test_moving_removes_the_source(artifacts, source):
    """Also where the content is kept already."""
    for _ in range(2):
        source.write_bytes(CONTENT)
        artifacts.put(source, move=True)
        assert not source.exists()
    assert artifacts.path(DIGEST).read_bytes() == CONTENT


def test_the_same_content_is_kept_once(artifacts, source):
    """Ten trials with the same trace cost one file."""
    artifacts.put(source)
    artifacts.put(source)
    assert artifacts.total_bytes() == len(CONTENT)


def test_a_deleted_file_is_gone(artifacts, source):
    """Deleting what is gone is no error."""
    artifacts.put(source)
    artifacts.delete(DIGEST)
    artifacts.delete(DIGEST)
    assert artifacts.total_bytes() == 0
    with pytest.raises(StoreError, match=f"there is no artifact {DIGEST}"):
        artifacts.path(DIGEST)


def test_an_empty_store_takes_no_space(artifacts):
    """Its directory need not exist."""
    assert artifacts.total_bytes() == 0


@pytest.mark.parametrize("digest", ["", "ab", "../../etc/passwd", DIGEST.upper(), DIGEST + "0", DIGEST + "\n"])
def test_only_a_digest_names_a_file(artifacts, digest):
    """A path that someone sends in is not followed."""
    with pytest.raises(StoreError, match="is not a digest"):
        artifacts.path(digest)


def test_a_missing_source_is_named(artifacts, tmp_path):
    """The message is about the source, not about the store."""
    with pytest.raises(StoreError, match=r"absent\.json cannot be used: .*No such file"):
        artifacts.put(tmp_path / "absent.json")


def test_a_full_disk_leaves_nothing_half_written(artifacts, source, tmp_path, monkeypatch):
    """The message says to free space; the source is still there."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageFull, match=r"artifacts is full.*free some space"):
        artifacts.put(source, move=True)
    assert source.exists()
    assert [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()] == []
