"""Archives of strangers: what is refused, by which rule, and that nothing is ever written elsewhere."""

import gzip
import io
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptune.service.archives import MAX_SOURCE_BYTES, ArchiveLimits, find_workloads, unpack
from steptune.tuner.errors import ArchiveRefusedError, WorkloadRejectedError

SMALL = ArchiveLimits(members=20, total_bytes=4 << 20, file_bytes=3 << 20, depth=5, name_bytes=200)
Entry = tuple[str, bytes]


def tar(path: Path, *entries: Entry | tarfile.TarInfo, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                archive.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size = len(entry[1])
                archive.addfile(info, io.BytesIO(entry[1]))
    return path


def zipped(path: Path, *entries: Entry) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return path


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


def refused(archive: Path, limits: ArchiveLimits = SMALL) -> ArchiveRefusedError:
    """The refusal; nothing is left of what was unpacked before it."""
    beside = sorted(archive.parent.iterdir())
    with pytest.raises(ArchiveRefusedError) as caught:
        unpack(archive, archive.parent / "target", limits)
    assert sorted(archive.parent.iterdir()) == beside
    return caught.value


MAKERS: list[Callable[..., Path]] = [
    pytest.param(lambda path, *entries: tar(path, *entries, mode="w"), id="tar"),
    pytest.param(lambda path, *entries: tar(path, *entries, mode="w:gz"), id="tar.gz"),
    pytest.param(lambda path, *entries: tar(path, *entries, mode="w:xz"), id="tar.xz"),
    pytest.param(lambda path, *entries: tar(path, *entries, mode="w:bz2"), id="tar.bz2"),
    pytest.param(zipped, id="zip"),
]


class TestHonest:
    @pytest.mark.parametrize("make", MAKERS)
    def test_arrives_whole_with_plain_permissions(self, tmp_path: Path, make: Callable[..., Path]) -> None:
        content = bytes(range(256)) * 512
        archive = make(tmp_path / "archive", ("train.py", b"x = 1\n"), ("data/deep/numbers.bin", content))
        unpacked = unpack(archive, tmp_path / "target", SMALL)
        assert (unpacked.num_files, unpacked.total_bytes) == (2, 6 + len(content))
        assert (unpacked.root / "data/deep/numbers.bin").read_bytes() == content
        assert stat.S_IMODE((unpacked.root / "train.py").stat().st_mode) == 0o644
        assert stat.S_IMODE((unpacked.root / "data/deep").stat().st_mode) == 0o755

    def test_set_uid_and_write_for_all_are_dropped(self, tmp_path: Path) -> None:
        info = tarfile.TarInfo("run")
        info.mode = 0o6777
        unpacked = unpack(tar(tmp_path / "archive", info), tmp_path / "target")
        assert stat.S_IMODE((unpacked.root / "run").stat().st_mode) == 0o755

    def test_folders_may_be_named_and_come_after_their_files(self, tmp_path: Path) -> None:
        folder = special("a", tarfile.DIRTYPE)
        archive = tar(tmp_path / "archive", special(".", tarfile.DIRTYPE), ("a/b", b"1"), folder)
        assert unpack(archive, tmp_path / "target").num_files == 1

    def test_the_target_must_be_fresh(self, tmp_path: Path) -> None:
        (tmp_path / "target").mkdir()
        with pytest.raises(FileExistsError):
            unpack(zipped(tmp_path / "archive", ("a", b"")), tmp_path / "target")


class TestNames:
    @pytest.mark.parametrize("make", MAKERS)
    @pytest.mark.parametrize(
        ("name", "rule"),
        [
            ("../evil", "traversal"),
            ("a/../../evil", "traversal"),
            ("/etc/evil", "traversal"),
            ("C:/evil", "traversal"),
            ("a\\..\\evil", "name"),
            ("a\nb", "name"),
            ("a‮gnp.py", "name"),
            ("a/" * 6 + "b", "depth"),
            ("a" * 190 + "/" + "b" * 20, "name_bytes"),
        ],
    )
    def test_that_lead_out_or_mislead_are_refused(
        self, tmp_path: Path, make: Callable[..., Path], name: str, rule: str
    ) -> None:
        assert refused(make(tmp_path / "archive", ("good.py", b"1"), (name, b"2"))).rule == rule

    @pytest.mark.parametrize("make", MAKERS)
    @pytest.mark.parametrize(
        "names", [("a", "a"), ("a", "A"), ("a", "./a"), ("a", "a/b"), ("a/b", "a"), ("caf\u00e9", "cafe\u0301")]
    )
    @pytest.mark.filterwarnings("ignore:Duplicate name")
    def test_two_members_of_one_name_are_refused(
        self, tmp_path: Path, make: Callable[..., Path], names: tuple[str, str]
    ) -> None:
        """Which of them counts would be a matter of order, and of the file system."""
        assert refused(make(tmp_path / "archive", *((name, b"1") for name in names))).rule == "duplicate"


class TestKinds:
    @pytest.mark.parametrize(
        ("kind", "rule"),
        [
            (tarfile.SYMTYPE, "link"),
            (tarfile.LNKTYPE, "link"),
            (tarfile.CHRTYPE, "special"),
            (tarfile.BLKTYPE, "special"),
            (tarfile.FIFOTYPE, "special"),
        ],
    )
    def test_links_and_devices_are_refused(self, tmp_path: Path, kind: bytes, rule: str) -> None:
        archive = tar(tmp_path / "archive", ("good.py", b"1"), special("odd", kind, "/etc/passwd"))
        assert refused(archive).rule == rule

    def test_a_link_in_a_zip_is_refused(self, tmp_path: Path) -> None:
        info = zipfile.ZipInfo("odd")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
            archive.writestr(info, "/etc/passwd")
        assert refused(tmp_path / "archive").rule == "link"

    def test_what_is_no_archive_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "archive").write_bytes(b"#!/bin/sh\n")
        assert refused(tmp_path / "archive").rule == "format"

    @pytest.mark.parametrize("make", MAKERS)
    def test_one_that_is_cut_off_is_refused(self, tmp_path: Path, make: Callable[..., Path]) -> None:
        archive = make(tmp_path / "archive", ("a", bytes(range(256)) * 4000), ("b", b"2" * 100_000))
        archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
        assert refused(archive).rule == "damaged"


class TestSizes:
    @pytest.mark.parametrize("make", MAKERS)
    def test_limits_hold_for_what_comes_out(self, tmp_path: Path, make: Callable[..., Path]) -> None:
        assert refused(make(tmp_path / "a", *((f"f{n}", b"") for n in range(21)))).rule == "members"
        noise = [Random(seed).randbytes(100_000) for seed in range(5)]
        loose = ArchiveLimits(total_bytes=400_000, file_bytes=300_000)
        one = refused(make(tmp_path / "b", ("f", b"".join(noise[:4]))), loose)
        assert (one.rule, one.limit) == ("file_bytes", 300_000)
        assert refused(make(tmp_path / "c", *((f"f{n}", noise[n]) for n in range(5))), loose).rule == "total_bytes"

    @pytest.mark.parametrize("make", MAKERS[1:])
    def test_a_bomb_is_refused_by_its_ratio(self, tmp_path: Path, make: Callable[..., Path]) -> None:
        error = refused(make(tmp_path / "archive", ("zeros", bytes(2 << 20))))
        assert error.rule == "ratio"
        assert error.limit == 200

    def test_a_bomb_whose_header_says_that_it_is_small_is_refused_by_what_comes_out(self, tmp_path: Path) -> None:
        archive = zipped(tmp_path / "archive", ("zeros", bytes(2 << 20)))
        data = archive.read_bytes().replace((2 << 20).to_bytes(4, "little"), (10).to_bytes(4, "little"))
        archive.write_bytes(data)
        assert refused(archive).rule in ("damaged", "ratio")

    def test_a_bomb_in_an_extended_header_is_not_held_in_memory(self, tmp_path: Path) -> None:
        """Its name is 2 GB of zeros, as the header says, in 2 MB."""
        header = special("././@LongLink", tarfile.GNUTYPE_LONGNAME)
        header.size = 2 << 30
        with gzip.open(tmp_path / "archive", "wb", 1) as file:
            file.write(header.tobuf(tarfile.GNU_FORMAT))
            file.write(bytes(4 << 20))
        assert refused(tmp_path / "archive").rule == "header_bytes"

    def test_a_directory_of_a_zip_that_says_it_is_short_is_counted(self, tmp_path: Path) -> None:
        archive = zipped(tmp_path / "archive", *((f"f{n}", b"") for n in range(50)))
        data = bytearray(archive.read_bytes())
        data[-14:-10] = b"\x01\x00\x01\x00"
        archive.write_bytes(data)
        assert refused(archive).rule == "members"


NAMES = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.lists(st.sampled_from(["..", ".", "", "a", "b", "/", "~", "C:", "\\", "con", "\x00", " "]), max_size=6).map(
            "/".join
        ),
    ),
    min_size=1,
    max_size=4,
)


def everything(folder: Path) -> set[tuple[Path, bytes]]:
    return {(path, path.read_bytes() if path.is_file() else b"") for path in folder.rglob("*")}


class TestNothingElsewhere:
    @pytest.mark.filterwarnings("ignore:Duplicate name")
    @given(names=NAMES, as_zip=st.booleans(), kinds=st.lists(st.sampled_from([b"0", b"1", b"2", b"5"]), max_size=4))
    def test_whatever_the_names_are(
        self, tmp_path_factory: pytest.TempPathFactory, names: list[str], as_zip: bool, kinds: list[bytes]
    ) -> None:
        top = tmp_path_factory.mktemp("top")
        inner = top / "x" / "y" / "z"
        inner.mkdir(parents=True)
        (top / "a").write_bytes(b"before")
        archive = top / "x" / "archive"
        try:
            if as_zip:
                zipped(archive, *((name, b"evil") for name in names))
            else:
                entries = [(name, b"evil") for name in names]
                odd = [special(name, kind, "../../a") for name, kind in zip(names, kinds, strict=False)]
                tar(archive, *odd, *entries, mode="w")
        except (ValueError, UnicodeError, zipfile.LargeZipFile):
            return  # no archive can hold that name
        before = everything(top)
        target = inner / "target"
        try:
            unpack(archive, target)
        except ArchiveRefusedError:
            assert everything(top) == before
            return
        written = everything(top) - before
        assert all(path == target or target in path.parents for path, _ in written)
        assert before <= everything(top)
        assert not any(path.is_symlink() for path in target.rglob("*"))

    @given(
        data=st.binary(max_size=600), magic=st.sampled_from([b"PK\x03\x04", b"\x1f\x8b", b"\xfd7zXZ\x00", b"BZh", b""])
    )
    def test_whatever_the_bytes_are(self, tmp_path_factory: pytest.TempPathFactory, data: bytes, magic: bytes) -> None:
        top = tmp_path_factory.mktemp("top")
        (top / "archive").write_bytes(magic + data)
        try:
            unpack(top / "archive", top / "target")
        except ArchiveRefusedError:
            assert [path.name for path in top.iterdir()] == ["archive"]


class TestFindingWorkloads:
    def test_by_base_or_by_methods_and_without_running_anything(self, tmp_path: Path) -> None:
        (tmp_path / "pkg").mkdir()
        (tmp_path / "pkg" / "train.py").write_text(
            "import os\nos._exit(1)\nclass Net: pass\nclass Mine(steptune.Workload): pass\n"
            "class Duck:\n def model(self): ...\n def dataset(self): ...\n def loss(self, model, batch): ...\n"
        )
        (tmp_path / "broken.py").write_text("class (")
        (tmp_path / "nested.py").write_text("(" * 5000)
        (tmp_path / "null.py").write_bytes(b"x = 1\0")
        assert find_workloads(tmp_path) == ["pkg/train.py:Mine", "pkg/train.py:Duck"]

    def test_a_base_that_is_nested_deeply_is_looked_at(self, tmp_path: Path) -> None:
        (tmp_path / "deep.py").write_text(f"class Deep({'x.' * 1500}Workload): ...\n")
        (tmp_path / "other.py").write_text(f"class Other({'x.' * 1500}y): ...\n")
        assert find_workloads(tmp_path) == ["deep.py:Deep"]

    @pytest.mark.parametrize(
        ("sizes", "said"),
        [([10, MAX_SOURCE_BYTES + 1], "'b.py' has 262,145 bytes"), ([MAX_SOURCE_BYTES] * 9, "have 2,359,296 bytes")],
    )
    def test_more_than_can_be_parsed_is_refused(self, tmp_path: Path, sizes: list[int], said: str, monkeypatch) -> None:
        monkeypatch.setattr("steptune.service.archives.ast.parse", lambda source: pytest.fail("it is parsed"))
        for name, size in zip("abcdefghi", sizes, strict=False):
            (tmp_path / f"{name}.py").write_text("#" * size)
        with pytest.raises(WorkloadRejectedError, match=said) as caught:
            find_workloads(tmp_path)
        assert "name the workload with `entry`" in str(caught.value)
