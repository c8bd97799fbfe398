"""Export to DeepSpeed's JSON configuration. JSON has no comments, so missing settings are reported outside the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from steptune.tuner.export.python_code import NO_BATCH, NO_EPOCHS_AHEAD, NO_LAYOUT, token_weights
from steptune.tuner.export.settings import batch_per_rank
from steptune.tuner.export.sharding import STRATEGY, sharding_of
from steptune.tuner.export.translation import Rule, Said, TranslatingExporter
from steptune.tuner.records import Choice, Recommendation
from steptune.tuner.strategies.backend_flags.choice import BackendFlagsSetting
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.strategies.cpu_threads.choice import CpuThreadsSetting
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.micro_batch.choice import MicroBatchSetting
from steptune.tuner.strategies.optimizer_implementation.choice import OptimizerImplementationSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting

_IN_CODE = "the JSON has no key for it; set it in your script"


def _precision(choice: Choice, recommendation: Recommendation) -> Said:
    """Return DeepSpeed's settings for precision: its `torch_autocast`, because `bf16` and `fp16` cast normalisation
    layers too.
    """
    level, dtype = choice["level"], choice["dtype"]
    if level == "O1":
        sections = {"torch_autocast": {"enabled": True, "dtype": dtype}}
        reason = "DeepSpeed then reduces the gradients of linear and convolution layers in 16 bits"
        return Said(sections=sections, missing={"level": reason} if recommendation.num_ranks > 1 else {})
    reasons = {
        "tf32": _IN_CODE,
        "O2": "DeepSpeed also casts normalisation layers; this export trains in FP32",
        "O3": "DeepSpeed keeps FP32 masters of 16-bit weights; this export trains in FP32",
    }
    return Said(missing=dict.fromkeys(choice, reasons[str(level)]) if level in reasons else {})


def _micro_batch(choice: Choice, recommendation: Recommendation) -> Said:
    found = batch_per_rank(recommendation)
    if found is None:
        return Said(missing={"num_micro_batches": NO_BATCH})
    size, pieces = found
    sizes = {
        "train_batch_size": recommendation.global_batch,
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": pieces,
    }
    return Said(sections={"": sizes}, differs=token_weights(recommendation, pieces))


def _sharding(choice: Choice, recommendation: Recommendation) -> Said:
    sharding = sharding_of(recommendation)
    stage = sharding.words.zero_stage
    if stage is None:
        return Said(missing=dict.fromkeys(choice, "ZeRO has no equivalent of this mode; this export does not shard"))
    zero: dict[str, Any] = {"stage": stage}
    missing = sharding.unsaid("ZeRO limits prefetching by size, not by number of units")
    if stage == 3:
        missing |= dict.fromkeys(
            ("wrap", "min_num_params"), "ZeRO-3 gathers each module separately, whatever is wrapped"
        )
    if stage == 2:
        missing |= dict.fromkeys(("wrap", "min_num_params"), "ZeRO-2 does not shard parameters, so it gathers nothing")
    if stage == 3 and not sharding.reshard:
        missing["reshard"] = "ZeRO-3 frees parameters after the forward pass"
    if sharding.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu"}
        else:
            missing["cpu_offload"] = "below stage 3, ZeRO offloads only the optimizer"
    return Said(sections={"zero_optimization": zero}, missing=missing)


def _in_code(*parameters: str) -> Rule:
    return lambda choice, recommendation: Said(missing=dict.fromkeys(parameters, _IN_CODE))


def _data_loading(choice: Choice, recommendation: Recommendation) -> Said:
    arguments = dict.fromkeys(("num_workers", "prefetch_factor", "persistent_workers", "pin_memory"), _IN_CODE)
    return Said(missing={**arguments, **NO_EPOCHS_AHEAD})


def _optimizer(choice: Choice, recommendation: Recommendation) -> Said:
    return Said(missing={"implementation": _IN_CODE, "contiguous": NO_LAYOUT})


class DeepSpeedJson(TranslatingExporter):
    name = "deepspeed"
    summary = "the configuration of DeepSpeed"
    version = "deepspeed 0.19.8"
    usage = 'deepspeed.initialize(model=model, optimizer=optimizer, config="deepspeed.json"), with your clipping added'
    lacks = "DeepSpeed has no setting for it; use steptune.apply"
    rules: ClassVar[Mapping[str, Rule]] = {
        DataLoadingSetting.strategy: _data_loading,
        CpuThreadsSetting.strategy: _in_code("num_threads", "bind"),
        BackendFlagsSetting.strategy: _in_code("cudnn_benchmark", "tf32", "flush_denormals"),
        OptimizerImplementationSetting.strategy: _optimizer,
        CompileSetting.strategy: _in_code("mode", "scope", "dynamic"),
        PrecisionSetting.strategy: _precision,
        MicroBatchSetting.strategy: _micro_batch,
        STRATEGY: _sharding,
    }

    def file_name(self, recommendation: Recommendation) -> str:
        return "deepspeed.json"

    def export(self, recommendation: Recommendation) -> str:
        sections = self.sections(recommendation)
        # The user's optimizer, whatever its class: ZeRO refuses those that it was not tested with.
        top = {
            **sections.pop("", {"train_batch_size": recommendation.global_batch}),
            "zero_allow_untested_optimizer": True,
        }
        return json.dumps({**top, **sections}, indent=2) + "\n"
