"""Modules that a workload's model imports when it is built: imported once, by the trial server, for all trials."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
from trial_builders import WORKLOADS, prepare, reference

from steptune.tuner.trials import server
from steptune.tuner.trials.imports import imported_since, load_imports, save_imports
from steptune.tuner.trials.server import RANK_MODULES, rank_modules
from steptune.tuner.trials.study_files import StudyFiles


@pytest.mark.parametrize("variables", [{}, {"OMP_NUM_THREADS": "1"}], ids=["forked", "fresh"])
def test_a_trial_finds_it_imported(tmp_path: Path, variables: dict[str, str]) -> None:
    """Forked from the server that looked at the workload, or from one with other variables that started later."""
    study = prepare(reference("lazy", "Lazy"), tmp_path, with_reference=False)
    try:
        assert "tabnanny" in load_imports(StudyFiles(tmp_path).imports)
        (result,) = study.run(study.spec(guard=False, profile=False, environment_variables=variables))
        assert result.failure is None, result.failure
    finally:
        study.runner.close()


def test_what_every_rank_runs_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each import is a line in the log of the process that makes it: a server's, or a trial's."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    study = prepare(reference("regression", "Regression"), tmp_path, with_reference=False)
    try:
        (result,) = study.run(study.spec(guard=False, profile=False))
        assert result.failure is None, result.failure
    finally:
        study.runner.close()
    logs = {path.stem: path.read_text() for path in (tmp_path / "logs").glob("*.log")}
    assert " steptune.tuner.strategies.registry" in logs["server0"]
    for part in ("tuner.strategies", "tuner.training", "tuner.profiling", "kernels"):
        assert f" steptune.{part}\n" not in logs[result.trial_id]


def test_strategies_of_another_package_are_left_to_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may touch a device when they are imported, and a server that has cannot fork."""
    assert rank_modules() == RANK_MODULES
    added = EntryPoint(name="theirs", value="theirs:Theirs", group="steptune.strategies")
    monkeypatch.setattr(server, "entry_points", lambda group: [added] if group == added.group else [])
    assert rank_modules() == ()


class TestWhatIsNoted:
    @pytest.fixture
    def new_modules(self, monkeypatch: pytest.MonkeyPatch) -> set[str]:
        """The names known before two modules were imported, one from the folder of tests' workloads."""
        known = set(sys.modules)
        import tabnanny

        for name, file in (("some_library", "/usr/lib/some_library.py"), ("own_helper", f"{WORKLOADS}/own_helper.py")):
            module = ModuleType(name)
            module.__file__, module.__spec__ = file, tabnanny.__spec__
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, "made_up", ModuleType("made_up"))
        return known

    def test_only_what_can_be_imported_again_and_is_not_the_workload_s_own(self, new_modules: set[str]) -> None:
        """Its own files may be edited, and are imported by each trial."""
        found = imported_since(new_modules, reference("lazy", "Lazy"))
        assert "some_library" in found
        assert not {"own_helper", "made_up"} & set(found)

    def test_nothing_once_a_device_was_touched(self, new_modules: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """Importing it might be what touches the device, and a server that has cannot fork."""
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
        assert imported_since(new_modules, reference("lazy", "Lazy")) == []


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"a": 1}', b"[1]"])
def test_a_file_that_is_not_there_or_not_ours_names_nothing(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "imports.json"
    if content is not None:
        path.write_bytes(content)
    assert load_imports(path) == []
    save_imports(path, ["wave"])
    assert load_imports(path) == ["wave"]
