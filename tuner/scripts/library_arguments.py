"""Changes as arguments of the library that owns a script's loop: the words that its users know.

A Trainer of transformers takes all of a loader, an optimizer and a precision as arguments, in the script's text or on
its command line; Accelerate and Lightning take the precision. Everything else is left to the lines of the script.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from steptune.tuner.records import Scalar, ScriptFacts
from steptune.tuner.scripts.source_edits import NotEditableError, SourceFile, last_name
from steptune.tuner.scripts.source_meaning import calls, full_name, is_called

ACCELERATORS = ("accelerate.Accelerator", "accelerate.accelerator.Accelerator")
LOADER_OF_TORCH = "torch.utils.data.DataLoader"
LIGHTNING = (
    "lightning.Trainer",
    "lightning.pytorch.Trainer",
    "pytorch_lightning.Trainer",
    "pytorch_lightning.trainer.Trainer",
)
TRAINING_ARGUMENTS = ("transformers.TrainingArguments", "transformers.training_args.TrainingArguments")
PARSERS = ("HfArgumentParser", "TrlParser")
"""Classes that make options of the fields of `TrainingArguments`."""
ARGUMENT_FILES = (".json", ".yaml", ".yml")
LOADER = "loader."
DEFAULTS = {"num_workers": (0,), "pin_memory": (True,), "prefetch_factor": (None, 2), "persistent_workers": (False,)}
"""Settings that a Trainer gives its loader by itself."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """Arguments that say some of the changes.

    Attributes:
        call: That takes them; None where they are options of the command.
        names: Of the changes.
    """

    call: ast.Call | None
    arguments: dict[str, object]
    names: frozenset[str]

    @property
    def options(self) -> list[str]:
        return [f"--{name} {value}" for name, value in self.arguments.items()]


def library_arguments(changes: Mapping[str, Scalar], script: ScriptFacts, file: SourceFile) -> Said | None:
    """The changes of a choice that the library takes as arguments; None where it takes none of them.

    Args:
        file: The script that the command names.

    Raises:
        NotEditableError: The library owns what is changed, and has no argument for it.
    """
    if _is_trainers(script, file):
        call = _only_call(file.tree, TRAINING_ARGUMENTS)
        parses = any(last_name(c.func) in PARSERS for c in calls([file.tree]))
        if call is not None or (parses and not _reads_a_file(script)):
            given = None if call is None else {keyword.arg for keyword in call.keywords}
            arguments = _of_trainer(changes, script, given)
            return Said(call=call, arguments=arguments, names=frozenset(changes)) if arguments else None
    precisions = {ACCELERATORS: ("mixed_precision", "bf16"), LIGHTNING: ("precision", "bf16-mixed")}
    for names, (argument, value) in precisions.items():
        owner = _only_call(file.tree, names)
        wraps = names is LIGHTNING or any(last_name(c.func) == "prepare" for c in calls([file.tree]))
        if owner is not None and wraps and changes.get("autocast") == "bfloat16":
            return Said(call=owner, arguments={argument: value}, names=frozenset({"autocast"}))
    return None


def wrapped_loader(file: SourceFile, line: int) -> ast.Call | None:
    """The user's own loader, whose settings Accelerate takes over where a line prepares it; None where none does.

    Raises:
        NotEditableError: It may prepare several.
    """
    if "accelerate" not in ast.unparse(file.tree) or not is_called(file.tree, line, "prepare"):
        return None
    own = [call for call in calls([file.tree]) if full_name(file.tree, call.func) == LOADER_OF_TORCH]
    if len(own) != 1:
        raise NotEditableError(f"which of {len(own)} loaders Accelerate wraps for the training is not known")
    return own[0]


def _is_trainers(script: ScriptFacts, file: SourceFile) -> bool:
    """Say whether a Trainer of transformers makes the loader and the optimizer: no line of the user's does."""
    made = ("DataLoader", *script.optimizers)
    return "transformers" in ast.unparse(file.tree) and not any(last_name(c.func) in made for c in calls([file.tree]))


def _reads_a_file(script: ScriptFacts) -> bool:
    return script.command[-1].endswith(ARGUMENT_FILES) or any(part.endswith(".sh") for part in script.command)


def _only_call(tree: ast.AST, names: tuple[str, ...]) -> ast.Call | None:
    found = [call for call in calls([tree]) if full_name(tree, call.func) in names]
    return found[0] if len(found) == 1 else None


def _of_trainer(
    changes: Mapping[str, Scalar], script: ScriptFacts, given: Collection[str | None] | None
) -> dict[str, object]:
    """Fields of `TrainingArguments`.

    Args:
        given: Those that the script sets itself; None where the command's options may.
    """
    found: dict[str, object] = {}
    for name, value in changes.items():
        setting = name.removeprefix(LOADER)
        if name.startswith(LOADER):
            field = f"dataloader_{setting}"
            if value is not None and (given is None or field in given or value not in DEFAULTS[setting]):
                found[field] = value
        elif name == "autocast" and value == "bfloat16":
            found["bf16"] = True
        elif name == "compile" and value:
            found |= {"torch_compile": True} | ({} if value == "default" else {"torch_compile_mode": value})
        elif name == "optimizer" and value == "fused" and script.optimizers == ("AdamW",):
            found["optim"] = "adamw_torch_fused"
        elif name in ("matmul_precision", "cudnn_tf32") and value in ("high", True) and script.device == "cuda":
            found["tf32"] = True
        elif value not in (None, False, "highest"):
            raise NotEditableError(f"TrainingArguments has no words for {name}={value}")
    return found
