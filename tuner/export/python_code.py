"""Shared code of the Python exports: settings that any training script makes in code.

A module has `set_up()`, which makes the process-wide settings, and arguments for what the user constructs: the
DataLoader and the optimizer. Variables that libraries read when they are loaded are set above `import torch`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from steptune.tuner.export.settings import batch_per_rank
from steptune.tuner.export.translation import Rule, Said, Sections
from steptune.tuner.records import Choice, Recommendation, SampleUnit
from steptune.tuner.strategies.nccl_settings.strategy import OWN

NO_BATCH = "the global batch cannot be divided evenly over ranks and micro-batches"
NO_LAYOUT = "your script's parameters do not share one buffer; use steptune.apply"
ONE_RANK = "one process has no gradients to reduce"
NO_EPOCHS_AHEAD = {
    "epochs_ahead": "a DataLoader cannot start an epoch before the previous one ends; use steptune.apply, or "
    "steptune.epochs_ahead(loader)"
}
STAYS_SET = "measured with this variable set; start the training with the same value"
LIKE_OTHERS = "PyTorch also applies a given bucket size to the first bucket"
DDP_FLAGS = {
    "static_graph": "static_graph",
    "bucket_views": "gradient_as_bucket_view",
    "find_unused": "find_unused_parameters",
}
"""Arguments of DistributedDataParallel, by parameter."""
TOKEN_WEIGHTS = "micro-batches have equal weights in the export; the measured run weighted them by their tokens"


def data_loading(choice: Choice, recommendation: Recommendation) -> Said:
    """Return the arguments of the DataLoader, and the code that changes the loader."""
    return Said(sections={"DATALOADER": loader_arguments(choice), "loader": loader_lines(choice)})


def loader_lines(choice: Choice) -> dict[str, str]:
    """Return the code that changes a loader which its library has made."""
    return {"epochs_ahead": "loader = steptune.epochs_ahead(loader)"} if choice["epochs_ahead"] else {}


def loader_arguments(choice: Choice) -> dict[str, Any]:
    """Return the arguments of torch.utils.data.DataLoader. Without workers, the arguments for workers are left out,
    because the DataLoader would refuse them.
    """
    workers = int(choice["num_workers"] or 0)
    arguments: dict[str, Any] = {"num_workers": workers, "pin_memory": bool(choice["pin_memory"])}
    if workers:
        arguments["prefetch_factor"] = int(choice["prefetch_factor"] or 2)
        arguments["persistent_workers"] = bool(choice["persistent_workers"])
    return arguments


def cpu_threads(choice: Choice, recommendation: Recommendation) -> Said:
    """Return the settings of CPU threads: their number goes into `set_up`, their binding above `import torch`."""
    count = choice["num_threads"]
    lines = {} if count is None else {"threads": f"torch.set_num_threads({int(count)})"}
    return Said(sections={"set_up": lines})


def backend_flags(choice: Choice, recommendation: Recommendation) -> Said:
    return Said(sections={"set_up": flag_lines(choice)})


def flag_lines(choice: Choice) -> dict[str, str]:
    """Return the code that sets the flags of `backend_flags`."""
    lines = {}
    if choice["cudnn_benchmark"]:
        lines["cudnn_benchmark"] = "torch.backends.cudnn.benchmark = True"
    if choice["tf32"]:
        lines["tf32"] = 'torch.set_float32_matmul_precision("high")'
    if choice["flush_denormals"]:
        lines["flush_denormals"] = "torch.set_flush_denormal(True)"
    return lines


def tf32_lines(choice: Choice) -> dict[str, str]:
    """Return the code that sets precision level "tf32"; empty for any other level."""
    if choice["level"] != "tf32":
        return {}
    return {
        "tf32": 'torch.set_float32_matmul_precision("high")',
        "cudnn_tf32": "torch.backends.cudnn.allow_tf32 = True",
    }


def optimizer_implementation(choice: Choice, recommendation: Recommendation) -> Said:
    """Return the arguments that change the user's optimizer; none if the optimizer stays as written."""
    name = choice["implementation"]
    flags = {} if name is None else {"foreach": name == "foreach", "fused": name == "fused"}
    return Said(sections={"OPTIMIZER": flags} if flags else {}, missing={"contiguous": NO_LAYOUT})


def ddp_buckets(section: str) -> Rule:
    """Return a rule for targets that pass arguments to DistributedDataParallel, which has no argument for the size of
    the first bucket.
    """

    def rule(choice: Choice, recommendation: Recommendation) -> Said:
        if recommendation.num_ranks == 1:
            return Said(missing=dict.fromkeys(choice, ONE_RANK))
        arguments: dict[str, Any] = {}
        if (choice["bucket_cap_mb"], choice["first_bucket_mb"]) != (25, 1):  # PyTorch's, if it is told nothing
            arguments["bucket_cap_mb"] = choice["bucket_cap_mb"]
        for name, argument in DDP_FLAGS.items():
            if choice[name]:
                arguments[argument] = True
        return Said(sections={section: arguments}, differs=first_bucket(choice))

    return rule


POWERSGD_STEPS = 2
"""Number of initial steps in which DDP sends gradients uncompressed; it is the same in trials."""


def compression_missing(choice: Choice) -> dict[str, str]:
    """Return the parameters of a gradient compression that PyTorch's communication hooks cannot express, with the
    reason.
    """
    if choice["method"] in (None, "fp16", "bf16", "powersgd"):
        return {}
    return dict.fromkeys(choice, "PyTorch has no such communication hook; use steptune.apply")


def first_bucket(choice: Choice) -> dict[str, str]:
    """Return the parameters that differ from the measured run if a target sets one size for all buckets."""
    sizes = (choice["bucket_cap_mb"], choice["first_bucket_mb"])
    return {} if sizes == (25, 1) or sizes[0] == sizes[1] else {"first_bucket_mb": LIKE_OTHERS}


def allocator(choice: Choice, recommendation: Recommendation) -> Said:
    """Add nothing: `environment_code` sets the allocator's variables."""
    return Said()


def nccl_settings(choice: Choice, recommendation: Recommendation) -> Said:
    """Add nothing: `environment_code` sets NCCL's variables; the user's own stay in the environment."""
    return Said(missing={name: STAYS_SET for name, value in choice.items() if value == OWN})


def accumulation(section: str, key: str) -> Rule:
    """Return a rule for targets that accumulate gradients themselves: it sets the target's argument and the loader's
    batch size.
    """

    def rule(choice: Choice, recommendation: Recommendation) -> Said:
        found = batch_per_rank(recommendation)
        if found is None:
            return Said(missing={"num_micro_batches": NO_BATCH})
        size, pieces = found
        return Said(
            sections={"DATALOADER": {"batch_size": size}, section: {key: pieces}},
            differs=token_weights(recommendation, pieces),
        )

    return rule


def token_weights(recommendation: Recommendation, pieces: int) -> dict[str, str]:
    """Return the parameters that differ from the measured run if a target gives every micro-batch the same weight."""
    if recommendation.sample_unit is SampleUnit.TOKEN and pieces > 1:
        return {"num_micro_batches": TOKEN_WEIGHTS}
    return {}


def environment_code(recommendation: Recommendation) -> str:
    """Return the statements above `import torch` that set environment variables; empty where none is needed."""
    variables = dict(sorted(recommendation.environment_variables.items()))
    if not variables:
        return ""
    return (
        "\n# Libraries read these when they are loaded, so they are set before torch is imported.\n"
        f"os.environ.update({literal(variables)})\n"
    )


def set_up_code(sections: Sections) -> str:
    """Return the code of the function that makes the process-wide settings."""
    lines = [*sections.get("set_up", {}).values()] or ["pass  # nothing to set"]
    body = "".join(f"    {line}\n" for line in lines)
    return f'def set_up() -> None:\n    """Process-wide settings; call it first."""\n{body}'


def constant(name: str, values: Mapping[str, Any], meaning: str) -> str:
    """Return `NAME = {...}` with one entry per line, under a comment."""
    entries = "".join(f"    {literal(key)}: {literal(value)},\n" for key, value in values.items())
    return f"# {meaning}\n{name} = " + (f"{{\n{entries}}}\n" if entries else "{}\n")


class Code(str):
    """Expression to be written unchanged into the exported code."""

    __slots__ = ()


def literal(value: Any) -> str:
    """Return a plain value as Python source, with strings in double quotes."""
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    return repr(value)


def imports(recommendation: Recommendation, code: str, *more: str, above: str = "") -> str:
    """Return a module's import statements, preceded by the statements that must run before them; `steptune` and `torch`
    are imported only if the code uses them.

    Args:
        above: Statements to place above the imports, beyond the recommendation's variables.
    """
    above = environment_code(recommendation) + above
    used = [name for name in ("steptune", "torch") if re.search(rf"^ +[^\"#]*\b{name}\.", code, re.MULTILINE)]
    lines = [*(f"import {name}" for name in used), *more]
    return (f"import os\n{above}\n" if above else "") + "".join(f"{line}\n" for line in lines)
