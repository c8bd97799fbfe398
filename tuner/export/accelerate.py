"""Hugging Face Accelerate: the configuration of `accelerate launch`, for FSDP2 and FSDP1, and the settings in code.

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
from steptune.tuner.strategies.attention_backend.choice import AttentionBackendSetting
from steptune.tuner.strategies.backend_flags.choice import BackendFlagsSetting
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.strategies.cpu_threads.choice import CpuThreadsSetting
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.dataset_cache.choice import DatasetCacheSetting
from steptune.tuner.strategies.ddp_buckets.choice import DdpBucketsSetting
from steptune.tuner.strategies.gradient_compression.choice import GradientCompressionSetting
from steptune.tuner.strategies.memory_format.choice import MemoryFormatSetting
from steptune.tuner.strategies.micro_batch.choice import MicroBatchSetting
from steptune.tuner.strategies.nccl_settings.choice import NcclSetting
from steptune.tuner.strategies.nccl_settings.strategy import VARIABLES
from steptune.tuner.strategies.optimizer_implementation.choice import OptimizerImplementationSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting

VERSION = "accelerate 1.15.0"
_IN_CODE = "no key of the YAML; the accelerate_python export says it"
_NOWHERE = "Accelerate has no setting for it; steptune.apply runs it"
_MIXED = {"bfloat16": "bf16", "float16": "fp16"}
_MODES = ("default", "reduce-overhead", "max-autotune")


def _precision(choice: Choice, recommendation: Recommendation) -> Said:
    level, dtype = choice["level"], choice["dtype"]
    if level == "O1":
        return Said(sections={"": {"mixed_precision": _MIXED[str(dtype)]}})
    reasons = {
        "O2": "Accelerate has no 16-bit weights with FP32 masters and FP32 normalisation layers; this trains in FP32",
        "O3": "Accelerate does not cast the model; this trains in FP32",
        "tf32": _IN_CODE,
    }
    missing = {name: reasons[str(level)] for name in ("level", "dtype") if level in reasons}
    return Said(sections={"": {"mixed_precision": "no"}}, missing=missing)


def _compile(choice: Choice, recommendation: Recommendation) -> Said:
    mode, regional = choice["mode"], choice["scope"] == "regional"
    if mode is None:
        return Said(sections={"dynamo_config": {"dynamo_backend": "NO"}})
    if mode not in _MODES:
        reason = f"Accelerate compiles in the modes {', '.join(_MODES)}; this compiles nothing"
        return Said(sections={"dynamo_config": {"dynamo_backend": "NO"}}, missing=dict.fromkeys(choice, reason))
    keys: dict[str, Any] = {
        "dynamo_backend": "INDUCTOR",
        "dynamo_mode": mode,
        "dynamo_use_fullgraph": False,
        "dynamo_use_regional_compilation": regional,
    }
    differs = {}
    if choice["dynamic"] is None:  # the launcher takes a missing key for False
        differs["mode"] = "it compiles again for every new shape of a batch (the YAML has no automatic dynamic shapes)"
    else:
        keys["dynamo_use_dynamic"] = choice["dynamic"]
    if regional:
        differs["scope"] = "it compiles what stands beside the repeated blocks too"
    return Said(sections={"dynamo_config": keys}, differs=differs)


def _checkpointing(choice: Choice, recommendation: Recommendation) -> Said:
    every = choice["every"]
    if not sharding_of(recommendation).words.fsdp1:
        reason = "Accelerate checkpoints under FSDP only; steptune.apply runs it"
        return Said(missing=dict.fromkeys(("every", "save"), reason))
    if every is None:
        return Said(sections={"fsdp_config": {"fsdp_activation_checkpointing": False}})
    if choice["save"] is not None:
        return Said(
            missing=dict.fromkeys(("every", "save"), "Accelerate recomputes whole blocks; this recomputes none")
        )
    if every == 1:
        return Said(sections={"fsdp_config": {"fsdp_activation_checkpointing": True}})
    return Said(missing={"every": "FSDP in Accelerate checkpoints all of its blocks or none; this checkpoints none"})


def _micro_batch(choice: Choice, recommendation: Recommendation) -> Said:
    return Said(missing={"num_micro_batches": _IN_CODE})


def _ddp_buckets(choice: Choice, recommendation: Recommendation) -> Said:
    return Said(missing=dict.fromkeys(choice, _IN_CODE), differs=python_code.first_bucket(choice))


def _compression(choice: Choice, recommendation: Recommendation) -> Said:
    return Said(missing={**dict.fromkeys(choice, _IN_CODE), **python_code.compression_missing(choice)})


def _elsewhere(*parameters: str) -> Rule:
    return lambda choice, recommendation: Said(missing=dict.fromkeys(parameters, _IN_CODE))


def _optimizer(choice: Choice, recommendation: Recommendation) -> Said:
    return Said(missing={"implementation": _IN_CODE, "contiguous": python_code.NO_LAYOUT})


def _memory_format(choice: Choice, recommendation: Recommendation) -> Said:
    return Said(missing={"layout": _IN_CODE, "batch_second": prepared_code.NO_ORDER})


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
        "wrap": "name the block's class in fsdp_transformer_layer_cls_to_wrap, unless it is a model of transformers"
    }


class _Yaml(TranslatingExporter):
    """Base of both versions of the file."""

    version = VERSION
    comment = "#"
    lacks = _NOWHERE
    beside = frozenset({_IN_CODE})
    shared: ClassVar[Mapping[str, Rule]] = {
        DataLoadingSetting.strategy: _elsewhere("num_workers", "prefetch_factor", "persistent_workers", "pin_memory"),
        CpuThreadsSetting.strategy: _elsewhere("num_threads", "bind"),
        AllocatorSetting.strategy: _elsewhere("expandable_segments", "max_split_size_mb"),
        NcclSetting.strategy: _elsewhere(*VARIABLES),
        BackendFlagsSetting.strategy: _elsewhere("cudnn_benchmark", "tf32", "flush_denormals"),
        OptimizerImplementationSetting.strategy: _optimizer,
        DatasetCacheSetting.strategy: _elsewhere("where"),
        MemoryFormatSetting.strategy: _memory_format,
        AttentionBackendSetting.strategy: _elsewhere("backend"),
        PrecisionSetting.strategy: _precision,
        CompileSetting.strategy: _compile,
        ActivationCheckpointingSetting.strategy: _checkpointing,
        MicroBatchSetting.strategy: _micro_batch,
        DdpBucketsSetting.strategy: _ddp_buckets,
        GradientCompressionSetting.strategy: _compression,
    }

    @abstractmethod
    def sharded(self, recommendation: Recommendation) -> Said:
        """Settings of a recommendation that shards with FSDP."""

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
            found.append("ranks: accelerate launch starts several processes on CPUs through mpirun only; use torchrun")
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
    """For a recommendation without sharding, a configuration without FSDP."""

    name = "accelerate"
    summary = "the configuration of accelerate launch (FSDP2 where the model is sharded)"
    usage = "accelerate launch --config_file accelerate.yaml train.py, with accelerate_settings.py in train.py"
    rules = _Yaml.shared

    def file_name(self, recommendation: Recommendation) -> str:
        return "accelerate.yaml"

    def sharded(self, recommendation: Recommendation) -> Said:
        return _fsdp2(recommendation)

    def refusal(self, recommendation: Recommendation) -> str | None:
        mode = sharding_of(recommendation).mode
        if mode == "hybrid":
            return "hybrid sharding needs the sizes of both groups in FSDP2; export accelerate_fsdp1, which has it"
        return "Accelerate has no ZeRO-1 of its own; export deepspeed" if mode == "zero1" else None


class AccelerateFsdp1Yaml(_Yaml):
    name = "accelerate_fsdp1"
    summary = "the configuration of accelerate launch with FSDP1"
    usage = "accelerate launch --config_file accelerate_fsdp1.yaml train.py, with accelerate_settings.py in train.py"
    rules = _Yaml.shared

    def file_name(self, recommendation: Recommendation) -> str:
        return "accelerate_fsdp1.yaml"

    def sharded(self, recommendation: Recommendation) -> Said:
        return _fsdp1(recommendation)

    def refusal(self, recommendation: Recommendation) -> str | None:
        if sharding_of(recommendation).words.fsdp1:
            return None
        return "the recommendation does not shard the model with FSDP; export accelerate"


# --- in code ----------------------------------------------------------------------------------


_IN_YAML = "the YAML of the accelerate export says it"


def _said_in_yaml(rule: Rule | None) -> Rule:
    """Not said in code: the YAML says it, or says why not."""

    def missing(choice: Choice, recommendation: Recommendation) -> Said:
        there = rule(choice, recommendation) if rule else Said()
        return Said(missing={**dict.fromkeys(choice, _IN_YAML), **there.missing}, differs=there.differs)

    return missing


def _code_precision(choice: Choice, recommendation: Recommendation) -> Said:
    """TF32 is code; the rest is the YAML's."""
    lines = python_code.tf32_lines(choice)
    return Said(sections={"set_up": lines}) if lines else _said_in_yaml(_precision)(choice, recommendation)


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


_OWN_THREADS = """
# accelerate launch sets this; it was measured with the number of threads that torch chooses.
os.environ.pop("OMP_NUM_THREADS", None)
"""


class AccelerateCode(TranslatingExporter):
    name = "accelerate_python"
    summary = "what an Accelerate script sets in code, beside the YAML"
    version = VERSION
    usage = (
        "In train.py, first: from accelerate_settings import ACCELERATOR, DATALOADER, OPTIMIZER, "
        "prepared, prepared_dataset, set_up"
    )
    comment = "#"
    lacks = _NOWHERE
    beside = frozenset({_IN_YAML})
    rules: ClassVar[Mapping[str, Rule]] = {
        DataLoadingSetting.strategy: python_code.data_loading,
        CpuThreadsSetting.strategy: python_code.cpu_threads,
        AllocatorSetting.strategy: python_code.allocator,
        NcclSetting.strategy: python_code.nccl_settings,
        BackendFlagsSetting.strategy: python_code.backend_flags,
        **prepared_code.RULES,
        PrecisionSetting.strategy: _code_precision,
        CompileSetting.strategy: _said_in_yaml(_compile),
        OptimizerImplementationSetting.strategy: python_code.optimizer_implementation,
        ActivationCheckpointingSetting.strategy: _said_in_yaml(_checkpointing),
        MicroBatchSetting.strategy: python_code.accumulation("ACCELERATOR", "gradient_accumulation_steps"),
        DdpBucketsSetting.strategy: python_code.ddp_buckets("DDP"),
        GradientCompressionSetting.strategy: _code_compression,
        STRATEGY: _said_in_yaml(None),
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
    """The arguments of DistributedDataParallel reach it through the Accelerator."""
    if not sections.get("DDP"):
        return ""
    arguments = constant("DDP", sections["DDP"], "torch.nn.parallel.DistributedDataParallel(model, **DDP)")
    return f'{arguments}ACCELERATOR["kwargs_handlers"] = [DistributedDataParallelKwargs(**DDP)]\n'
