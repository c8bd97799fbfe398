"""Uploads on a worker."""

from builders import sample_study

from steptune.service.artifacts import ArtifactStore
from steptune.service.queue.records import Source
from steptune.service.worker.sources import fetch_source


def test_arguments_say_nothing_about_the_name_of_the_file(tmp_path) -> None:
    """Also where they hold a colon: such uploads were taken once."""
    artifacts = ArtifactStore(tmp_path / "artifacts")
    kept = artifacts.put([b"class Mine: ..."])
    source = Source(kind="file", entry="mine.py:Mine?path=a:b", digest=kept.digest)
    found = fetch_source(source, sample_study(), artifacts, tmp_path / "source")
    assert found == f"{tmp_path}/source/mine.py:Mine?path=a:b"
    assert [path.name for path in (tmp_path / "source").iterdir()] == ["mine.py"]
