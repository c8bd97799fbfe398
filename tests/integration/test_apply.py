"""A recommendation in a script of its own: `steptune.apply` and the exported training script."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from report_builders import complete, environment_variables, make_recommendation
from torch.utils.data import Dataset

import steptune
from steptune.tuner.errors import RecommendationError, WorkloadRejectedError
from steptune.tuner.export import exporter_named
from steptune.tuner.hardware import describe_hardware
from steptune.tuner.records import BASELINE, Candidate, Device, Recommendation
from steptune.tuner.strategies.dataset_cache.strategy import CachedDataset

ROOT = Path(__file__).parents[2]
SYNTHETIC = "zoo:synthetic?batch=8&load_ms=0&compute_ms=0&length=64"
TUNED = Candidate(
    choices={
        "data_loading": {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
        "cpu_threads": {"num_threads": 1},
        "optimizer_implementation": {"implementation": "fused"},
    }
)
FILE_WORKLOAD = '''
import torch
import steptune


class Numbers(torch.utils.data.Dataset):
    """Reads what prepare wrote."""

    def __init__(self, path):
        self.values = torch.load(path)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index], self.values[index].sum()


class Regression(steptune.Workload):
    global_batch = 8

    def prepare(self, directory):
        print("preparing")
        torch.save(torch.randn(64, 4), directory / "values.pt")

    def model(self):
        torch.manual_seed(0)
        return torch.nn.Linear(4, 1)

    def dataset(self):
        return Numbers(self.directory / "values.pt")

    def loss(self, model, batch):
        values, targets = batch
        return torch.nn.functional.mse_loss(model(values).squeeze(1), targets)
'''


def measured_here(candidate: Candidate = BASELINE, workload: str = SYNTHETIC, **fields) -> Recommendation:
    """A recommendation for this machine, so that nothing is warned about."""
    return make_recommendation(
        candidate, workload=workload, global_batch=8, hardware=describe_hardware("cpu"), **fields
    )


def run_script(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """Run a script and return what it prints. Its warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestInAScript:
    def test_the_job_is_what_the_choices_say(self, tmp_path: Path) -> None:
        """Workers, optimizer and threads of the running job, and a few steps of it."""
        exported = tmp_path / "steptune.yaml"
        exported.write_text(exporter_named("yaml").export(measured_here(TUNED)), encoding="utf-8")
        script = tmp_path / "train.py"
        script.write_text(
            "import json, sys, torch, steptune\n"
            "from steptune.tuner.workloads.loading import load_workload\n"
            "job = steptune.apply(sys.argv[1], load_workload(sys.argv[2]))\n"
            "losses = [float(job.step(batch)) for batch in job.loader]\n"
            "print(json.dumps({\n"
            "    'workers': job.loader.num_workers, 'ahead': job.loader.prefetch_factor,\n"
            "    'fused': job.optimizer.defaults['fused'], 'threads': torch.get_num_threads(),\n"
            "    'steps': len(losses), 'finite': all(loss == loss for loss in losses),\n"
            "    'keys': sorted(job.state_dict())[:1],\n"
            "}))\n"
        )
        assert json.loads(run_script(script, exported, SYNTHETIC)) == {
            "workers": 2,
            "ahead": 4,
            "fused": True,
            "threads": 1,
            "steps": 8,
            "finite": True,
            "keys": ["blocks.0.bias"],
        }

    def test_joins_the_ranks_of_torchrun(self, tmp_path: Path) -> None:
        """Each of two ranks takes half of the global batch, and both hold the same parameters."""
        script = tmp_path / "train.py"
        script.write_text(
            "import sys, pathlib, torch, steptune\n"
            "from steptune.tuner.workloads.loading import load_workload\n"
            "torch.distributed.init_process_group('gloo')\n"
            "rank = torch.distributed.get_rank()\n"
            "torch.manual_seed(rank)\n"
            "job = steptune.apply(sys.argv[1], load_workload(sys.argv[2]))\n"
            "sizes = [len(batch[0]) for batch in job.loader if job.step(batch) is not None]\n"
            "total = sum(float(p.double().sum()) for p in job.state_dict().values())\n"
            "pathlib.Path(sys.argv[3], str(rank)).write_text(f'{sizes} {total}')\n"
            "torch.distributed.destroy_process_group()\n"
        )
        exported = tmp_path / "steptune.json"
        exported.write_text(exporter_named("json").export(measured_here()), encoding="utf-8")
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        run_script(*torchrun, script, exported, SYNTHETIC, tmp_path, OMP_NUM_THREADS="1")
        first, second = (tmp_path / "0").read_text(), (tmp_path / "1").read_text()
        assert first == second
        assert first.startswith("[4, 4, 4, 4, 4, 4, 4, 4]")


class TestExportedScript:
    def test_it_trains_a_ready_workload(self, tmp_path: Path) -> None:
        script = tmp_path / "train_recommended.py"
        script.write_text(exporter_named("python").export(measured_here(TUNED)), encoding="utf-8")
        assert "step 10: loss" in run_script(script, "--steps", "10", "--data", tmp_path / "data")

    def test_it_sets_the_variables_itself(self, tmp_path: Path) -> None:
        bound = measured_here(Candidate(choices={"cpu_threads": {"bind": "close"}}))
        script = tmp_path / "train_recommended.py"
        script.write_text(exporter_named("python").export(bound), encoding="utf-8")
        assert "step 1: loss" in run_script(script, "--steps", "1", "--data", tmp_path / "data")

    def test_it_trains_a_workload_from_a_file_and_prepares_it_once(self, tmp_path: Path) -> None:
        (tmp_path / "regression.py").write_text(FILE_WORKLOAD)
        recommendation = measured_here(TUNED, workload=f"{tmp_path}/regression.py:Regression")
        script = tmp_path / "train_recommended.py"
        script.write_text(exporter_named("python").export(recommendation), encoding="utf-8")
        first = run_script(script, "--steps", "3", "--data", tmp_path / "data")
        second = run_script(script, "--steps", "3", "--data", tmp_path / "data")
        assert first.startswith("preparing\nstep 3: loss")
        assert second.startswith("step 3: loss")


class Squares(Dataset):
    """Counts what was loaded in this process."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        return torch.tensor([float(index)])


class Small(steptune.Workload):
    global_batch = 8

    def model(self):
        return torch.nn.Linear(1, 1)

    def dataset(self):
        return Squares()

    def loss(self, model, batch):
        return model(batch).square().mean()


class Prepared(Small):
    """Counts its preparations in a file."""

    def prepare(self, directory: Path) -> None:
        with (directory / "log").open("a") as log:
            log.write("prepared\n")
        if (directory.parent / "fail").exists():
            raise RuntimeError("the network is down")


class TestDirectory:
    def test_a_workload_that_prepares_needs_one(self) -> None:
        with pytest.raises(
            RecommendationError, match=r"Prepared prepares files.*pass directory=\.\.\. to steptune.apply"
        ):
            steptune.apply(measured_here(), Prepared())

    def test_a_cache_on_disk_needs_one(self) -> None:
        cached = measured_here(Candidate(choices={"dataset_cache": {"where": "disk"}}))
        with pytest.raises(RecommendationError, match=r"cache is on disk.*pass directory="):
            steptune.apply(cached, Small())

    def test_it_is_prepared_once(self, tmp_path: Path) -> None:
        for _ in range(2):
            steptune.apply(measured_here(), Prepared(), directory=tmp_path / "data")
        assert (tmp_path / "data" / "log").read_text() == "prepared\n"

    def test_an_interrupted_preparation_is_made_anew(self, tmp_path: Path) -> None:
        (tmp_path / "fail").touch()
        with pytest.raises(RuntimeError, match="network"):
            steptune.apply(measured_here(), Prepared(), directory=tmp_path / "data")
        (tmp_path / "fail").unlink()
        steptune.apply(measured_here(), Prepared(), directory=tmp_path / "data")
        assert (tmp_path / "data" / "log").read_text() == "prepared\nprepared\n"

    def test_a_directory_that_the_user_set_is_theirs(self, tmp_path: Path) -> None:
        workload = Prepared()
        workload.directory = tmp_path
        steptune.apply(measured_here(), workload)
        assert not (tmp_path / "log").exists()


class TestCache:
    def test_a_memory_cache_is_filled_before_workers_are_forked(self) -> None:
        choices = {"dataset_cache": {"where": "memory"}, "data_loading": {"num_workers": 2}}
        dataset = steptune.apply(measured_here(Candidate(choices=choices)), Small()).loader.dataset
        assert isinstance(dataset, CachedDataset)
        assert dataset.dataset.loaded == list(range(32))

    def test_without_workers_it_fills_as_it_goes(self) -> None:
        job = steptune.apply(measured_here(Candidate(choices={"dataset_cache": {"where": "memory"}})), Small())
        assert job.loader.dataset.dataset.loaded == []
        for _ in range(2):
            list(job.loader)
        assert sorted(job.loader.dataset.dataset.loaded) == list(range(32))


class TestRecipes:
    """Training by a recommendation of another recipe in a script of one's own."""

    def test_a_larger_batch_is_made_of_several_of_todays(self) -> None:
        choice = {"larger_global_batch": {"factor": 2, "rule": "linear"}}
        job = steptune.apply(measured_here(Candidate(choices=choice)), Small())
        assert [len(batch) for batch in job.loader] == [16, 16]
        assert job.optimizer.param_groups[0]["lr"] == 2e-3

    def test_batches_by_length_give_every_sample_once(self) -> None:
        class Long(Small):
            def length(self, dataset, index: int) -> int:
                return index

        choice = {"length_balancing": {"pool_batches": 16}}
        job = steptune.apply(measured_here(Candidate(choices=choice)), Long())
        for _ in range(2):
            batches = [sorted(int(value) for value in batch) for batch in job.loader]
            assert sorted(batches) == [list(range(start, start + 8)) for start in range(0, 32, 8)]

    def test_contiguous_parameters_leave_checkpoints_as_they_were(self) -> None:
        contiguous = measured_here(Candidate(choices={"optimizer_implementation": {"contiguous": True}}))
        first, second = steptune.apply(contiguous, Small()), steptune.apply(measured_here(), Small())
        for batch in first.loader:
            first.step(batch)
        saved = io.BytesIO()
        torch.save({"model": first.state_dict(), "optimizer": first.optimizer_state_dict()}, saved)
        saved.seek(0)
        loaded = torch.load(saved)
        second.model.load_state_dict(loaded["model"])
        second.optimizer.load_state_dict(loaded["optimizer"])
        batch = torch.arange(8.0).unsqueeze(1)
        assert float(second.step(batch)) == float(first.step(batch))
        torch.testing.assert_close(second.state_dict(), first.state_dict())


class TestChecks:
    def test_another_global_batch_is_refused(self) -> None:
        recommendation = msgspec.structs.replace(measured_here(), global_batch=64)
        with pytest.raises(RecommendationError, match=r"Small.global_batch is 8.*tuned with 64: set it to 64"):
            steptune.apply(recommendation, Small())

    def test_a_class_instead_of_a_workload_is_refused(self) -> None:
        with pytest.raises(WorkloadRejectedError, match="type is not a workload"):
            steptune.apply(measured_here(), Small)  # type: ignore[arg-type]

    def test_a_strategy_of_a_newer_version_is_refused(self) -> None:
        choices = {**complete(BASELINE), "warp_drive": {"factor": 9}}
        with pytest.raises(RecommendationError, match=r"there is no strategy 'warp_drive'.*Install the version"):
            steptune.apply(measured_here(choices=choices), Small())

    def test_a_strategy_that_the_writer_did_not_know_stays_as_today(self) -> None:
        workload = Small()
        workload.current = {"data_loading": {"num_workers": 1}}
        choices = {name: choice for name, choice in complete(BASELINE).items() if name != "data_loading"}
        job = steptune.apply(measured_here(choices=choices, environment_variables={}), workload)
        assert job.loader.num_workers == 1

    def test_more_workers_than_cores_are_no_mistake(self) -> None:
        """Where they were measured to pay, PyTorch's warning about them says nothing."""
        many = measured_here(Candidate(choices={"data_loading": {"num_workers": 1000}}))
        assert steptune.apply(many, Small()).loader.num_workers == 1000

    def test_other_hardware_and_torch_are_warned_about_by_name(self) -> None:
        here = describe_hardware("cpu")
        elsewhere = msgspec.structs.replace(here, num_cores=96, versions={**here.versions, "torch": "2.11.0"})
        message = r"measured elsewhere: on .*96 cores, here .* cores; on torch 2\.11\.0, here torch 2"
        with pytest.warns(UserWarning, match=message):
            steptune.apply(msgspec.structs.replace(measured_here(), hardware=elsewhere), Small())

    def test_missing_variables_are_warned_about_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("OMP_PROC_BIND", raising=False)
        monkeypatch.setenv("OMP_PLACES", "cores")
        bound = measured_here(Candidate(choices={"cpu_threads": {"bind": "close"}}))
        assert bound.environment_variables == environment_variables(bound.choices)
        with pytest.warns(UserWarning, match=r"^OMP_PROC_BIND is not set,.*OMP_PROC_BIND=close, .*launch_environment"):
            steptune.apply(bound, Small())

    def test_several_processes_without_a_group_are_warned_about(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        with pytest.warns(UserWarning, match=r"WORLD_SIZE is 4.*init_process_group\(\) before steptune.apply"):
            steptune.apply(measured_here(), Small())

    @pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without CUDA")
    def test_a_device_that_is_not_here_is_named_unless_another_is_asked_for(self) -> None:
        gpu = Device(kind="cuda", name="NVIDIA H100", memory_bytes=80 << 30, capability="9.0")
        hardware = msgspec.structs.replace(describe_hardware("cpu"), devices=(gpu,))
        recommendation = msgspec.structs.replace(measured_here(), hardware=hardware)
        with pytest.raises(RecommendationError, match=r'measured on 1 x NVIDIA H100.*pass device="cpu"'):
            steptune.apply(recommendation, Small())
        with pytest.warns(UserWarning, match="1 x NVIDIA H100"):
            assert steptune.apply(recommendation, Small(), device="cpu").device == torch.device("cpu")


def test_the_snippet_of_the_readme_trains_its_example(tmp_path: Path) -> None:
    """It runs as it stands there, with what the README says was recommended."""
    pytest.importorskip("sklearn", reason="the example needs steptune[examples]")
    [snippet] = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    recommended = Candidate(
        choices={
            "data_loading": {"num_workers": 2, "persistent_workers": True},
            "dataset_cache": {"where": "memory"},
            "cpu_threads": {"num_threads": 1},
            "memory_format": {"layout": "channels_last"},
        }
    )
    recommendation = make_recommendation(
        recommended,
        workload="examples/photo_resnet.py:PhotoResNet",
        global_batch=32,
        hardware=describe_hardware("cpu"),
        environment_variables={},
    )
    (tmp_path / "steptune.json").write_text(exporter_named("json").export(recommendation), encoding="utf-8")
    (tmp_path / "train.py").write_text(f"{snippet}print('loss', float(loss))\n")
    said = run_script(tmp_path / "train.py", cwd=tmp_path, PYTHONPATH=f"{ROOT / 'src'}:{ROOT / 'examples'}")
    assert math.isfinite(float(said.removeprefix("loss ")))
    assert len(list((tmp_path / "data" / "photos").glob("*.jpg"))) == 512
