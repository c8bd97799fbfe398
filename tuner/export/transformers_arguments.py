"""Export to Hugging Face transformers: a function that makes TrainingArguments.

Every argument that decides speed or numerics is given, defaults included: transformers has other defaults than PyTorch
(a fused optimizer, pinned memory, TF32 beside compilation).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from steptune.tuner.export import prepared_code, python_code
from steptune.tuner.export.prepared_code import preparations, trainer_preparation
from steptune.tuner.export.python_code import NO_BATCH, NO_LAYOUT, ONE_RANK, constant, imports, set_up_code
from steptune.tuner.export.settings import batch_per_rank, choice_of
from steptune.tuner.export.sharding import STRATEGY, WRAPS, sharding_of
from steptune.tuner.export.translation import Rule, Said, TranslatingExporter
from steptune.tuner.records import Choice, Recommendation
from steptune.tuner.strategies.activation_checkpointing.choice import ActivationCheckpointingSetting
from steptune.tuner.strategies.allocator.choice import AllocatorSetting
from steptune.tuner.strategies.backend_flags.choice import BackendFlagsSetting
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.strategies.cpu_threads.choice import CpuThreadsSetting
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.ddp_buckets.choice import DdpBucketsSetting
from steptune.tuner.strategies.micro_batch.choice import MicroBatchSetting
from steptune.tuner.strategies.nccl_settings.choice import NcclSetting
from steptune.tuner.strategies.optimizer_implementation.choice import OptimizerImplementationSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting

_ARGUMENTS = "ARGUMENTS"
_DDP_FLAGS = {"find_unused_parameters": "find_unused", "static_graph": "static_graph"}


def _said(missing: Mapping[str, str] | None = None, **arguments: Any) -> Said:
    return Said(sections={_ARGUMENTS: arguments}, missing=missing or {})


def _data_loading(choice: Choice, recommendation: Recommendation) -> Said:
    arguments = {f"dataloader_{name}": value for name, value in python_code.loader_arguments(choice).items()}
    return Said(sections={_ARGUMENTS: arguments, "loader": python_code.loader_lines(choice)})


def _precision(choice: Choice, recommendation: Recommendation) -> Said:
    level, dtype = choice["level"], choice["dtype"]
    mixed = {"bf16": level == "O1" and dtype == "bfloat16", "fp16": level == "O1" and dtype == "float16"}
    if recommendation.hardware.device_kind == "cuda":
        mixed["tf32"] = level == "tf32" or bool(choice_of(recommendation, BackendFlagsSetting.strategy)["tf32"])
    missing = {}
    if level in ("O2", "O3"):
        missing = dict.fromkeys(
            ("level", "dtype"), "TrainingArguments do not cast the model; this export trains in FP32"
        )
    return _said(missing, **mixed)


def _backend_flags(choice: Choice, recommendation: Recommendation) -> Said:
    """Return the settings for backend flags except TF32, which is an argument of TrainingArguments: that argument would
    undo flags set in code.
    """
    lines = python_code.flag_lines({**choice, "tf32": False})
    return Said(sections={"set_up": lines})


def _compile(choice: Choice, recommendation: Recommendation) -> Said:
    if choice["mode"] is None:
        return _said(torch_compile=False)
    if choice["scope"] == "regional":
        blocks = prepared_code.compile_blocks(choice)
        return Said(sections={**blocks.sections, _ARGUMENTS: {"torch_compile": False}})
    automatic = choice["dynamic"] is None
    differs = {} if automatic else {"dynamic": "TrainingArguments leave dynamic shapes to PyTorch's automatic choice"}
    arguments = {"torch_compile": True, "torch_compile_backend": "inductor", "torch_compile_mode": choice["mode"]}
    return Said(sections={_ARGUMENTS: arguments}, differs=differs)


def _optimizer(choice: Choice, recommendation: Recommendation) -> Said:
    fused = choice["implementation"] == "fused"
    reason = "optim leaves the implementation to PyTorch; to set it, pass Trainer an optimizer made with **OPTIMIZER"
    if fused:
        reason = "optim selects PyTorch's fused AdamW; to use another optimizer, pass Trainer one made with **OPTIMIZER"
    return Said(
        sections={
            _ARGUMENTS: {"optim": "adamw_torch_fused" if fused else "adamw_torch"},
            **python_code.optimizer_implementation(choice, recommendation).sections,
        },
        missing={"contiguous": NO_LAYOUT},
        differs={"implementation": reason},
    )


def _checkpointing(choice: Choice, recommendation: Recommendation) -> Said:
    every = choice["every"]
    if every is None:
        return _said()  # the default of every version; the name of the argument is not
    reason = "works only with models from the transformers library, because only they declare their layers"
    whole = "transformers recomputes only whole layers"
    kwargs = {"every_n_layers": every, "use_reentrant": False}
    missing = {"every": reason} if choice["save"] is None else {"every": reason, "save": whole}
    return _said(missing, activation_checkpointing=True, activation_checkpointing_kwargs=kwargs)


def _micro_batch(choice: Choice, recommendation: Recommendation) -> Said:
    found = batch_per_rank(recommendation)
    if found is None:
        return _said({"num_micro_batches": NO_BATCH})
    size, pieces = found
    return _said(per_device_train_batch_size=size, gradient_accumulation_steps=pieces)


def _ddp_buckets(choice: Choice, recommendation: Recommendation) -> Said:
    """Return the settings for DDP buckets. `ddp_find_unused_parameters` is always among them, because the Trainer turns
    it on by default.
    """
    if recommendation.num_ranks == 1:
        return Said(missing=dict.fromkeys(choice, ONE_RANK))
    arguments: dict[str, Any] = {f"ddp_{name}": choice[part] for name, part in _DDP_FLAGS.items()}
    if (choice["bucket_cap_mb"], choice["first_bucket_mb"]) != (25, 1):
        arguments["ddp_bucket_cap_mb"] = choice["bucket_cap_mb"]
    missing = {}
    if choice["bucket_views"]:
        missing["bucket_views"] = "TrainingArguments have no setting for it; use steptune.apply"
    return Said(sections={_ARGUMENTS: arguments}, missing=missing, differs=python_code.first_bucket(choice))


def _sharding(choice: Choice, recommendation: Recommendation) -> Said:
    sharding = sharding_of(recommendation)
    if not sharding.shards:
        return Said()
    if not sharding.words.fsdp2:
        return Said(missing=dict.fromkeys(choice, "TrainingArguments shard by FSDP2; this export does not shard"))
    config: dict[str, Any] = {
        "version": 2,
        "reshard_after_forward": sharding.mode == "full" and sharding.reshard,
        "cpu_offload": sharding.cpu_offload,
        "auto_wrap_policy": WRAPS[sharding.wrap],
    }
    if sharding.size is not None:
        config["min_num_params"] = sharding.size
    missing = sharding.unsaid()
    if sharding.wrap == "block":
        missing["wrap"] = "works only with models from the transformers library, because only they declare their layers"
    return _said(missing, fsdp=True, fsdp_config=config)


class TransformersArguments(TranslatingExporter):
    name = "transformers"
    summary = "TrainingArguments of Hugging Face transformers, as a Python function"
    version = "transformers 5.23.0"
    usage = (
        'prepared_trainer(Trainer(prepared(model), training_arguments("out", max_grad_norm=..., learning_rate=...), '
        "train_dataset=prepared_dataset(dataset))).train(): the recipe stays yours"
    )
    comment = "#"
    lacks = "TrainingArguments have no setting for it; use steptune.apply"
    rules: ClassVar[Mapping[str, Rule]] = {
        DataLoadingSetting.strategy: _data_loading,
        CpuThreadsSetting.strategy: python_code.cpu_threads,
        AllocatorSetting.strategy: python_code.allocator,
        NcclSetting.strategy: python_code.nccl_settings,
        BackendFlagsSetting.strategy: _backend_flags,
        **prepared_code.RULES,
        PrecisionSetting.strategy: _precision,
        CompileSetting.strategy: _compile,
        OptimizerImplementationSetting.strategy: _optimizer,
        ActivationCheckpointingSetting.strategy: _checkpointing,
        MicroBatchSetting.strategy: _micro_batch,
        DdpBucketsSetting.strategy: _ddp_buckets,
        STRATEGY: _sharding,
    }

    def file_name(self, recommendation: Recommendation) -> str:
        return "training_arguments.py"

    def export(self, recommendation: Recommendation) -> str:
        sections = self.sections(recommendation)
        arguments = {**sections[_ARGUMENTS], "use_cpu": recommendation.hardware.device_kind == "cpu"}
        optimizer = sections.get("OPTIMIZER", {})
        code = (
            constant(_ARGUMENTS, arguments, "Settings for speed and numerics, without the recipe.")
            + constant("OPTIMIZER", optimizer, "arguments of your own optimizer, for Trainer(optimizers=...)")
            + "\n\n"
            + set_up_code(sections)
            + "\n\ndef training_arguments(output_dir, **recipe):\n"
            '    """Make the process-wide settings, and return the arguments; yours override recommended ones."""\n'
            "    set_up()\n"
            "    return TrainingArguments(output_dir=output_dir, **{**ARGUMENTS, **recipe})\n"
            + preparations(sections)
            + trainer_preparation(sections)
        )
        more = ["from transformers import TrainingArguments"]
        more = ["import weakref", *more] if "weakref." in code else more
        above = imports(recommendation, code, *more)
        return f"{self.header(recommendation)}\n{above}\n{code}"
