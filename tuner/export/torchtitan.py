"""Export to torchtitan: a function that changes a configuration of its registry.

torchtitan trains the models of its registry only. For any other model these are hints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from steptune.tuner.export import python_code
from steptune.tuner.export.python_code import NO_BATCH, imports, literal, set_up_code, token_weights
from steptune.tuner.export.settings import batch_per_rank
from steptune.tuner.export.sharding import STRATEGY, sharding_of
from steptune.tuner.export.translation import Rule, Said, TranslatingExporter
from steptune.tuner.records import Choice, Recommendation
from steptune.tuner.strategies.activation_checkpointing.choice import ActivationCheckpointingSetting
from steptune.tuner.strategies.allocator.choice import AllocatorSetting
from steptune.tuner.strategies.backend_flags.choice import BackendFlagsSetting
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.strategies.cpu_threads.choice import CpuThreadsSetting
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.micro_batch.choice import MicroBatchSetting
from steptune.tuner.strategies.nccl_settings.choice import NcclSetting
from steptune.tuner.strategies.optimizer_implementation.choice import OptimizerImplementationSetting
from steptune.tuner.strategies.parallel_mesh.choice import ParallelMeshSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting

_NOT_OF_OPTIMIZERS = "torchtitan's optimizers have no setting for it"
_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
_IMPLEMENTATIONS = {"for_loop": "for-loop", "foreach": "foreach", "fused": "fused"}


def _said(section: str, missing: Mapping[str, str] | None = None, **values: Any) -> Said:
    return Said(sections={section: values}, missing=missing or {})


def _data_loading(choice: Choice, recommendation: Recommendation) -> Said:
    return _said("dataloader", python_code.NO_EPOCHS_AHEAD, **python_code.loader_arguments(choice))


def _precision(choice: Choice, recommendation: Recommendation) -> Said:
    level, dtype = choice["level"], choice["dtype"]
    training: dict[str, Any] = {"dtype": "float32", "mixed_precision_param": "float32"}
    if dtype == "float16":
        return _said(
            "training", dict.fromkeys(choice, "torchtitan has no float16; this export trains in FP32"), **training
        )
    if level == "O1":
        training["mixed_precision_param"] = "bfloat16"
    if level == "O3":
        training = dict.fromkeys(training, "bfloat16")
    missing = {}
    if level == "O2":
        reason = (
            "torchtitan has no 16-bit weights with FP32 masters and FP32 normalisation layers; this export trains in "
            "FP32"
        )
        missing = dict.fromkeys(choice, reason)
    return Said(sections={"training": training, "set_up": python_code.tf32_lines(choice)}, missing=missing)


def _compile(choice: Choice, recommendation: Recommendation) -> Said:
    """Return the settings for compilation: torchtitan compiles each transformer block."""
    if choice["mode"] is None:
        return _said("compile", enable=False)
    if choice["mode"] != "default" or choice["scope"] != "regional":
        reason = "torchtitan compiles only single blocks, in the default mode; this export does not compile"
        return _said("compile", dict.fromkeys(choice, reason), enable=False)
    automatic = choice["dynamic"] is None
    missing = {} if automatic else {"dynamic": "torchtitan leaves dynamic shapes to PyTorch's automatic choice"}
    return _said("compile", missing, enable=True, components=["model"], backend="inductor")


def _optimizer(choice: Choice, recommendation: Recommendation) -> Said:
    name = choice["implementation"]
    missing = {"contiguous": _NOT_OF_OPTIMIZERS}
    if name is None:
        return Said(missing=missing)
    return _said("optimizer", missing, implementation=_IMPLEMENTATIONS[str(name)])


def _checkpointing(choice: Choice, recommendation: Recommendation) -> Said:
    every = choice["every"]
    if every is None or (every == 1 and choice["save"] is None):
        return _said("", activation_checkpoint="FullAC" if every else None)
    reason = "torchtitan recomputes every block, or operators of its own choice; this export recomputes nothing"
    return _said("", dict.fromkeys(("every", "save"), reason), activation_checkpoint=None)


def _micro_batch(choice: Choice, recommendation: Recommendation) -> Said:
    found = batch_per_rank(recommendation)
    if found is None:
        return Said(missing={"num_micro_batches": NO_BATCH})
    size, pieces = found
    return _said(
        "training",
        token_weights(recommendation, pieces),
        local_batch_size=size,
        global_batch_size=recommendation.global_batch,
    )


def _sharding(choice: Choice, recommendation: Recommendation) -> Said:
    sharding, ranks = sharding_of(recommendation), recommendation.num_ranks
    degrees = {"data_parallel_replicate_degree": ranks, "data_parallel_shard_degree": 1}
    if not sharding.words.fsdp2:
        missing = (
            dict.fromkeys(choice, "torchtitan shards by FSDP2; this export does not shard") if sharding.shards else {}
        )
        return _said("parallelism", missing, **degrees)
    keeps = sharding.mode == "grad_op" or not sharding.reshard
    missing = sharding.unsaid()
    if sharding.wrap != "block":
        missing |= dict.fromkeys(("mode", "wrap", "min_num_params"), "torchtitan wraps every block")
    parallelism = {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": ranks,
        "fsdp_reshard_after_forward": "never" if keeps else "always",
    }
    offload = {"enable_cpu_offload": sharding.cpu_offload}
    return Said(sections={"parallelism": parallelism, "training": offload}, missing=missing)


def _mesh(choice: Choice, recommendation: Recommendation) -> Said:
    """Return the settings for the device mesh. This rule runs after the rules for sharding and micro-batches, because
    it replaces the degrees and the batch size that they set.
    """
    if choice["expert"] != 1:
        reason = (
            "torchtitan distributes experts only over ranks that also shard all other parameters; this export "
            "replicates everything"
        )
        return Said(missing=dict.fromkeys(choice, reason))
    model_ranks = int(choice["pipeline"] or 1) * int(choice["tensor"] or 1)
    if model_ranks == 1:
        return Said()
    replicas = recommendation.num_ranks // model_ranks
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": 1,
        "tensor_parallel_degree": choice["tensor"],
        "enable_sequence_parallel": False,
        "pipeline_parallel_degree": choice["pipeline"],
    }
    missing = {}
    samples, pieces = recommendation.global_batch // replicas, int(choice["micro_batches"] or 1)
    if choice["pipeline"] != 1:
        parallelism["pipeline_parallel_schedule"] = _SCHEDULES[str(choice["schedule"])]
        parallelism["pipeline_parallel_microbatch_size"] = max(1, samples // pieces)
        missing["pipeline"] = "torchtitan splits stages by number of layers, not by the measured times of layers"
    elif (found := batch_per_rank(recommendation)) is not None:
        samples = found[0] * model_ranks
    return Said(sections={"parallelism": parallelism, "training": {"local_batch_size": samples}}, missing=missing)


class TorchtitanConfig(TranslatingExporter):
    name = "torchtitan"
    summary = "a configuration function of torchtitan; hints for models outside its registry"
    version = "torchtitan 0.3.0"
    usage = "torchrun -m torchtitan.train --module yours --config mine, with mine() returning recommended(llama3_8b())"
    comment = "#"
    lacks = "torchtitan has no setting for it"
    rules: ClassVar[Mapping[str, Rule]] = {
        DataLoadingSetting.strategy: _data_loading,
        CpuThreadsSetting.strategy: python_code.cpu_threads,
        AllocatorSetting.strategy: python_code.allocator,
        NcclSetting.strategy: python_code.nccl_settings,
        BackendFlagsSetting.strategy: python_code.backend_flags,
        PrecisionSetting.strategy: _precision,
        CompileSetting.strategy: _compile,
        OptimizerImplementationSetting.strategy: _optimizer,
        ActivationCheckpointingSetting.strategy: _checkpointing,
        MicroBatchSetting.strategy: _micro_batch,
        STRATEGY: _sharding,
        ParallelMeshSetting.strategy: _mesh,
    }

    def file_name(self, recommendation: Recommendation) -> str:
        return "torchtitan_config.py"

    def notes(self, recommendation: Recommendation) -> tuple[str, ...]:
        return (
            "model: torchtitan trains only the models in its registry; for other models "
            "these settings are untested hints",
        )

    def export(self, recommendation: Recommendation) -> str:
        sections = self.sections(recommendation)
        # On unless disabled there, and no choice of this recommendation.
        sections.setdefault("training", {})["disable_cuda_graphs"] = True
        recompute = sections.pop("", {}).get("activation_checkpoint")
        lines = [f"config.activation_checkpoint = {'FullAC.Config()' if recompute else None}"]
        for section, values in sections.items():
            if section != "set_up":
                lines += [f"config.{section}.{name} = {literal(value)}" for name, value in values.items()]
        code = (
            set_up_code(sections) + "\n\ndef recommended(config: Trainer.Config) -> Trainer.Config:\n"
            '    """Changes what decides speed and numerics; model, data and recipe stay."""\n'
            "    set_up()\n" + "".join(f"    {line}\n" for line in lines) + "    return config\n"
        )
        more = ["from torchtitan.distributed.activation_checkpoint import FullAC"] if recompute else []
        above = imports(recommendation, code, *more, "from torchtitan.trainer import Trainer")
        return f"{self.header(recommendation)}\n{above}\n\n{code}"
