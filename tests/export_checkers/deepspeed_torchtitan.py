"""Loads exports with deepspeed and torchtitan."""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

# Expert-parallel kernels, which need triton: no configuration here uses them.
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()
os.environ["DS_ACCELERATOR"] = "cpu"

import torch  # noqa: E402
from deepspeed import DeepSpeedConfig  # noqa: E402
from deepspeed.runtime import constants  # noqa: E402
from protocol import refuse_unknown, serve  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

TOP_KEYS = {value for value in vars(constants).values() if isinstance(value, str)} | {"zero_optimization"}
AUTOCAST_KEYS = {"enabled", "dtype", "lower_precision_safe_modules"}


class Ranks:
    """Stands for the process groups of so many ranks, which decide what a batch is."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_data_parallel_world_size(self) -> int:
        return self.count


def deepspeed(path: str):
    content = json.loads(Path(path).read_text())
    # DeepSpeed ignores what it does not know at the top; inside its models it refuses it.
    refuse_unknown(content, TOP_KEYS, "DeepSpeedConfig")
    refuse_unknown(content.get("torch_autocast", {}), AUTOCAST_KEYS, "torch_autocast")
    pieces = content["train_micro_batch_size_per_gpu"] * content["gradient_accumulation_steps"]
    with mock.patch("deepspeed.runtime.config.dist.get_rank", return_value=0):  # as where process groups exist
        config = DeepSpeedConfig(path, mpu=Ranks(content["train_batch_size"] // pieces))
    zero = config.zero_config
    return {
        "batch": [config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps],
        "stage": int(zero.stage),
        "offload_optimizer": str(zero.offload_optimizer.device) if zero.offload_optimizer else None,
        "offload_param": str(zero.offload_param.device) if zero.offload_param else None,
        "autocast": str(config.torch_autocast_dtype) if config.torch_autocast_enabled else None,
        "bfloat16": config.bfloat16_config.enabled,
        "untested": config.zero_allow_untested_optimizer,
    }


MODULE = """\
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan_config import recommended


def mine():
    return recommended(llama3_debugmodel())
"""


def torchtitan(path: str):
    """Load a configuration by module and function, as its own command line does."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "torchtitan_config.py").write_text(Path(path).read_text())
        Path(folder, "steptune_checked.py").write_text(MODULE)
        sys.path.insert(0, folder)
        try:
            importlib.invalidate_caches()
            config = ConfigManager().parse_args(["--module", "steptune_checked", "--config", "mine"])
        finally:
            sys.path.remove(folder)
            for name in ("torchtitan_config", "steptune_checked"):
                sys.modules.pop(name, None)
    today, loader = llama3_debugmodel(), config.dataloader
    return {
        "batch": [config.training.global_batch_size, config.training.local_batch_size],
        "dtypes": [config.training.dtype, config.training.mixed_precision_param],
        "cuda_graphs": not config.training.disable_cuda_graphs,
        "checkpointing": config.activation_checkpoint and type(config.activation_checkpoint).__qualname__,
        "compile": [config.compile.enable, config.compile.components],
        "optimizer": config.optimizer.implementation,
        "loader": [loader.num_workers, loader.prefetch_factor, loader.persistent_workers, loader.pin_memory],
        "degrees": [
            config.parallelism.data_parallel_replicate_degree,
            config.parallelism.data_parallel_shard_degree,
        ],
        "reshard": config.parallelism.fsdp_reshard_after_forward,
        "offload": config.training.enable_cpu_offload,
        "recipe": [config.training.steps == today.training.steps, config.training.seq_len == today.training.seq_len],
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    serve({"deepspeed": deepspeed, "torchtitan": torchtitan})
