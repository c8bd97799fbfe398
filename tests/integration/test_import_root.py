"""One import root: workloads beside modules that have the names of Steptune's parts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from isolated import isolated_study
from own_names import own_modules
from report_builders import make_recommendation

from steptune.tuner.export import exporter_named
from steptune.tuner.hardware import describe_hardware
from steptune.tuner.records import BASELINE, Candidate


class TestNamesOfOnesOwn:
    @pytest.fixture
    def project(self, tmp_path: Path) -> Path:
        folder = own_modules(tmp_path / "project")
        for above in (folder, *folder.parents):  # trials may run as another user
            if above.stat().st_uid == os.getuid() and above != Path("/"):
                above.chmod(above.stat().st_mode | 0o055)
        return folder

    @pytest.mark.parametrize("level", ["none", "limits", "bubblewrap"])
    def test_a_study_of_a_workload_beside_them_has_an_answer(self, level: str, project: Path) -> None:
        workers = Candidate(choices={"data_loading": {"num_workers": 1}})
        with isolated_study(level, f"{project / 'train.py'}:Mine") as study:
            [result] = study.run(study.spec(workers, guard=False, profile=False))
        assert result.failure is None

    def test_the_workload_itself_may_have_such_a_name(self, project: Path) -> None:
        (project / "train.py").rename(project / "steps.py")
        source = (project / "steps.py").read_text()
        (project / "service.py").write_text(source.replace("import service\n", "").replace("service.WIDTH", "3"))
        with isolated_study("none", f"{project / 'service.py'}:Mine") as study:
            assert study.run_baseline().failure is None


def test_a_script_exported_under_the_old_name_trains(tmp_path: Path) -> None:
    recommendation = make_recommendation(
        BASELINE, workload="zoo:synthetic?batch=8", global_batch=8, hardware=describe_hardware("cpu")
    )
    text = exporter_named("python").export(recommendation)
    old = text.replace("steptune.tuner.workloads", "tuner.workloads").replace("import steptune\n", "import tuner\n")
    old = old.replace("steptune.apply(", "tuner.apply(")
    assert "import steptune" not in old
    script = tmp_path / "train_recommended.py"
    script.write_text(old)
    done = subprocess.run(
        [sys.executable, str(script), "--steps", "3", "--data", str(tmp_path / "data")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "step 3: loss" in done.stdout
    assert "FutureWarning" in done.stderr
