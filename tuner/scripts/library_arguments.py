"""Changes expressed as arguments of the library that owns a script's loop.

A Trainer of transformers takes all settings of a loader, an optimizer and a precision as arguments, in the script's
text or on its command line; Accelerate and Lightning take the precision. Everything else is left to the lines of the
script.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from steptune.tuner.records import Scalar, ScriptFacts
from steptune.tuner.scripts.agent.sources import counted_lines
from steptune.tuner.scripts.source_edits import NotEditableError, SourceFile, last_name
from steptune.tuner.scripts.source_meaning import calls, full_name, is_called, names

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
"""Classes of parsers that make options from the fields of dataclasses."""
PARSES = ("parse_args_into_dataclasses", "parse_args_and_config")
"""Methods of the parsers (`PARSERS`) that read the command's options."""
SETTERS = ("set_dataloader", "set_optimizer")
"""Methods of `TrainingArguments` that set several fields."""
ARGUMENT_FILES = (".json", ".yaml", ".yml")
LOADER = "loader."
DEFAULTS = {"num_workers": (0,), "pin_memory": (True,), "prefetch_factor": (None, 2), "persistent_workers": (False,)}
"""Defaults that a Trainer gives its loader."""
UNSAID = {"compile_dynamic": (None,)}
"""Values that need no argument, by change. For changes not listed here, these values are None, False and "highest"."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """Arguments that express some of the changes.

    Attributes:
        call: Call that takes them; None where they are options of the command.
        names: Names of the changes that the arguments express.
    """

    call: ast.Call | None
    arguments: dict[str, object]
    names: frozenset[str]

    @property
    def options(self) -> list[str]:
        return [f"--{name} {value}" for name, value in self.arguments.items()]


def library_arguments(changes: Mapping[str, Scalar], script: ScriptFacts, file: SourceFile) -> Said | None:
    """Return the changes of a choice as arguments of the library; None if the library takes none of them.

    Args:
        file: The script that the command names.

    Raises:
        NotEditableError: The library owns the object to change, and has no argument for the change.
    """
    if _is_trainers(changes, script, file):
        call = _only_call(file.tree, TRAINING_ARGUMENTS)
        if (call is None) != _has_options(script, file):  # which of both reaches the Trainer is not known, or neither
            return None
        said = Said(call=call, arguments=_of_trainer(changes, script, call), names=frozenset(changes))
        _refuse_others(file.tree, said)
        return said if said.arguments else None
    precisions = {ACCELERATORS: ("mixed_precision", "bf16"), LIGHTNING: ("precision", "bf16-mixed")}
    for classes, (argument, value) in precisions.items():
        owner = _only_call(file.tree, classes)
        wraps = classes is LIGHTNING or _is_prepared(script, file)
        if owner is not None and wraps and changes.get("autocast") == "bfloat16":
            return Said(call=owner, arguments={argument: value}, names=frozenset({"autocast"}))
    return None


def wrapped_loader(file: SourceFile, line: int) -> ast.Call | None:
    """Return the call that makes the user's own loader, if a line prepares that loader with Accelerate; None otherwise.
    Accelerate takes over the loader's settings.

    Raises:
        NotEditableError: It is not known which of several loaders the line prepares.
    """
    if "accelerate" not in ast.unparse(file.tree) or not is_called(file.tree, line, "prepare"):
        return None
    own = [call for call in calls([file.tree]) if full_name(file.tree, call.func) == LOADER_OF_TORCH]
    if len(own) != 1:
        raise NotEditableError(
            f"the file makes {len(own)} loaders, so the one that Accelerate wraps for the training is unknown"
        )
    return own[0]


def _is_trainers(changes: Mapping[str, Scalar], script: ScriptFacts, file: SourceFile) -> bool:
    """Say whether the object to change is made within `train` of a transformers Trainer, rather than by the user's
    code.
    """
    if any(name.startswith(LOADER) for name in changes):
        made = {"loader"}
    else:
        made = {"optimizer"} if "optimizer" in changes else {"loader", "optimizer"}
    lines = [line for name in made if (line := _line_of(name, script, file))]
    return "transformers" in ast.unparse(file.tree) and any(is_called(file.tree, line, "train") for line in lines)


def _is_prepared(script: ScriptFacts, file: SourceFile) -> bool:
    """Say whether the called model is one that Accelerate's `prepare` returned."""
    line = _line_of("model", script, file)
    prepares = [
        node
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and last_name(node.value.func) in ("prepare", "prepare_model")
    ]
    prepared = {name.rpartition(".")[2] for node in prepares for name in names(node.targets, ast.Store)}
    return bool(line) and any(is_called(file.tree, line, name) for name in prepared)


def _line_of(name: str, script: ScriptFacts, file: SourceFile) -> int:
    """Return the line of the command's script at which an object was made; 0 if it was made in another file."""
    path, position = script.lines.get(name, ("", 0))
    return counted_lines(file.text)[position] if path and path in script.command else 0


def _has_options(script: ScriptFacts, file: SourceFile) -> bool:
    """Say whether the command's options become the `TrainingArguments`."""
    found = list(calls([file.tree]))
    parsers = [call for call in found if last_name(call.func) in PARSERS]
    taken = [name for call in parsers for name in names([*call.args, *call.keywords], ast.Load)]
    reads = [call for call in found if last_name(call.func) in PARSES and not call.args]
    is_read = any("args" not in [keyword.arg for keyword in call.keywords] for call in reads)
    return is_read and any(_is_training_arguments(file.tree, name) for name in taken) and not _reads_a_file(script)


def _is_training_arguments(tree: ast.AST, name: str) -> bool:
    """Say whether a class is `TrainingArguments` of transformers, a subclass in the file, or a configuration of TRL."""
    own = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    if own:
        return any(_is_training_arguments(tree, ast.unparse(base)) for node in own for base in node.bases)
    known = full_name(tree, ast.parse(name, mode="eval").body)
    is_trl = known.startswith("trl.") and known.endswith("Config") and not known.endswith("ModelConfig")
    return is_trl or (known.startswith("transformers.") and known.endswith("TrainingArguments"))


def _refuse_others(tree: ast.AST, said: Said) -> None:
    """Refuse a script that sets one of the fields to change in a second place."""
    fields = {*said.arguments}
    assigned = {name.rpartition(".")[2] for name in names([tree], ast.Store) if "." in name}
    others = [call for call in calls([tree]) if call is not said.call]
    given = {keyword.arg for call in others for keyword in call.keywords}
    for name in sorted(fields & (assigned | given)):
        raise NotEditableError(f"the script also sets {name} elsewhere")
    for call in others:
        name = last_name(call.func)
        if name in SETTERS or (name == "replace" and any(keyword.arg is None for keyword in call.keywords)):
            raise NotEditableError(f"line {call.lineno} may set the arguments again")


def _reads_a_file(script: ScriptFacts) -> bool:
    return script.command[-1].endswith(ARGUMENT_FILES) or any(part.endswith(".sh") for part in script.command)


def _only_call(tree: ast.AST, classes: tuple[str, ...]) -> ast.Call | None:
    found = [call for call in calls([tree]) if full_name(tree, call.func) in classes]
    return found[0] if len(found) == 1 else None


def _of_trainer(changes: Mapping[str, Scalar], script: ScriptFacts, call: ast.Call | None) -> dict[str, object]:
    """Return the fields of `TrainingArguments` that express the changes.

    Args:
        call: Call that makes the `TrainingArguments`; None where the command's options do.
    """
    found: dict[str, object] = {}
    given = _options_of(script) if call is None else {keyword.arg for keyword in call.keywords}
    for name, value in changes.items():
        if name.startswith(LOADER):
            found |= _of_loader(name.removeprefix(LOADER), value, given, is_option=call is None)
        elif name == "autocast" and value == "bfloat16":
            if script.device == "cpu" and "use_cpu" not in given:
                raise NotEditableError("TrainingArguments takes bf16 on a CPU only beside use_cpu")
            found["bf16"] = True
        elif name == "compile" and value:
            found |= {"torch_compile": True} | ({} if value == "default" else {"torch_compile_mode": value})
        elif name == "optimizer" and value == "fused" and script.optimizers == ("AdamW",):
            found["optim"] = "adamw_torch_fused"
        elif name in ("matmul_precision", "cudnn_tf32") and value in ("high", True) and script.device == "cuda":
            found["tf32"] = True
        elif value not in UNSAID.get(name, (None, False, "highest")) or (value == "highest" and "tf32" in given):
            raise NotEditableError(f"TrainingArguments cannot express {name}={value}")
    return found


def _of_loader(setting: str, value: Scalar, given: Collection[str | None], *, is_option: bool) -> dict[str, object]:
    """Return the field for a loader's setting; empty if the value is the default."""
    field = f"dataloader_{setting}"
    if field not in given and value in DEFAULTS[setting] and not (is_option and value is not None):
        return {}
    if is_option and value is None:
        raise NotEditableError(f"an option cannot reset {field}: remove --{field} from the command")
    return {field: value}


def _options_of(script: ScriptFacts) -> set[str]:
    """Return the names of the options in the command."""
    return {part[2:].partition("=")[0].replace("-", "_") for part in script.command if part.startswith("--")}
