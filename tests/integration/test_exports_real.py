"""Every export is loaded by the library that it is for, in the version that it names: `make export-environments`.

One process for each environment checks all files; what it found is compared here with what was recommended.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from export_builders import CUDA, RECOMMENDATIONS, SHARDED
from report_builders import make_story, make_study

from steptune.tuner.export import exporter_named
from steptune.tuner.export.optuna_study import optuna_journal
from steptune.tuner.records import Recommendation
from steptune.tuner.strategies import strategy_named
from steptune.tuner.strategies.precision.strategy import Precision

ROOT = Path(__file__).parents[2]
CHECKERS = ROOT / "tests" / "export_checkers"
ENVIRONMENTS = {
    "accelerate": ("accelerate_transformers_lightning", ["accelerate", "accelerate_fsdp1", "accelerate_python"]),
    "deepspeed": ("deepspeed_torchtitan", ["deepspeed", "torchtitan"]),
}
ENVIRONMENTS["accelerate"][1].extend(["transformers", "lightning"])
ENVIRONMENT_OF = {target: name for name, (_, targets) in ENVIRONMENTS.items() for target in targets}
SLIPS = {
    "accelerate": [("dynamo_mode:", "dynamo_mod:"), ("num_processes:", "num_proceses:")],
    "accelerate_fsdp1": [("fsdp_backward_prefetch:", "fsdp_backward_prefech:"), ("FULL_SHARD", "FULL_SHRD")],
    "accelerate_python": [('"num_workers"', '"num_worker"'), ('"gradient_accumulation_steps"', '"accumulation"')],
    "transformers": [('"dataloader_num_workers"', '"dataloader_workers"'), ('"optim": "adamw', '"optim": "adamv')],
    "lightning": [('"accumulate_grad_batches"', '"accumulate_batches"'), ('"32-true"', '"31-true"')],
    "deepspeed": [('"stage"', '"stag"'), ('"gradient_accumulation_steps"', '"gradient_acumulation_steps"')],
    "torchtitan": [(".local_batch_size", ".local_batchsize"), (".implementation", ".implementation_")],
}


@dataclass(frozen=True)
class Task:
    """One file to check; a slip replaces a part of its text."""

    target: str
    recommendation: str
    slip: tuple[str, str] | None = None

    def text(self) -> str:
        text = exporter_named(self.target).export(RECOMMENDATIONS[self.recommendation])
        if self.slip is None:
            return text
        assert self.slip[0] in text
        return text.replace(*self.slip)

    @property
    def id(self) -> str:
        return f"{self.target}-{self.recommendation}"


def fits(target: str, recommendation: Recommendation) -> bool:
    return exporter_named(target).refusal(recommendation) is None


LOADED = [
    Task(target, name)
    for target in ENVIRONMENT_OF
    for name, recommendation in RECOMMENDATIONS.items()
    if fits(target, recommendation)
]
SLIPPED = [
    Task(target, "sharded_full" if target == "accelerate_fsdp1" else "everything_on_cpu", slip)
    for target, slips in SLIPS.items()
    for slip in slips
]


def python_of(environment: str) -> Path:
    """Skips where the environment was not made, which on CI is an error."""
    folder = ROOT / f".venv-exports-{environment}"
    if (folder / ".installed").exists():
        return folder / "bin" / "python"
    reason = f"no {folder.name}: `make export-environments` makes it"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def run_checker(environment: str, asked: list[dict[str, str]], folder: Path) -> list[dict[str, Any]]:
    """One answer for each {"check": NAME, "path": FILE}."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PYTHONPATH"))}
    done = subprocess.run(
        [str(python_of(environment)), str(CHECKERS / f"{ENVIRONMENTS[environment][0]}.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=800,
        env={
            **variables,
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT / "src"),
        },
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.rpartition("\n===\n")[2])


@functools.cache
def checked(environment: str, folder: Path) -> dict[Task, dict[str, Any]]:
    """Results by task: what the libraries of an environment made of all files for them."""
    _, targets = ENVIRONMENTS[environment]
    tasks = [task for task in (*LOADED, *SLIPPED) if task.target in targets]
    asked = []
    for number, task in enumerate(tasks):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        path = place / exporter_named(task.target).file_name(RECOMMENDATIONS[task.recommendation])
        path.write_text(task.text())
        asked.append({"check": task.target, "path": str(path)})
    return dict(zip(tasks, run_checker(environment, asked, folder), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


def answer_to(task: Task, folder: Path) -> dict[str, Any]:
    environment = ENVIRONMENT_OF[task.target]
    python_of(environment)
    place = folder / environment
    place.mkdir(exist_ok=True)
    return checked(environment, place)[task]


def found_in(task: Task, folder: Path) -> dict[str, Any]:
    answer = answer_to(task, folder)
    assert "problem" not in answer, answer
    return answer["found"]


pytestmark = pytest.mark.xdist_group("exports_real")
loaded = pytest.mark.parametrize("task", LOADED, ids=lambda task: task.id)


@loaded
def test_the_library_loads_it_and_means_the_same(task: Task, folder: Path) -> None:
    found = found_in(task, folder)
    recommendation = RECOMMENDATIONS[task.recommendation]
    EXPECTED[task.target](found, recommendation)


@pytest.mark.parametrize("task", SLIPPED, ids=lambda task: f"{task.target}-{task.slip[1]}")
def test_a_wrong_key_or_value_is_noticed(task: Task, folder: Path) -> None:
    assert answer_to(task, folder).get("problem")
    assert "problem" not in answer_to(replace(task, slip=None), folder)


def test_optuna_dashboard_shows_every_trial_that_ended(tmp_path: Path) -> None:
    trials, _ = make_story()
    journal = tmp_path / "optuna_study.log"
    journal.write_bytes(optuna_journal(make_study(), trials))
    (answer,) = run_checker("accelerate", [{"check": "optuna", "path": str(journal)}], tmp_path)
    assert "problem" not in answer, answer
    found = answer["found"]
    assert found["name"] == make_study().study_id
    assert found["directions"] == ["maximize"]
    assert found["states"] == ["Complete" if trial.result.ok else "Fail" for trial in trials]
    assert "data_loading.num_workers" in found["parameters"]


def test_a_script_under_accelerate_launch_trains_with_yaml_and_settings(tmp_path: Path) -> None:
    """The script of benchmarks/export_fidelity.py, for a few steps."""
    python = python_of("accelerate")
    recommendation = RECOMMENDATIONS["everything_on_cpu"]
    choices = {**recommendation.choices, "compile": dict(strategy_named("compile").defaults)}
    recommendation = msgspec.structs.replace(recommendation, choices=choices)
    for name in ("accelerate", "accelerate_python"):
        exporter = exporter_named(name)
        (tmp_path / exporter.file_name(recommendation)).write_text(exporter.export(recommendation))
    fidelity = ROOT / "benchmarks" / "fidelity"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [
            *(str(python.with_name("accelerate")), "launch", "--config_file", str(tmp_path / "accelerate.yaml")),
            *(str(fidelity / "accelerate_script.py"), str(tmp_path), "digits", "0.1", "0.1"),
        ],
        env={
            **variables,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT, fidelity))),
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["units_per_s"] > 0


# --- what the libraries must have understood ------------------------------------------------------


def pieces_of(recommendation: Recommendation) -> tuple[int, int]:
    pieces = recommendation.choices["micro_batch"]["num_micro_batches"]
    return recommendation.global_batch // recommendation.num_ranks // pieces, pieces


def half_of(recommendation: Recommendation, names: dict[str, str], without: str) -> str:
    precision = recommendation.choices["precision"]
    return names[precision["dtype"]] if precision["level"] == "O1" else without


def accelerate_means(found: dict, recommendation: Recommendation) -> None:
    compile_ = recommendation.choices["compile"]
    sharding = recommendation.choices["sharding"]
    assert found["num_processes"] == recommendation.num_ranks
    assert found["use_cpu"] == (recommendation.hardware.device_kind == "cpu")
    assert found["mixed_precision"] == half_of(recommendation, {"bfloat16": "bf16", "float16": "fp16"}, "no")
    if compile_["mode"] in ("default", "reduce-overhead", "max-autotune"):
        assert (found["backend"], found["mode"]) == ("INDUCTOR", compile_["mode"])
        assert found["regional"] == (compile_["scope"] == "regional")
    else:
        assert found["backend"] == "NO"
    if sharding["mode"] == "ddp":
        assert found["distributed_type"] == ("NO" if recommendation.num_ranks == 1 else "MULTI_GPU")
        return
    fsdp = found["fsdp"]
    assert found["distributed_type"] == "FSDP"
    assert fsdp["offload"] == sharding["cpu_offload"]
    assert fsdp["checkpointing"] == (recommendation.choices["activation_checkpointing"]["every"] == 1)
    if sharding["wrap"] == "size":
        assert fsdp["min_num_params"] == sharding["min_num_params"]


def accelerate_fsdp2_means(found: dict, recommendation: Recommendation) -> None:
    accelerate_means(found, recommendation)
    if "fsdp" in found:
        sharding = recommendation.choices["sharding"]
        assert found["fsdp"]["version"] == 2
        assert found["fsdp"]["reshard"] == (sharding["mode"] == "full" and sharding["reshard"])


def accelerate_fsdp1_means(found: dict, recommendation: Recommendation) -> None:
    accelerate_means(found, recommendation)
    sharding = recommendation.choices["sharding"]
    hybrid = "HYBRID_SHARD" if sharding["reshard"] else "_HYBRID_SHARD_ZERO2"
    names = {"full": "FULL_SHARD", "grad_op": "SHARD_GRAD_OP", "hybrid": hybrid}
    assert found["fsdp"]["version"] == 1
    assert found["fsdp"]["strategy"] == names[sharding["mode"]]
    assert found["fsdp"]["prefetch"] == "BACKWARD_PRE"


def settings_mean(found: dict, recommendation: Recommendation, *, optimizer: bool = True) -> None:
    flags, threads = recommendation.choices["backend_flags"], recommendation.choices["cpu_threads"]
    if threads["num_threads"] is not None:
        assert found["threads"] == threads["num_threads"]
    assert found["variables"]["OMP_PROC_BIND"] == threads["bind"]
    if optimizer:
        wanted = recommendation.choices["optimizer_implementation"]["implementation"]
        assert (found["fused"], found["foreach"]) == (wanted == "fused", wanted == "foreach")
    if flags["flush_denormals"]:
        assert found["flush_denormals"]


def loader_means(found: dict, recommendation: Recommendation) -> None:
    loading = recommendation.choices["data_loading"]
    size, _ = pieces_of(recommendation)
    assert found["batch_size"] == size
    assert found["num_workers"] == loading["num_workers"]
    assert found["pin_memory"] == loading["pin_memory"]
    if loading["num_workers"]:
        assert found["prefetch_factor"] == loading["prefetch_factor"]
        assert found["persistent_workers"] == loading["persistent_workers"]


def ddp_arguments(recommendation: Recommendation) -> dict[str, Any]:
    """Arguments of DistributedDataParallel from the exported settings, in its words; none where they are its own."""
    buckets, plain = recommendation.choices["ddp_buckets"], strategy_named("ddp_buckets").defaults
    names = {
        "bucket_cap_mb": "bucket_cap_mb",
        "static_graph": "static_graph",
        "bucket_views": "gradient_as_bucket_view",
    }
    return {argument: buckets[name] for name, argument in names.items() if buckets[name] != plain[name]}


def preparations_mean(found: dict, recommendation: Recommendation) -> None:
    layout, where = (recommendation.choices[n][p] for n, p in (("memory_format", "layout"), ("dataset_cache", "where")))
    assert found == {"channels_last": layout == "channels_last", "cached": where, "samples": [1, 2]}


def epochs_mean(found: dict, recommendation: Recommendation) -> None:
    """Batches are those of the plain loader, also in Lightning's own loop, and workers are idle at one epoch alone."""
    ahead = recommendation.choices["data_loading"]["epochs_ahead"]
    assert found.pop("fitted", True)
    assert found == {"same": True, "restarts": 1 if ahead else None}


def accelerate_python_means(found: dict, recommendation: Recommendation) -> None:
    preparations_mean(found["prepared"], recommendation)
    epochs_mean(found["epochs"], recommendation)
    settings_mean(found, recommendation)
    loader_means(found["loader"], recommendation)
    assert found["accumulation"] == pieces_of(recommendation)[1]
    assert found["ddp"] == ddp_arguments(recommendation)
    compression = recommendation.choices["gradient_compression"]
    hook = {"fp16": "fp16", "bf16": "bf16", "powersgd": "power_sgd"}.get(compression["method"], "no")
    rank = compression["rank"] if hook == "power_sgd" else None
    assert found["hook"] in ([hook, rank], None if hook == "no" else [])
    flags, level = recommendation.choices["backend_flags"], recommendation.choices["precision"]["level"]
    assert found["tf32"] == (flags["tf32"] or level == "tf32")
    assert found["cudnn_benchmark"] == flags["cudnn_benchmark"]
    own = recommendation.hardware.device_kind == "cpu" and recommendation.choices["cpu_threads"]["num_threads"] is None
    own = own and recommendation.num_ranks == 1  # of several ranks each has one, as launchers do it
    assert (found["variables"]["OMP_NUM_THREADS"] is None) == own


def transformers_means(found: dict, recommendation: Recommendation) -> None:
    preparations_mean(found["prepared"], recommendation)
    epochs_mean(found["epochs"], recommendation)
    choices = recommendation.choices
    size, pieces = pieces_of(recommendation)
    assert (found["per_device_train_batch_size"], found["gradient_accumulation_steps"]) == (size, pieces)
    assert found["dataloader_num_workers"] == choices["data_loading"]["num_workers"]
    assert found["dataloader_pin_memory"] == choices["data_loading"]["pin_memory"]
    half = half_of(recommendation, {"bfloat16": "bf16", "float16": "fp16"}, "")
    assert (found["bf16"], found["fp16"]) == (half == "bf16", half == "fp16")
    assert found["torch_compile"] == (choices["compile"]["mode"] is not None and choices["compile"]["scope"] == "whole")
    fused = choices["optimizer_implementation"]["implementation"] == "fused"
    assert found["optim"] == ("adamw_torch_fused" if fused else "adamw_torch")
    assert found.get("activation_checkpointing", False) == (choices["activation_checkpointing"]["every"] is not None)
    if recommendation.num_ranks > 1:
        buckets = choices["ddp_buckets"]
        assert found["ddp_find_unused_parameters"] == buckets["find_unused"]
        assert found["ddp_static_graph"] == buckets["static_graph"]
        assert found.get("ddp_bucket_cap_mb") == ddp_arguments(recommendation).get("bucket_cap_mb")
    if recommendation.hardware.device_kind == "cuda":
        assert found["tf32"] == (choices["backend_flags"]["tf32"] or choices["precision"]["level"] == "tf32")
    if choices["sharding"]["mode"] in ("full", "grad_op"):
        sharding = choices["sharding"]
        reshard = sharding["mode"] == "full" and sharding["reshard"]
        assert found["plugin"] == {"version": 2, "reshard": reshard}
    settings_mean(found["settings"], recommendation, optimizer=False)


def lightning_means(found: dict, recommendation: Recommendation) -> None:
    preparations_mean(found["prepared"], recommendation)
    epochs_mean(found["epochs"], recommendation)
    choices = recommendation.choices
    precision, level = choices["precision"], choices["precision"]["level"]
    short = {"bfloat16": "bf16", "float16": "16"}.get(precision["dtype"], "32")
    assert found["precision"] == {"O1": f"{short}-mixed", "O3": f"{short}-true"}.get(level, "32-true")
    assert found["devices"] == recommendation.num_ranks
    assert found["accumulation"] == pieces_of(recommendation)[1]
    assert found["benchmark"] == choices["backend_flags"]["cudnn_benchmark"]
    assert found["compiled"] == (choices["compile"]["mode"] is not None and choices["compile"]["scope"] == "whole")
    sharding = choices["sharding"]["mode"]
    names = {"full": "FULL_SHARD", "grad_op": "SHARD_GRAD_OP"}
    if sharding in names:
        assert (found["strategy"], found["sharding"]) == ("FSDPStrategy", names[sharding])
    else:
        assert found["ddp"] == ddp_arguments(recommendation)
        compression = choices["gradient_compression"]
        hooks = {"fp16": "fp16_compress_hook", "bf16": "bf16_compress_hook", "powersgd": "powerSGD_hook"}
        assert found["hook"] == hooks.get(compression["method"])
        assert found["rank"] == (compression["rank"] if compression["method"] == "powersgd" else None)
        assert found["strategy"] == ("DDPStrategy" if recommendation.num_ranks > 1 else "SingleDeviceStrategy")
    settings_mean(found["settings"], recommendation)
    loader_means(found["settings"]["loader"], recommendation)


def deepspeed_means(found: dict, recommendation: Recommendation) -> None:
    choices = recommendation.choices
    assert found["batch"] == [recommendation.global_batch, *pieces_of(recommendation)]
    autocast = half_of(recommendation, {name: f"torch.{name}" for name in ("bfloat16", "float16")}, "")
    assert (found["autocast"] or "") == autocast
    assert not found["bfloat16"]
    sharding = choices["sharding"]
    assert found["stage"] == {"full": 3, "grad_op": 2, "zero1": 1}.get(sharding["mode"], 0)
    offloads = bool(sharding.get("cpu_offload")) and found["stage"] > 0
    assert found["offload_optimizer"] == ("cpu" if offloads else None)
    assert found["offload_param"] == ("cpu" if offloads and found["stage"] == 3 else None)


def torchtitan_means(found: dict, recommendation: Recommendation) -> None:
    choices = recommendation.choices
    size, _ = pieces_of(recommendation)
    assert found["batch"] == [recommendation.global_batch, size]
    level, dtype = choices["precision"]["level"], choices["precision"]["dtype"]
    half = dtype == "bfloat16"
    assert found["dtypes"] == [
        "bfloat16" if level == "O3" and half else "float32",
        "bfloat16" if level in ("O1", "O3") and half else "float32",
    ]
    assert not found["cuda_graphs"]
    recomputed = choices["activation_checkpointing"] == {"every": 1, "save": None}
    assert found["checkpointing"] == ("FullAC.Config" if recomputed else None)
    compile_ = choices["compile"]
    assert found["compile"][0] == ((compile_["mode"], compile_["scope"]) == ("default", "regional"))
    implementation = choices["optimizer_implementation"]["implementation"]
    assert found["optimizer"] == {"for_loop": "for-loop", "foreach": "foreach"}.get(implementation, "fused")
    loading = choices["data_loading"]
    assert found["loader"][0] == loading["num_workers"]
    assert found["recipe"] == [True, True]
    sharding = choices["sharding"]
    ranks = recommendation.num_ranks
    shards = sharding["mode"] in ("full", "grad_op")
    assert found["degrees"] == ([1, ranks] if shards else [ranks, 1])
    if shards:
        assert found["reshard"] == ("always" if sharding["mode"] == "full" and sharding["reshard"] else "never")
        assert found["offload"] == sharding["cpu_offload"]


EXPECTED = {
    "accelerate": accelerate_fsdp2_means,
    "accelerate_fsdp1": accelerate_fsdp1_means,
    "accelerate_python": accelerate_python_means,
    "transformers": transformers_means,
    "lightning": lightning_means,
    "deepspeed": deepspeed_means,
    "torchtitan": torchtitan_means,
}


def test_every_target_of_a_library_is_checked() -> None:
    from steptune.tuner.export import EXPORTERS

    of_steptune = {"json", "yaml", "python", "torchrun"}
    assert {exporter.name for exporter in EXPORTERS} - of_steptune == set(EXPECTED) == set(SLIPS)


def test_the_recommendations_cover_every_level_and_mode() -> None:
    levels = {recommendation.choices["precision"]["level"] for recommendation in RECOMMENDATIONS.values()}
    assert levels == set(Precision.values["level"])
    assert set(SHARDED) <= set(RECOMMENDATIONS)
    assert set(CUDA) <= set(RECOMMENDATIONS)
