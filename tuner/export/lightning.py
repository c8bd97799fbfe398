"""Export to Lightning: a function that makes the Trainer, and arguments of the objects that a LightningModule
constructs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from steptune.tuner.export import prepared_code, python_code
from steptune.tuner.export.prepared_code import preparations
from steptune.tuner.export.python_code import constant, imports, literal, set_up_code
from steptune.tuner.export.sharding import STRATEGY, reduced_by_fsdp, sharding_of
from steptune.tuner.export.translation import Rule, Said, TranslatingExporter
from steptune.tuner.records import Choice, Recommendation
from steptune.tuner.strategies.allocator.choice import AllocatorSetting
from steptune.tuner.strategies.backend_flags.choice import BackendFlagsSetting
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.strategies.cpu_threads.choice import CpuThreadsSetting
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.ddp_buckets.choice import DdpBucketsSetting
from steptune.tuner.strategies.gradient_compression.choice import GradientCompressionSetting
from steptune.tuner.strategies.micro_batch.choice import MicroBatchSetting
from steptune.tuner.strategies.nccl_settings.choice import NcclSetting
from steptune.tuner.strategies.optimizer_implementation.choice import OptimizerImplementationSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting

_TRAINER = "TRAINER"
_SHORT = {"bfloat16": "bf16", "float16": "16"}


def _precision(choice: Choice, recommendation: Recommendation) -> Said:
    level, dtype = choice["level"], choice["dtype"]
    if level == "O2":
        reason = (
            "Lightning has no 16-bit weights with FP32 masters and FP32 normalisation layers; this export trains in "
            "FP32"
        )
        return Said(sections={_TRAINER: {"precision": "32-true"}}, missing=dict.fromkeys(choice, reason))
    kind = {"O1": "mixed", "O3": "true"}.get(str(level))
    precision = f"{_SHORT[str(dtype)]}-{kind}" if kind else "32-true"
    return Said(sections={_TRAINER: {"precision": precision}, "set_up": python_code.tf32_lines(choice)})


def _backend_flags(choice: Choice, recommendation: Recommendation) -> Said:
    """Return the settings for backend flags. cuDNN's benchmark mode is set as an argument of the Trainer, because the
    Trainer would undo a flag set in code.
    """
    lines = python_code.flag_lines({**choice, "cudnn_benchmark": False})
    return Said(sections={_TRAINER: {"benchmark": bool(choice["cudnn_benchmark"])}, "set_up": lines})


def _compile(choice: Choice, recommendation: Recommendation) -> Said:
    if choice["mode"] is None:
        return Said()
    if choice["scope"] == "regional":
        return prepared_code.compile_blocks(choice)
    dynamic = {} if choice["dynamic"] is None else {"dynamic": choice["dynamic"]}
    return Said(sections={"COMPILE": {"mode": choice["mode"], **dynamic}})


def _compression(choice: Choice, recommendation: Recommendation) -> Said:
    """Return PyTorch's communication hook for a compression, with its state if it has one."""
    if recommendation.num_ranks == 1:
        return Said(missing=dict.fromkeys(choice, python_code.ONE_RANK))
    if by_fsdp := reduced_by_fsdp(choice, recommendation):
        return Said(missing=by_fsdp)
    method = choice["method"]
    if method in ("fp16", "bf16"):
        return Said(sections={"DDP": {"ddp_comm_hook": python_code.Code(f"default_hooks.{method}_compress_hook")}})
    if method != "powersgd":
        return Said(missing=python_code.compression_missing(choice))
    state = (
        f"powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank={choice['rank']}, "
        f"start_powerSGD_iter={python_code.POWERSGD_STEPS})"
    )
    hook = {"ddp_comm_state": python_code.Code(state), "ddp_comm_hook": python_code.Code("powerSGD_hook.powerSGD_hook")}
    return Said(sections={"DDP": hook})


def _sharding(choice: Choice, recommendation: Recommendation) -> Said:
    sharding = sharding_of(recommendation)
    if not sharding.shards:
        return Said()
    if sharding.words.fsdp1 is None:
        return Said(missing=dict.fromkeys(choice, "Lightning shards by FSDP1; this export does not shard"))
    if sharding.mode == "hybrid":
        reason = (
            "hybrid sharding in FSDPStrategy requires your auto_wrap_policy or device_mesh; this export does not shard"
        )
        return Said(missing=dict.fromkeys(choice, reason))
    options = {"sharding_strategy": sharding.words.fsdp1, "cpu_offload": sharding.cpu_offload}
    missing = sharding.unsaid()
    if sharding.wrap != "root":
        missing |= dict.fromkeys(("wrap", "min_num_params"), "pass FSDPStrategy an auto_wrap_policy for your classes")
    return Said(sections={"FSDP": options}, missing=missing)


class LightningTrainer(TranslatingExporter):
    name = "lightning"
    summary = "a Lightning Trainer, as a Python function"
    version = "lightning 2.6.6"
    usage = (
        "trainer(max_epochs=...).fit(prepared(module), prepared_loader(DataLoader(prepared_dataset(dataset), "
        "**DATALOADER)))"
    )
    comment = "#"
    lacks = "Lightning has no setting for it; use steptune.apply"
    rules: ClassVar[Mapping[str, Rule]] = {
        DataLoadingSetting.strategy: python_code.data_loading,
        CpuThreadsSetting.strategy: python_code.cpu_threads,
        AllocatorSetting.strategy: python_code.allocator,
        NcclSetting.strategy: python_code.nccl_settings,
        BackendFlagsSetting.strategy: _backend_flags,
        **prepared_code.RULES,
        PrecisionSetting.strategy: _precision,
        CompileSetting.strategy: _compile,
        OptimizerImplementationSetting.strategy: python_code.optimizer_implementation,
        MicroBatchSetting.strategy: python_code.accumulation(_TRAINER, "accumulate_grad_batches"),
        DdpBucketsSetting.strategy: python_code.ddp_buckets("DDP"),
        GradientCompressionSetting.strategy: _compression,
        STRATEGY: _sharding,
    }

    def file_name(self, recommendation: Recommendation) -> str:
        return "lightning_trainer.py"

    def export(self, recommendation: Recommendation) -> str:
        sections = self.sections(recommendation)
        options = {**_placement(recommendation), **sections[_TRAINER]}
        fsdp, ddp, compiled = (sections.get(name) for name in ("FSDP", "DDP", "COMPILE"))
        strategy = literal("ddp" if recommendation.num_ranks > 1 else "auto")
        name, arguments = ("FSDPStrategy", fsdp) if fsdp else ("DDPStrategy", ddp)
        if arguments:
            strategy = f"{name}({_arguments(arguments)})"
        optimizer = sections.get("OPTIMIZER", {})
        code = (
            constant(_TRAINER, options, "Settings for speed and numerics, without the recipe.")
            + constant("DATALOADER", sections["DATALOADER"], "torch.utils.data.DataLoader(dataset, **DATALOADER)")
            + constant("OPTIMIZER", optimizer, "in configure_optimizers: its class(parameters, ..., **OPTIMIZER)")
            + "\n\n"
            + set_up_code(sections)
            + "\n\ndef trainer(**recipe):\n"
            '    """Make the process-wide settings, and return the Trainer; arguments override recommended ones."""\n'
            "    set_up()\n"
            f'    return Trainer(**{{**TRAINER, "strategy": {strategy}, **recipe}})\n'
            + preparations(sections, f"torch.compile(model, {_arguments(compiled)})" if compiled else "model")
        )
        more = ["from lightning.pytorch import Trainer"]
        more += [f"from lightning.pytorch.strategies import {name}"] if arguments else []
        hooks = [module for module in ("default_hooks", "powerSGD_hook") if f"{module}." in code]
        more += [f"from torch.distributed.algorithms.ddp_comm_hooks import {module}" for module in hooks]
        return f"{self.header(recommendation)}\n{imports(recommendation, code, *more)}\n{code}"


def _placement(recommendation: Recommendation) -> dict[str, Any]:
    kind = recommendation.hardware.device_kind
    return {"accelerator": "cpu" if kind == "cpu" else "gpu", "devices": recommendation.num_ranks, "num_nodes": 1}


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={literal(value)}" for name, value in values.items())
