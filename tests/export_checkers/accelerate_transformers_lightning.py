"""Loads exports with accelerate, transformers and lightning, and a study with optuna-dashboard."""

import dataclasses
import json
import os
import runpy
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import accelerate
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from protocol import refuse_unknown, serve

# Where the launcher's argument and the field of the plugin have two names.
FSDP_FIELDS = {
    "version": "fsdp_version",
    "offload_params": "cpu_offload",
    "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
}
DYNAMO_FIELDS = {
    "use_fullgraph": "fullgraph",
    "use_dynamic": "dynamic",
    "use_regional_compilation": "use_regional_compilation",
}


def fields(plugin) -> set[str]:
    return {field.name for field in dataclasses.fields(plugin)}


def check_section(section, prefix: str, plugin, renamed) -> None:
    """Every key is an argument of the launcher and sets a field of the plugin."""
    arguments = {action.dest for action in launch_command_parser()._actions}
    refuse_unknown(section, arguments, "accelerate launch")
    names = [key.removeprefix(prefix) for key in section]
    refuse_unknown([renamed.get(name, name) for name in names], fields(plugin), plugin.__name__)


def accelerate_yaml(path: str):
    """Plugins in a process that `accelerate launch` starts with this file."""
    content = yaml.safe_load(Path(path).read_text())
    config = load_config_from_file(path)
    check_section(content.get("fsdp_config", {}), "fsdp_", FullyShardedDataParallelPlugin, FSDP_FIELDS)
    check_section(content.get("dynamo_config", {}), "dynamo_", TorchDynamoPlugin, DYNAMO_FIELDS)
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", path, "train.py"]))
    if arguments.use_fsdp or arguments.multi_gpu:
        variables = prepare_multi_gpu_env(arguments)
    else:
        _, variables = prepare_simple_launcher_cmd_env(arguments)
    os.environ.update(variables)
    dynamo = TorchDynamoPlugin()
    found = {
        "distributed_type": config.distributed_type.value,
        "num_processes": config.num_processes,
        "mixed_precision": os.environ["ACCELERATE_MIXED_PRECISION"],
        "use_cpu": config.use_cpu,
        "backend": dynamo.backend.value,
        "mode": dynamo.mode,
        "regional": dynamo.use_regional_compilation,
    }
    if arguments.use_fsdp:
        with (
            mock.patch("accelerate.utils.dataclasses.is_cuda_available", return_value=True),
            mock.patch("torch.cuda.current_device", return_value=0),
        ):
            fsdp = FullyShardedDataParallelPlugin()
        found["fsdp"] = {
            "version": fsdp.fsdp_version,
            "strategy": getattr(fsdp.sharding_strategy, "name", None),
            "reshard": fsdp.reshard_after_forward,
            # FSDP1 has a flag, FSDP2 a policy.
            "offload": getattr(
                fsdp.cpu_offload, "offload_params", type(fsdp.cpu_offload).__name__ == "CPUOffloadPolicy"
            ),
            "min_num_params": fsdp.min_num_params,
            "prefetch": getattr(fsdp.backward_prefetch, "name", None),
            "checkpointing": fsdp.activation_checkpointing,
            "wrap": getattr(fsdp.auto_wrap_policy, "__name__", None),
        }
    return found


def code_settings(module) -> dict:
    """Apply the settings in code; return what they make: loader, optimizer, threads."""
    threads = torch.get_num_threads()
    flushing = torch.set_flush_denormal(False)
    try:
        module["set_up"]()
        parameter = torch.nn.Parameter(torch.zeros(2))
        group = torch.optim.AdamW([parameter], lr=0.1, **module.get("OPTIMIZER", {})).param_groups[0]
        found = {
            "threads": torch.get_num_threads(),
            "tf32": torch.get_float32_matmul_precision() == "high",
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "flush_denormals": flushing and (torch.tensor([1e-39]) * 1.0).item() == 0.0,
            "fused": bool(group["fused"]),
            "foreach": bool(group["foreach"]),
            "variables": {name: os.environ.get(name) for name in ("OMP_PROC_BIND", "OMP_NUM_THREADS")},
        }
        if "DATALOADER" in module:
            loader = torch.utils.data.DataLoader(list(range(64)), **module["DATALOADER"])
            names = ("batch_size", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
            found["loader"] = {name: getattr(loader, name) for name in names}
        return found
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = False
        torch.set_flush_denormal(False)


def preparations(module) -> dict:
    """The model and the dataset after both functions."""
    blocks = torch.nn.Sequential(*(torch.nn.Conv2d(3, 3, 3) for _ in range(2)))
    parameter = next(module["prepared"](blocks).parameters())
    dataset = module["prepared_dataset"]([1, 2])
    return {
        "channels_last": parameter.is_contiguous(memory_format=torch.channels_last),
        "cached": getattr(dataset, "where", None),
        "samples": [dataset[0], dataset[1]],
    }


class Rows(torch.utils.data.Dataset):
    """Numbers as the Trainer collates them; at the top of a module, so that workers find it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"number": torch.tensor(index)}


KEPT = {"batch_size": 2, "num_workers": 1, "persistent_workers": True}


def shuffled_loader():
    """The same order in every process."""
    return torch.utils.data.DataLoader(Rows(), shuffle=True, generator=torch.Generator().manual_seed(0), **KEPT)


def epochs_of(plain, prepared) -> dict:
    """Say whether three epochs have the same batches, and how many of them began with idle workers; None where workers
    wait for each epoch.
    """
    found, wanted = ([[b["number"].tolist() for b in loader] for _ in range(3)] for loader in (prepared, plain))
    inner = getattr(prepared, "base_dataloader", prepared)
    return {"same": found == wanted, "restarts": getattr(inner, "num_restarts", None)}


def accelerate_python(path: str):
    os.environ["OMP_NUM_THREADS"] = "1"  # as accelerate launch does
    module = runpy.run_path(path)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, **module["ACCELERATOR"])
    found = {
        **code_settings(module),
        "prepared": preparations(module),
        "epochs": epochs_of(
            accelerator.prepare(shuffled_loader()), module["prepared_loader"](accelerator.prepare(shuffled_loader()))
        ),
        "accumulation": accelerator.gradient_accumulation_steps,
        "ddp": {},
        "hook": None,
    }
    if accelerator.ddp_handler is None:
        return found
    handler = accelerator.ddp_handler
    hook = [handler.comm_hook.value, handler.comm_state_option.get("matrix_approximation_rank")]
    plain = accelerate.DistributedDataParallelKwargs().to_dict()
    ddp = {name: value for name, value in handler.to_dict().items() if value != plain[name]}
    return {**found, "ddp": ddp, "hook": hook}


def transformers_arguments(path: str):
    """Read arguments that need a GPU to be accepted, and leave them out of what is made."""
    module = runpy.run_path(path)
    arguments = module["ARGUMENTS"]
    from transformers import Trainer, TrainingArguments

    refuse_unknown(arguments, fields(TrainingArguments), "TrainingArguments")
    with tempfile.TemporaryDirectory() as folder:
        made = module["training_arguments"](folder, use_cpu=True, tf32=None, report_to="none")
        workers = {f"dataloader_{name}": value for name, value in KEPT.items() if name != "batch_size"}
        plain = TrainingArguments(
            folder,
            use_cpu=True,
            report_to="none",
            per_device_train_batch_size=2,
            remove_unused_columns=False,
            **workers,
        )
        one, other = (Trainer(torch.nn.Linear(1, 1), plain, train_dataset=Rows()) for _ in range(2))
        epochs = epochs_of(one.get_train_dataloader(), module["prepared_trainer"](other).get_train_dataloader())
    found = {name: getattr(made, name) for name in arguments if name not in ("use_cpu", "tf32")}
    found["dataloader_pin_memory"] = arguments["dataloader_pin_memory"]  # made False on CPUs
    if made.fsdp_plugin_args:
        plugin = FullyShardedDataParallelPlugin(
            **{name: value for name, value in made.fsdp_plugin_args.items() if name != "transformer_cls_names_to_wrap"}
        )
        found["plugin"] = {"version": plugin.fsdp_version, "reshard": plugin.reshard_after_forward}
    settings = code_settings({"set_up": module["set_up"]})
    return {
        **found,
        "tf32": arguments.get("tf32"),
        "settings": settings,
        "prepared": preparations(module),
        "epochs": epochs,
    }


def fitted_batches(prepared_loader) -> list:
    """Batches of two fits of three epochs each, by Lightning's own loop, with the same loader."""
    from lightning.pytorch import LightningModule, Trainer

    class Seen(LightningModule):
        def __init__(self):
            super().__init__()
            self.weight, self.batches = torch.nn.Parameter(torch.zeros(1)), []

        def training_step(self, batch, index):
            self.batches.append(batch["number"].tolist())
            return self.weight.sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)  # by which the loader without a generator shuffles
    seen, loader = Seen(), prepared_loader(torch.utils.data.DataLoader(Rows(), shuffle=True, **KEPT))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for _ in range(2):
        Trainer(accelerator="cpu", max_epochs=3, enable_model_summary=False, **quiet).fit(seen, loader)
    return seen.batches


def lightning(path: str):
    """Make the trainer as on a machine with eight GPUs where the file asks for them."""
    module = runpy.run_path(path)
    gpus = 8 if module["TRAINER"]["accelerator"] == "gpu" else 0
    patches = [
        mock.patch("lightning.fabric.accelerators.cuda.num_cuda_devices", return_value=gpus),
        mock.patch("lightning.fabric.accelerators.cuda.is_cuda_available", return_value=bool(gpus)),
        mock.patch("lightning.pytorch.accelerators.cuda.num_cuda_devices", return_value=gpus),
        mock.patch("torch.cuda.set_device"),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
    ]
    for patch in patches:
        patch.start()
    try:
        made = module["trainer"](logger=False, enable_checkpointing=False, enable_progress_bar=False)
        strategy = made.strategy
        found = {
            "accelerator": type(made.accelerator).__name__,
            "devices": made.num_devices,
            "precision": made.precision,
            "accumulation": made.accumulate_grad_batches,
            "strategy": type(strategy).__name__,
            "ddp": getattr(strategy, "_ddp_kwargs", {}),
            "hook": getattr(getattr(strategy, "_ddp_comm_hook", None), "__name__", None),
            "rank": getattr(getattr(strategy, "_ddp_comm_state", None), "matrix_approximation_rank", None),
            "sharding": getattr(getattr(strategy, "sharding_strategy", None), "name", None),
        }
    finally:
        for patch in patches:
            patch.stop()
    fitted = module["prepared"](torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(2))))
    found["benchmark"] = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    compiled = isinstance(fitted, torch._dynamo.OptimizedModule)
    epochs = epochs_of(shuffled_loader(), module["prepared_loader"](shuffled_loader()))
    epochs["fitted"] = fitted_batches(module["prepared_loader"]) == fitted_batches(lambda loader: loader)
    found |= {"settings": code_settings(module), "prepared": preparations(module), "epochs": epochs}
    return {**found, "compiled": compiled}


def optuna(path: str):
    """Data that the pages of optuna-dashboard ask for."""
    from optuna_dashboard import wsgi
    from optuna_dashboard._storage_url import get_storage

    application = wsgi(get_storage(path))

    def get(url: str) -> dict:
        answered = []
        asked = {"REQUEST_METHOD": "GET", "PATH_INFO": url, "QUERY_STRING": "after=0", "wsgi.errors": sys.stderr}
        body = b"".join(application(asked, lambda status, headers, error=None: answered.append(status)))
        assert answered[0].startswith("200"), answered
        return json.loads(body)

    (summary,) = get("/api/studies")["study_summaries"]
    detail = get(f"/api/studies/{summary['study_id']}")
    return {
        "name": summary["study_name"],
        "directions": summary["directions"],
        "states": [trial["state"] for trial in detail["trials"]],
        "parameters": sorted(parameter["name"] for parameter in detail["union_search_space"]),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    serve(
        {
            "accelerate": accelerate_yaml,
            "accelerate_fsdp1": accelerate_yaml,
            "accelerate_python": accelerate_python,
            "transformers": transformers_arguments,
            "lightning": lightning,
            "optuna": optuna,
        }
    )
