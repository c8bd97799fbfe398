"""Export to Hugging Face Accelerate: the configuration of `accelerate launch`, for FSDP2 and FSDP1, and the settings in
code.

The launcher refuses unknown keys at the top, but takes any key inside a section: a slip there would be ignored. Its
keys are those of `ClusterConfig` and of the launcher's arguments.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import yaml

from steptune.tuner.export import prepared_code, python_code
from steptune.tuner.export.prepared_code import preparations
from steptune.tuner.export.python_code import constant, imports, set_up_code
from steptune.tuner.export.settings import threads_lost
from steptune.tuner.export.sharding import STRATEGY, WRAPS, reduced_by_fsdp, sharding_of
from steptune.tuner.export.translation import Rule, Said, Sections, TranslatingExporter
from steptune.tuner.records import Choice, Recommendation
from steptune.tuner.strategies.activation_checkpointing.choice import ActivationCheckpointingSetting
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

VERSION = "accelerate 1.15.0"
_IN_CODE = "the YAML has no key for it; the accelerate_python export sets it"
_IN_YAML = "set in the YAML (export accelerate, or accelerate_fsdp1)"
_NO_ZERO1 = "Accelerate has ZeRO-1 only through DeepSpeed; export deepspeed"
_NOWHERE = "Accelerate has no setting for it; use steptune.apply"
_MIXED = {"bfloat16": "bf16", "float16": "fp16"}
_MODES = ("default", "reduce-overhead", "max-autotune")


def _precision(choice: Choice, recommendation: Recommendation) -> Said:
    level, dtype = choice["level"], choice["dtype"]
    if level == "O1":
        return Said(sections={"": {"mixed_precision": _MIXED[str(dtype)]}})
    reasons = {
        "O2": "Accelerate has no 16-bit weights with FP32 masters and FP32 normalisation layers; this export trains in "
        "FP32",
        "O3": "Accelerate does not cast the model; this export trains in FP32",
        "tf32": _IN_CODE,
    }
    missing = {name: reasons[str(level)] for name in ("level", "dtype") if level in reasons}
    return Said(sections={"": {"mixed_precision": "no"}}, missing=missing)


def _compile(choice: Choice, recommendation: Recommendation) -> Said:
    mode, regional = choice["mode"], choice["scope"] == "regional"
    if mode is None:
        return Said(sections={"dynamo_config": {"dynamo_backend": "NO"}})
    if mode not in _MODES:
        reason = f"Accelerate compiles only in the modes {', '.join(_MODES)}; this export does not compile"
        return Said(sections={"dynamo_config": {"dynamo_backend": "NO"}}, missing=dict.fromkeys(choice, reason))
    keys: dict[str, Any] = {
        "dynamo_backend": "INDUCTOR",
        "dynamo_mode": mode,
        "dynamo_use_fullgraph": False,
        "dynamo_use_regional_compilation": regional,
    }
    differs = {}
    if choice["dynamic"] is None:  # the launcher takes a missing key for False
        differs["mode"] = "Accelerate recompiles for every new batch shape (the YAML has no automatic dynamic shapes)"
    else:
        keys["dynamo_use_dynamic"] = choice["dynamic"]
    if regional:
        differs["scope"] = "Accelerate also compiles the modules outside the repeated blocks"
    return Said(sections={"dynamo_config": keys}, differs=differs)


def _checkpointing(choice: Choice, recommendation: Recommendation) -> Said:
    every = choice["every"]
    if not sharding_of(recommendation).words.fsdp1:
        reason = "Accelerate checkpoints activations only with FSDP; use steptune.apply"
        return Said(missing=dict.fromkeys(("every", "save"), reason))
    if every is None:
        return Said(sections={"fsdp_config": {"fsdp_activation_checkpointing": False}})
    if choice["save"] is not None:
        return Said(
            missing=dict.fromkeys(
                ("every", "save"), "Accelerate recomputes only whole blocks; this export recomputes none"
            )
        )
    if every == 1:
        return Said(sections={"fsdp_config": {"fsdp_activation_checkpointing": True}})
    return Said(
        missing={
            "every": "FSDP in Accelerate checkpoints all of its blocks or none; this export checkpoints none of them"
        }
    )


def _fsdp1(recommendation: Recommendation) -> Said:
    sharding = sharding_of(recommendation)
    return Said(
        sections={
            "fsdp_config": {
                "fsdp_version": 1,
                "fsdp_sharding_strategy": sharding.fsdp1,
                **_wrapping(recommendation),
                "fsdp_backward_prefetch": "BACKWARD_PRE",
                "fsdp_forward_prefetch": False,
                "fsdp_use_orig_params": True,
                "fsdp_cpu_ram_efficient_loading": False,
                "fsdp_sync_module_states": True,
            }
        },
        missing=_unwrapped(recommendation) | sharding.unsaid(),
    )


def _fsdp2(recommendation: Recommendation) -> Said:
    sharding = sharding_of(recommendation)
    return Said(
        sections={
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": sharding.mode == "full" and sharding.reshard,
                **_wrapping(recommendation),
                "fsdp_cpu_ram_efficient_loading": False,
            }
        },
        missing=_unwrapped(recommendation) | sharding.unsaid(),
    )


def _wrapping(recommendation: Recommendation) -> dict[str, Any]:
    sharding = sharding_of(recommendation)
    keys: dict[str, Any] = {"fsdp_auto_wrap_policy": WRAPS[sharding.wrap]}
    if sharding.size is not None:
        keys["fsdp_min_num_params"] = sharding.size
    return {**keys, "fsdp_offload_params": sharding.cpu_offload, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}


def _unwrapped(recommendation: Recommendation) -> dict[str, str]:
    if sharding_of(recommendation).wrap != "block":
        return {}
    return {
        "wrap": "name the block's class in fsdp_transformer_layer_cls_to_wrap, unless the model comes from transformers"
    }


_HOOKS = {"fp16": "FP16", "bf16": "BF16", "powersgd": "POWER_SGD"}


def _code_compression(choice: Choice, recommendation: Recommendation) -> Said:
    if recommendation.num_ranks == 1:
        return Said(missing=dict.fromkeys(choice, python_code.ONE_RANK))
    if by_fsdp := reduced_by_fsdp(choice, recommendation):
        return Said(missing=by_fsdp)
    hook = _HOOKS.get(str(choice["method"]))
    if hook is None:
        return Said(missing=python_code.compression_missing(choice))
    arguments: dict[str, Any] = {"comm_hook": python_code.Code(f"DDPCommunicationHookType.{hook}")}
    if choice["method"] == "powersgd":
        steps = python_code.POWERSGD_STEPS
        arguments["comm_state_option"] = {"matrix_approximation_rank": choice["rank"], "start_powerSGD_iter": steps}
    return Said(sections={"DDP": arguments})


def _said_beside(words: str, rule: Rule) -> Rule:
    """Return the rule of one exported file for settings that the other file expresses. It reports each setting as
    missing, with the reason that the other file's rule gives, or else `words`. It repeats the differences that the
    other rule reports.
    """

    def missing(choice: Choice, recommendation: Recommendation) -> Said:
        there = rule(choice, recommendation)
        return Said(missing={**dict.fromkeys(choice, words), **there.missing}, differs=there.differs)

    return missing


_CODE_RULES: Mapping[str, Rule] = {
    DataLoadingSetting.strategy: python_code.data_loading,
    CpuThreadsSetting.strategy: python_code.cpu_threads,
    AllocatorSetting.strategy: python_code.allocator,
    NcclSetting.strategy: python_code.nccl_settings,
    BackendFlagsSetting.strategy: python_code.backend_flags,
    **prepared_code.RULES,
    OptimizerImplementationSetting.strategy: python_code.optimizer_implementation,
    MicroBatchSetting.strategy: python_code.accumulation("ACCELERATOR", "gradient_accumulation_steps"),
    DdpBucketsSetting.strategy: python_code.ddp_buckets("DDP"),
    GradientCompressionSetting.strategy: _code_compression,
}
"""Rules of the strategies that can be expressed in code only."""


class _Yaml(TranslatingExporter):
    """Base of the exporters of the YAML file, for FSDP2 and for FSDP1."""

    version = VERSION
    comment = "#"
    lacks = _NOWHERE
    beside = frozenset({_IN_CODE})
    rules: ClassVar[Mapping[str, Rule]] = {
        **{strategy: _said_beside(_IN_CODE, rule) for strategy, rule in _CODE_RULES.items()},
        PrecisionSetting.strategy: _precision,
        CompileSetting.strategy: _compile,
        ActivationCheckpointingSetting.strategy: _checkpointing,
    }

    @abstractmethod
    def sharded(self, recommendation: Recommendation) -> Said:
        """Return the settings of a recommendation that shards with FSDP."""

    def export(self, recommendation: Recommendation) -> str:
        sections = self.sections(self.checked(recommendation))
        top: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": _distributed_type(recommendation),
            "use_cpu": recommendation.hardware.device_kind == "cpu",
            "num_machines": 1,
            "num_processes": recommendation.num_ranks,
            **sections.pop("", {}),
        }
        if sharding_of(recommendation).words.fsdp1:
            said = self.sharded(recommendation).sections["fsdp_config"]
            sections["fsdp_config"] = {**said, **sections.get("fsdp_config", {})}
        return self.header(recommendation) + yaml.safe_dump({**top, **sections}, sort_keys=False)

    def notes(self, recommendation: Recommendation) -> tuple[str, ...]:
        found = []
        if threads_lost(recommendation):
            found.append("threads: accelerate launch sets OMP_NUM_THREADS; the accelerate_python export undoes that")
        if recommendation.num_ranks > 1 and recommendation.hardware.device_kind == "cpu":
            found.append("ranks: on CPUs, accelerate launch starts several processes only through mpirun; use torchrun")
        return tuple(found)

    def _missing(self, strategy: str, settings: Any, recommendation: Recommendation) -> Mapping[str, str]:
        if strategy == STRATEGY and self.refusal(recommendation) is None:
            if not sharding_of(recommendation).shards:
                return {}
            return self.sharded(recommendation).missing
        return super()._missing(strategy, settings, recommendation)


def _distributed_type(recommendation: Recommendation) -> str:
    if sharding_of(recommendation).words.fsdp1:
        return "FSDP"
    if recommendation.num_ranks == 1:
        return "NO"
    return "MULTI_CPU" if recommendation.hardware.device_kind == "cpu" else "MULTI_GPU"


class AccelerateYaml(_Yaml):
    """Exporter of the YAML for `accelerate launch`, with FSDP2 where the model is sharded."""

    name = "accelerate"
    summary = "the configuration for accelerate launch (FSDP2 where the model is sharded)"
    usage = "accelerate launch --config_file accelerate.yaml train.py, with accelerate_settings.py in train.py"

    def file_name(self, recommendation: Recommendation) -> str:
        return "accelerate.yaml"

    def sharded(self, recommendation: Recommendation) -> Said:
        return _fsdp2(recommendation)

    def refusal(self, recommendation: Recommendation) -> str | None:
        mode = sharding_of(recommendation).mode
        if mode == "hybrid":
            return "hybrid sharding with FSDP2 requires the sizes of both groups; export accelerate_fsdp1 instead"
        return _NO_ZERO1 if mode == "zero1" else None


class AccelerateFsdp1Yaml(_Yaml):
    name = "accelerate_fsdp1"
    summary = "the configuration for accelerate launch with FSDP1"
    usage = "accelerate launch --config_file accelerate_fsdp1.yaml train.py, with accelerate_settings.py in train.py"

    def file_name(self, recommendation: Recommendation) -> str:
        return "accelerate_fsdp1.yaml"

    def sharded(self, recommendation: Recommendation) -> Said:
        return _fsdp1(recommendation)

    def refusal(self, recommendation: Recommendation) -> str | None:
        if sharding_of(recommendation).words.fsdp1:
            return None
        return "the recommendation does not shard the model with FSDP; export accelerate"


# --- in code ----------------------------------------------------------------------------------


def _said_in_yaml(rule: Rule) -> Rule:
    """Return the code's rule for settings that the YAML expresses. The rule lists each setting as set in the YAML. With
    ZeRO-1, which the YAML cannot express, it lists each setting as lost.
    """
    beside = _said_beside(_IN_YAML, rule)

    def missing(choice: Choice, recommendation: Recommendation) -> Said:
        if sharding_of(recommendation).mode == "zero1":
            return Said(missing=dict.fromkeys(choice, _NO_ZERO1))
        return beside(choice, recommendation)

    return missing


def _sharding(choice: Choice, recommendation: Recommendation) -> Said:
    """Return the YAML's settings for sharding."""
    sharding = sharding_of(recommendation)
    if not sharding.shards:
        return Said()
    return _fsdp1(recommendation) if sharding.mode == "hybrid" else _fsdp2(recommendation)


def _code_precision(choice: Choice, recommendation: Recommendation) -> Said:
    """Return the precision settings that are made in code: those of TF32. The YAML has the other precision settings."""
    lines = python_code.tf32_lines(choice)
    return Said(sections={"set_up": lines}) if lines else _said_in_yaml(_precision)(choice, recommendation)


_OWN_THREADS = """
# accelerate launch sets this variable; the settings were measured with torch's own number of threads.
os.environ.pop("OMP_NUM_THREADS", None)
"""


class AccelerateCode(TranslatingExporter):
    name = "accelerate_python"
    summary = "the settings that an Accelerate script makes in code, in addition to the YAML"
    version = VERSION
    usage = (
        "In train.py, first: from accelerate_settings import ACCELERATOR, DATALOADER, OPTIMIZER, "
        "prepared, prepared_dataset, prepared_loader, set_up"
    )
    comment = "#"
    lacks = _NOWHERE
    beside = frozenset({_IN_YAML})
    rules: ClassVar[Mapping[str, Rule]] = {
        **_CODE_RULES,
        PrecisionSetting.strategy: _code_precision,
        CompileSetting.strategy: _said_in_yaml(_compile),
        ActivationCheckpointingSetting.strategy: _said_in_yaml(_checkpointing),
        STRATEGY: _said_in_yaml(_sharding),
    }

    def file_name(self, recommendation: Recommendation) -> str:
        return "accelerate_settings.py"

    def export(self, recommendation: Recommendation) -> str:
        sections = self.sections(recommendation)
        optimizer = sections.get("OPTIMIZER", {})
        code = (
            constant("ACCELERATOR", sections.get("ACCELERATOR", {}), "accelerate.Accelerator(**ACCELERATOR)")
            + _handlers(sections)
            + constant("DATALOADER", sections["DATALOADER"], "torch.utils.data.DataLoader(dataset, **DATALOADER)")
            + constant("OPTIMIZER", optimizer, "the class of your optimizer(parameters, ..., **OPTIMIZER)")
            + "\n\n"
            + set_up_code(sections)
            + preparations(sections)
        )
        more = ["from accelerate import DistributedDataParallelKwargs"] if sections.get("DDP") else []
        more += ["from accelerate.utils import DDPCommunicationHookType"] if "DDPCommunication" in code else []
        above = _OWN_THREADS if threads_lost(recommendation) else ""
        return f"{self.header(recommendation)}\n{imports(recommendation, code, *more, above=above)}\n{code}"


def _handlers(sections: Sections) -> str:
    """Return the code by which the Accelerator passes the recommended arguments to DistributedDataParallel; empty if
    there are none.
    """
    if not sections.get("DDP"):
        return ""
    arguments = constant("DDP", sections["DDP"], "torch.nn.parallel.DistributedDataParallel(model, **DDP)")
    return f'{arguments}ACCELERATOR["kwargs_handlers"] = [DistributedDataParallelKwargs(**DDP)]\n'
