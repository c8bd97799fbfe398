"""The client: what is sent again and what is not, what refusals become, how streams go on, what is packed."""

import gzip
import subprocess
import sys
import tarfile
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from steptune.service.archives import ArchiveLimits, unpack
from steptune.service.cli.submit import _local
from steptune.service.client import (
    AccessRefusedError,
    Client,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    ServiceError,
    ServiceUnreachableError,
)
from steptune.service.client.packing import pack
from steptune.tuner.errors import ChoiceError, WorkloadRejectedError
from steptune.tuner.records import Event

ME = {"user_id": "u", "name": "ada", "scopes": ["read"], "token_id": None, "method": "token", "expires_at": None}
Answer = httpx.Response | Exception


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch) -> list[float]:
    """The lengths of the pauses that were made."""
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    return pauses


class Script:
    """A service that answers as it is told, one answer for each request; the last one again and again."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def client(self, token: str | None = "stp_a_b") -> Client:
        return Client("http://service/base", token, transport=httpx.MockTransport(self))


def problem(status: int, code: str = "", **more) -> httpx.Response:
    body = {"status": status, "code": code, "detail": f"{code} happened; do this", "request_id": "r1", **more}
    return httpx.Response(status, json=body, headers={"Content-Type": "application/problem+json"})


def ok(value: object) -> httpx.Response:
    return httpx.Response(200, content=msgspec.json.encode(value))


class TestRequests:
    def test_a_request_carries_the_token_and_goes_below_the_base_path(self):
        script = Script(ok(ME))
        with script.client() as client:
            assert client.me().name == "ada"
        [request] = script.requests
        assert str(request.url) == "http://service/base/api/v1/me"
        assert request.headers["Authorization"] == "Bearer stp_a_b"

    def test_all_pages_are_read_as_they_are_needed(self):
        """The second is not asked for before the first is used up."""
        profile = {"fingerprint": "f", "device_kind": "cpu", "label": "", "profile": _hardware()}
        pages = [{"items": [profile], "next_cursor": "c"}, {"items": [profile], "next_cursor": None}]
        script = Script(*map(ok, pages))
        with script.client() as client:
            found = client.hardware_profiles()
            next(found)
            assert len(script.requests) == 1
            assert len(list(found)) == 1
        assert script.requests[1].url.params["cursor"] == "c"

    def test_reading_is_tried_again_when_the_service_is_away(self, no_pauses):
        """With pauses that grow, or as long as it asks for."""
        busy = problem(503)
        busy.headers["Retry-After"] = "5"
        script = Script(httpx.ConnectError("refused"), busy, problem(502), ok(ME))
        with script.client() as client:
            client.me()
        assert len(script.requests) == 4
        assert no_pauses[1] == 5
        assert 0.1 <= no_pauses[0] <= 0.2
        assert 0.4 <= no_pauses[2] <= 0.8

    def test_it_gives_up_and_says_where_it_tried(self):
        script = Script(httpx.ConnectError("refused"))
        with (
            script.client() as client,
            pytest.raises(ServiceUnreachableError, match=r"http://service/base cannot be reached"),
        ):
            client.me()
        assert len(script.requests) == 5

    def test_what_is_posted_again_has_the_same_key(self):
        """Also while the service is still at work on the first one, whose answer was lost."""
        study = {"workload_id": "w", **dict.fromkeys(("owner_id", "kind", "name", "entry", "created_at"), "")}
        created = ok({**study, "digest": None, "size_bytes": 0})
        script = Script(httpx.ReadTimeout("slow"), problem(409, "request-in-progress"), created)
        with script.client() as client:
            client.name_workload("zoo:synthetic")
            client.name_workload("zoo:synthetic")
        first, *others = [request.headers["Idempotency-Key"] for request in script.requests]
        assert others[:2] == [first, first]
        assert others[2] != first

    def test_a_file_is_sent_whole_each_time(self, tmp_path):
        path = tmp_path / "train.py"
        path.write_text("class A: pass")
        info = {"workload_id": "w", **dict.fromkeys(("owner_id", "kind", "name", "entry", "created_at"), "")}
        script = Script(problem(503), ok({**info, "digest": None, "size_bytes": 0}))
        with script.client() as client:
            client.upload(path, entry="train.py:A")
        assert all(b"class A: pass" in request.content for request in script.requests)
        assert all(b'filename="train.py"' in request.content for request in script.requests)

    def test_a_change_is_sent_once(self):
        """It may have been made although the answer was lost; a second time it could undo another's."""
        script = Script(httpx.ReadTimeout("slow"))
        with script.client() as client, pytest.raises(ServiceUnreachableError):
            client.change("s", title="x")
        assert len(script.requests) == 1

    def test_what_is_gone_when_deleted_again_was_deleted(self):
        """But what never was there is not found."""
        with Script(httpx.ReadTimeout("slow"), problem(404)).client() as client:
            client.delete("s")
        with Script(problem(404, "study-not-found")).client() as client, pytest.raises(NotFoundError):
            client.delete("s")

    @pytest.mark.parametrize(
        ("status", "kind"),
        [
            (400, InvalidRequestError),
            (401, AccessRefusedError),
            (403, AccessRefusedError),
            (404, NotFoundError),
            (409, ConflictError),
            (412, ConflictError),
            (413, InvalidRequestError),
            (422, InvalidRequestError),
            (500, ServiceError),
        ],
    )
    def test_a_problem_is_an_exception_with_its_text(self, status, kind):
        """Not tried again: asking once more changes nothing."""
        script = Script(problem(status, "it", context={"scope": "submit"}))
        with script.client() as client, pytest.raises(kind, match="it happened; do this") as refused:
            client.me()
        assert refused.value.problem.context == {"scope": "submit"}
        assert len(script.requests) == 1

    def test_an_answer_of_something_else_is_named(self):
        """A proxy's page, or another service at that address."""
        with (
            Script(httpx.Response(404, text="<html>")).client() as client,
            pytest.raises(NotFoundError, match="answered 404"),
        ):
            client.me()
        with (
            Script(httpx.Response(200, text="<html>")).client() as client,
            pytest.raises(ServiceUnreachableError, match="check that this is the address of a Steptune service"),
        ):
            client.me()

    @pytest.mark.parametrize("token", ["a\nb", "a b", "ä"])
    def test_what_is_no_token_is_not_sent(self, token):
        with pytest.raises(ChoiceError, match="Steptune's tokens begin with stp_") as refused:
            Client("http://service", token)
        assert token not in str(refused.value)

    def test_an_address_without_a_scheme_is_refused(self):
        with pytest.raises(ChoiceError, match="write it like https://host:8700"):
            Client("service:8700")


def _hardware() -> dict:
    return {"devices": [], "num_cores": 1, "cpu_name": "", "memory_bytes": 1}


def stream(*numbers: int, broken: bool = False) -> httpx.Response:
    def content() -> Iterator[bytes]:
        yield b"retry: 2000\n\n: still here\n\n"
        for number in numbers:
            event = Event(sequence=number, study_id="s", at="", kind="k", data={"text": "é\n"})
            yield b"id: %d\nevent: k\ndata: %s\n\n" % (number, msgspec.json.encode(event))
        if broken:
            raise httpx.ReadError("gone")

    return httpx.Response(200, content=content(), headers={"Content-Type": "text/event-stream"})


class TestEvents:
    def test_a_broken_stream_goes_on_after_the_last_event(self):
        """Nothing is missed or repeated, and 204 is the end."""
        script = Script(stream(3, 4, broken=True), httpx.ConnectError("away"), stream(5), httpx.Response(204))
        with script.client() as client:
            assert [event.sequence for event in client.events("s")] == [3, 4, 5]
        assert [request.headers["Last-Event-ID"] for request in script.requests] == ["0", "4", "4", "5"]

    def test_a_refusal_ends_it(self):
        """Coming back would not help."""
        with Script(problem(404, "study-not-found")).client() as client, pytest.raises(NotFoundError):
            list(client.events("s"))

    def test_a_service_that_stays_away_is_given_up(self):
        script = Script(httpx.ConnectError("away"))
        with script.client() as client, pytest.raises(ServiceUnreachableError):
            list(client.events("s"))
        assert len(script.requests) == 10

    def test_waiting_ends_when_the_time_is_over(self):
        """Though the stream goes on."""
        clock = Script(stream(1))
        with clock.client() as client:
            client.study = lambda study_id: type("S", (), {"state": type("V", (), {"value": "running"})})()
            with pytest.raises(TimeoutError, match="has not ended within 0 s: it is running"):
                client.wait("s", timeout_s=0)


class TestDownloads:
    def test_a_file_is_written_whole_or_not_at_all(self, tmp_path):
        """One that broke off on the way is not mistaken for the file."""
        script = Script(httpx.Response(200, content=iter([b"trace"])))
        with script.client() as client:
            assert client.download(1, tmp_path / "t.gz").read_bytes() == b"trace"
        short = httpx.Response(200, content=iter([b"tra"]), headers={"Content-Length": "5"})
        with Script(short).client() as client, pytest.raises(ValueError, match=r"incomplete \(3 of 5 bytes\)"):
            client.download(1, tmp_path / "u.gz")
        assert [path.name for path in tmp_path.iterdir()] == ["t.gz"]


class TestPacking:
    @pytest.fixture
    def folder(self, tmp_path):
        root = tmp_path / "project"
        for name in ("train.py", "lib/net.py", ".git/config", ".env", "__pycache__/a.pyc", "lib/b.pyc", "run.sh"):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        (root / "run.sh").chmod(0o755)
        (root / "link").symlink_to("/etc/passwd")
        return root

    def test_what_is_hidden_cached_or_a_link_stays_out_and_is_listed(self, folder, tmp_path):
        packed = pack(folder, tmp_path / "p.tar.gz")
        assert packed.files == ("lib/net.py", "run.sh", "train.py")
        assert set(packed.left_out) == {".env", ".git", "__pycache__", "lib/b.pyc", "link"}

    def test_the_database_of_local_studies_stays_at_home(self, folder, tmp_path):
        """Neither does it get to others, nor does a study on the laptop make the folder another upload."""
        pack(folder, tmp_path / "a.tar.gz")
        for name in ("steptune.db", "steptune.db-wal", "steptune.db-shm"):
            (folder / name).write_bytes(b"studies")
        packed = pack(folder, tmp_path / "b.tar.gz")
        assert {"steptune.db", "steptune.db-wal", "steptune.db-shm"} <= set(packed.left_out)
        assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()

    def test_the_same_folder_gives_the_same_bytes(self, folder, tmp_path):
        """Whenever, and by whomever, its files were written."""
        pack(folder, tmp_path / "a.tar.gz")
        (folder / "train.py").touch()
        (folder / "lib" / "net.py").chmod(0o600)
        pack(folder, tmp_path / "b.tar.gz")
        assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
        with tarfile.open(fileobj=gzip.open(tmp_path / "a.tar.gz")) as tar:
            assert {(member.mtime, member.uid, member.uname) for member in tar} == {(0, 0, "")}

    def test_the_service_unpacks_what_was_packed(self, folder, tmp_path):
        pack(folder, tmp_path / "p.tar.gz")
        unpack(tmp_path / "p.tar.gz", tmp_path / "out")
        assert (tmp_path / "out" / "lib" / "net.py").read_text() == "lib/net.py"
        assert (tmp_path / "out" / "run.sh").stat().st_mode & 0o111

    @pytest.mark.parametrize(
        ("limits", "message"),
        [
            (ArchiveLimits(members=2), "3 files, but the service unpacks at most 2"),
            (ArchiveLimits(file_bytes=5), "a file may have at most 5"),
            (ArchiveLimits(total_bytes=10), "the service unpacks at most 10"),
        ],
    )
    def test_too_much_is_refused_before_anything_is_sent(self, folder, tmp_path, limits, message):
        with pytest.raises(WorkloadRejectedError, match=message):
            pack(folder, tmp_path / "p.tar.gz", limits)
        assert not (tmp_path / "p.tar.gz").exists()


MEANT: dict[str, tuple[str | None, str]] = {
    "zoo:synthetic?batch=4": (None, ""),
    "package.module:Class": (None, ""),
    "train.py": ("train.py", ""),
    "a/b/train.py:Net": ("a/b/train.py", "train.py:Net"),
    "train.py:Net?path=x:y": ("train.py", "train.py:Net?path=x:y"),
    "project.tar.gz": ("project.tar.gz", ""),
    "some/folder": ("some/folder", ""),
}


@pytest.mark.parametrize("text", MEANT)
def test_what_is_meant_by_a_workload_follows_from_how_it_is_written(text):
    """A workload that lies here is sent; one that workers have is named."""
    path, entry = _local(text)
    assert (None if path is None else str(path), entry) == MEANT[text]


def test_the_client_loads_neither_torch_nor_the_server():
    """It is for notebooks and scripts."""
    code = "import sys, steptune.service.client; sys.exit(bool({'torch', 'fastapi', 'uvicorn'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
