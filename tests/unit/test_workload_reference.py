"""Naming a workload, and loading what was named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_workloads import Everything, Line

from steptune.tuner.errors import WorkloadNotFoundError, WorkloadRejectedError
from steptune.tuner.workloads.loading import load_workload
from steptune.tuner.workloads.reference import (
    WorkloadReference,
    format_reference,
    imported_modules,
    parse_reference,
    source_digest,
)

SOURCE = """
import neighbour
import steptune


class Base(steptune.Workload):
    def model(self): ...
    def dataset(self): ...
    def loss(self, model, batch): ...


class First(Base):
    def __init__(self, batch=4, name="a", flag=False):
        self.global_batch, self.name, self.flag = batch, name, flag


class Second(Base):
    global_batch = neighbour.BATCH


class NoWorkload:
    pass


made = First(batch=5)
NUMBER = 3


def function(batch=6):
    return First(batch=batch)


def broken():
    return {}["missing"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A file with several workloads and a module beside it; what it imports is forgotten afterwards."""
    modules, path = set(sys.modules), list(sys.path)
    (tmp_path / "neighbour.py").write_text("BATCH = 7\n")
    source = tmp_path / "several.py"
    source.write_text(SOURCE)
    yield source
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


class TestParsing:
    def test_a_file_is_made_absolute(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(file.parent)
        expected = WorkloadReference(kind="file", source=str(file), name="First")
        assert parse_reference("several.py:First") == expected
        assert parse_reference(f"{file}:First") == expected
        assert expected.path == file

    def test_a_module(self) -> None:
        assert parse_reference("some.package:Mine?batch=8") == WorkloadReference(
            kind="module", source="some.package", name="Mine", arguments={"batch": 8}
        )

    def test_the_zoo_with_arguments_of_every_type(self) -> None:
        found = parse_reference("zoo:synthetic?batch=128&load_ms=1.5&flag=true&off=False&name=a%20b&empty=")
        assert (found.kind, found.name) == ("zoo", "synthetic")
        assert found.arguments == {
            "batch": 128, "load_ms": 1.5, "flag": True, "off": False, "name": "a b", "empty": ""
        }  # fmt: skip

    @pytest.mark.parametrize("text", ["", "file.py", "some.module", "some.module:", "file.py:?batch=2"])
    def test_without_a_class_it_is_refused_with_the_ways_to_write_it(self, text: str) -> None:
        with pytest.raises(
            WorkloadRejectedError, match=r"names no class: write path/to/file.py:ClassName, .*or zoo:NAME"
        ):
            parse_reference(text)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(WorkloadNotFoundError, match=r"gone\.py does not exist: .* with the class Mine"):
            parse_reference(f"{tmp_path}/gone.py:Mine")

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(WorkloadNotFoundError, match="does not exist"):
            parse_reference(f"{tmp_path}/:Mine")

    @pytest.mark.parametrize("content", [b"class Broken(:\n", b"x = '\xff\xfe'\n"])
    def test_a_file_that_is_not_python_is_named(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "broken.py"
        path.write_bytes(content)
        with pytest.raises(WorkloadRejectedError, match=r"broken\.py.* is not valid Python"):
            parse_reference(f"{path}:Broken")

    def test_a_missing_class_names_those_of_the_file_without_importing_it(self, tmp_path: Path) -> None:
        path = tmp_path / "two.py"
        path.write_text("raise SystemExit\nclass One: ...\nclass Two: ...\n")
        with pytest.raises(WorkloadNotFoundError, match=r"has no class Three: its classes are One, Two"):
            parse_reference(f"{path}:Three")

    def test_a_mistyped_class_is_refused_although_the_file_imports_others(self, tmp_path: Path) -> None:
        path = tmp_path / "train.py"
        path.write_text("from torch import nn\nfrom steptune import Workload\nclass Digits(Workload): ...\n")
        with pytest.raises(WorkloadNotFoundError, match=r"has no class Digts: did you mean 'Digits'\?"):
            parse_reference(f"{path}:Digts")

    @pytest.mark.parametrize(
        "source",
        [
            "from others import Mine",
            "from others import Theirs as Mine",
            "from others import *",
            "try:\n    import fast\nexcept ImportError:\n    class Mine: ...",
            "if True:\n    pass\nelse:\n    def Mine(): ...",
            "with open(__file__):\n    Mine: object = 3",
            "Other, (Mine, _) = 1, (2, 3)",
            "globals()['Mine'] = 3\nglobals().update(Mine=3)",
        ],
    )
    def test_whatever_may_define_the_class_passes_without_an_import(self, tmp_path: Path, source: str) -> None:
        path = tmp_path / "train.py"
        path.write_text(f"{source}\n")
        assert parse_reference(f"{path}:Mine").name == "Mine"

    @given(
        st.dictionaries(
            st.from_regex(r"[a-z]{1,6}", fullmatch=True),
            st.integers(-999, 999)
            | st.booleans()
            | st.floats(0.25, 1e6)
            | st.text(st.characters(exclude_categories=["Cs"])).map(lambda text: f"/{text}"),
            max_size=3,
        ),
    )
    def test_formatting_is_the_inverse(self, arguments: dict[str, int | bool | float | str]) -> None:
        """Ampersands, percent and plus signs in values included: the trial server gets the formatted one."""
        original = WorkloadReference(kind="zoo", source="zoo", name="synthetic", arguments=arguments)
        assert parse_reference(format_reference(original)) == original

    def test_a_digest_follows_the_content_of_the_file(self, file: Path) -> None:
        reference = parse_reference(f"{file}:First")
        before = source_digest(reference)
        file.write_text(SOURCE + "\n# edited\n")
        assert source_digest(reference) != before

    def test_imports_are_read_without_running_them(self, file: Path) -> None:
        file.write_text("import os.path as place, json\nfrom collections.abc import Mapping\nfrom . import x\n1 / 0\n")
        assert imported_modules(file) == ["os.path", "json", "collections.abc"]


class TestLoading:
    def test_one_of_several_workloads_in_a_file(self, file: Path) -> None:
        assert load_workload(f"{file}:First").global_batch == 4
        assert load_workload(f"{file}:Second").global_batch == 7

    def test_arguments_are_given_to_the_class(self, file: Path) -> None:
        workload = load_workload(f"{file}:First?batch=9&name=b&flag=true")
        assert (workload.global_batch, workload.name, workload.flag) == (9, "b", True)  # type: ignore[attr-defined]

    @pytest.mark.parametrize(("name", "batch"), [("made", 5), ("function", 6), ("function?batch=8", 8)])
    def test_an_object_or_a_function_will_do(self, file: Path, name: str, batch: int) -> None:
        assert load_workload(f"{file}:{name}").global_batch == batch

    def test_a_module_on_the_path(self) -> None:
        assert type(load_workload("tiny_workloads:Line")) is Line
        assert type(load_workload("tiny_workloads:Everything")) is Everything

    def test_a_file_is_imported_once(self, file: Path) -> None:
        assert type(load_workload(f"{file}:First")) is type(load_workload(f"{file}:First"))

    def test_a_file_named_as_a_loaded_module_hides_neither(self, tmp_path: Path, file: Path) -> None:
        (tmp_path / "json.py").write_text(SOURCE)
        assert load_workload(f"{tmp_path}/json.py:Second").global_batch == 7
        assert hasattr(sys.modules["json"], "dumps")

    @pytest.mark.parametrize(
        ("name", "error", "message"),
        [
            ("Absent", WorkloadNotFoundError, "has no class Absent: its classes are Base, First, Second"),
            ("NUMBER", WorkloadRejectedError, "is 3: give the name of a class or a function"),
            ("NoWorkload", WorkloadRejectedError, "NoWorkload is not a workload: subclass steptune.Workload"),
            (
                "First?colour=1",
                WorkloadRejectedError,
                "First has no argument 'colour': choose one of batch, name, flag",
            ),
        ],
    )
    def test_what_is_no_workload_is_refused(self, file: Path, name: str, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            load_workload(f"{file}:{name}")

    def test_a_missing_module_is_told_from_one_that_misses_a_module(self, tmp_path: Path, file: Path) -> None:
        with pytest.raises(WorkloadNotFoundError, match=r"module no_such_package.sub cannot be found: install it"):
            load_workload("no_such_package.sub:Mine")
        file.write_text("import no_such_package\nclass Mine: ...\n")
        with pytest.raises(ModuleNotFoundError, match="no_such_package"):
            load_workload(f"{file}:Mine")

    def test_the_users_own_exception_comes_through_and_leaves_no_half_module(self, file: Path) -> None:
        with pytest.raises(KeyError, match="missing"):
            load_workload(f"{file}:broken")
        del sys.modules["several"]
        file.write_text("1 / 0\nclass First: ...\n")
        with pytest.raises(ZeroDivisionError):
            load_workload(f"{file}:First")
        assert "several" not in sys.modules
