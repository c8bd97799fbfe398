"""A recommendation as changes to the script itself: a unified diff, and options of its command line.

Only changes with a plain idiom become lines: the rest is left to `steptune.enable`, with the reason. A diff is made at
the places that the inspection recorded, only in files below the script's folder that were not edited since.
"""

from __future__ import annotations

import ast
import difflib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from steptune.tuner.errors import RecommendationError
from steptune.tuner.records import Recommendation, Scalar, ScriptFacts
from steptune.tuner.scripts.agent.sources import counted_lines, source_digest
from steptune.tuner.scripts.flag_lines import FLAGS, flag_lines
from steptune.tuner.scripts.forward_block import forward_and_loss
from steptune.tuner.scripts.library_arguments import library_arguments, wrapped_loader
from steptune.tuner.scripts.source_edits import NotEditableError, SourceFile, last_name, option_of
from steptune.tuner.scripts.source_meaning import (
    calls,
    full_name,
    is_called,
    is_in_scope_of_its_own,
    is_replaced,
    knows_torch,
)
from steptune.tuner.strategies.api import Outside
from steptune.tuner.strategies.in_scripts import outside_of

MOST_LINES = 15
"""Maximum number of lines that a diff changes: removed lines plus added lines."""
LOADER = "loader."
NEED_NOT_BE_SAID: dict[str, tuple[Scalar, ...]] = {
    "num_workers": (0,),
    "pin_memory": (False,),
    "prefetch_factor": (None, 2),
    "persistent_workers": (False,),
}
"""Defaults of a DataLoader, which need no argument."""
POSITIONAL = 6
"""Minimum number of positional arguments of a DataLoader at which the number of workers may be one of them."""
OPTIMIZER = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for_loop": {"foreach": False}}


@dataclass(frozen=True, kw_only=True)
class ScriptDiff:
    """A recommendation expressed as changes to its script.

    Attributes:
        texts: New texts of files, by their path below the folder.
        diff: The same as a unified diff; empty where options express everything.
        options: Options to be added to the command.
        expressed: Strategies that the diff and the options express.
        left_out: Reasons why other strategies are not expressed, by strategy.
    """

    texts: dict[str, str]
    diff: str
    options: tuple[str, ...]
    expressed: tuple[str, ...]
    left_out: dict[str, str]


def script_diff(recommendation: Recommendation) -> ScriptDiff:
    """Return the changes of a recommendation that the script's own lines and options can express.

    Raises:
        RecommendationError: The recommendation is not for a script, the script was edited or is gone, or nothing can be
            expressed in this way.
    """
    if recommendation.in_script is None:
        raise RecommendationError(
            "a diff requires a recommendation for a training script; this one is for a "
            "Workload: use another export format"
        )
    script = recommendation.in_script.script
    found = outside_of(recommendation.candidate, recommendation.choices, script)
    if not found:
        raise RecommendationError("the recommendation changes nothing, so there is no diff")
    writer = _Writer(script)
    left_out: dict[str, str] = {}
    for name, outside in found.items():
        try:
            writer.write(outside)
        except NotEditableError as error:
            left_out[name] = str(error)
    expressed = tuple(name for name in found if name not in left_out)
    if not expressed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise RecommendationError(
            f"the changes cannot be written as edits of the script ({reasons}): use steptune.enable, which makes "
            "all of them"
        )
    texts = writer.texts()
    diff = "".join(unified(name, writer.files[name].text, text) for name, text in texts.items())
    return ScriptDiff(texts=texts, diff=diff, options=tuple(writer.options), expressed=expressed, left_out=left_out)


def unified(name: str, before: str, after: str) -> str:
    """Return the difference of two texts of a file, as `git apply` and `patch -p1` accept it."""
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


class _Writer:
    """Editor of a script's files, choice by choice; each choice is written completely or not at all."""

    def __init__(self, script: ScriptFacts) -> None:
        self._script = script
        self.files: dict[str, SourceFile] = {}
        self.options: list[str] = []
        self._done: list[Outside] = []

    def write(self, outside: Outside) -> None:
        """Make the changes of a choice.

        Raises:
            NotEditableError: The changes have no plain idiom here.
        """
        if not outside.changes:
            raise NotEditableError(f"environment variables are set outside the script: {outside.words}")
        self._write_all([*self._done, outside])
        self._done.append(outside)

    def _write_all(self, wanted: list[Outside]) -> None:
        """Redo all edits from the beginning, so that a choice that fails leaves no trace."""
        before = self.files, self.options
        self.files, self.options = {}, []
        try:
            for outside in wanted:
                self._write(outside.changes)
            num_lines = sum(_num_changed(self.files[name].text, text) for name, text in self.texts().items())
            if num_lines > MOST_LINES:
                raise NotEditableError(f"the diff would change {num_lines} lines, more than the limit of {MOST_LINES}")
        except NotEditableError:
            self.files, self.options = before
            raise

    def texts(self) -> dict[str, str]:
        """Return the edited texts of the files that changed."""
        edited = {name: file.edited() for name, file in self.files.items()}
        return {name: text for name, text in edited.items() if text != self.files[name].text}

    def _write(self, changes: Mapping[str, Scalar]) -> None:
        changes = self._write_to_library(changes)
        loading = {n.removeprefix(LOADER): value for n, value in changes.items() if n.startswith(LOADER)}
        if loading:
            self._write_loader(loading)
        if FLAGS.keys() & changes.keys():
            self._write_flags(changes)
        writers: dict[str, Callable[[Mapping[str, Scalar]], None]] = {
            "optimizer": self._write_optimizer,
            "compile": self._write_compile,
            "channels_last": self._write_channels_last,
            "autocast": self._write_autocast,
        }
        for name, write in writers.items():
            if changes.get(name):
                write(changes)

    def _write_to_library(self, changes: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Set the arguments of the library that owns the loop, and return the changes for which the library has no
        argument.
        """
        named = [part for part in self._script.command if part in self._script.files]
        said = library_arguments(changes, self._script, self._file(named[0])) if len(named) == 1 else None
        if said is None:
            return dict(changes)
        if said.call is None:
            self.options += said.options
        else:
            self._file(named[0]).set_arguments(said.call, said.arguments)
        return {name: value for name, value in changes.items() if name not in said.names}

    def _write_flags(self, changes: Mapping[str, Scalar]) -> None:
        file, call = self._optimizer()
        named = (name for name in self._script.files if name.endswith(".py"))
        others = [other.tree for other in map(self._file, named) if other is not file]
        self._add_lines(flag_lines(changes, file.tree, call.lineno, others))

    def _write_loader(self, wanted: Mapping[str, Scalar]) -> None:
        file, line = self._at("loader")
        call = wrapped_loader(file, line) or file.call(line, [self._script.loader or ""])
        _of_torch(file, call, "torch.utils.data.")
        if len(call.args) >= POSITIONAL:
            raise NotEditableError("arguments of the DataLoader are given by position")
        present = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        changed: dict[str, object] = {}
        takes_options = not any(part.endswith(".sh") for part in self._script.command)
        for name, value in wanted.items():
            if takes_options and name in present and (option := _option(file.tree, present[name], value)):
                self.options.append(option)
            elif name in present or value not in NEED_NOT_BE_SAID[name]:
                changed[name] = value
        file.set_arguments(call, changed)

    def _write_optimizer(self, changes: Mapping[str, Scalar]) -> None:
        file, call = self._optimizer()
        _of_torch(file, call, "torch.optim.")
        wanted = OPTIMIZER[str(changes["optimizer"])]
        others = [k.arg for k in call.keywords if k.arg in ("fused", "foreach") and k.arg not in wanted]
        file.set_arguments(call, {**dict.fromkeys(others, False), **wanted})

    def _write_compile(self, changes: Mapping[str, Scalar]) -> None:
        said = [] if changes["compile"] == "default" else [f"mode={changes['compile']!r}"]
        said += [] if changes.get("compile_dynamic") is None else [f"dynamic={changes['compile_dynamic']}"]
        self._add_lines([f"{self._model()}.compile({', '.join(said)})"], uses_torch=False)

    def _write_channels_last(self, changes: Mapping[str, Scalar]) -> None:
        self._add_lines([f"{self._model()}.to(memory_format=torch.channels_last)"])

    def _write_autocast(self, changes: Mapping[str, Scalar]) -> None:
        """Add autocast around forward and loss."""
        if len(self._script.models) != 1:
            raise NotEditableError(f"a step calls {len(self._script.models)} models, but only one can be edited")
        file, line = self._at("model")
        if not knows_torch(file.tree, line):
            raise NotEditableError("the file of the model's call does not import torch")
        opening = f'with torch.autocast("{self._script.device}", dtype=torch.{changes["autocast"]}):'
        file.put_under(forward_and_loss(file, line), opening)

    def _add_lines(self, lines: list[str], *, uses_torch: bool = True) -> None:
        """Add lines after the optimizer is made: before the first step, and after the script's own settings."""
        file, call = self._optimizer()
        block, position = file.block_of(call.lineno)
        imported = [] if not uses_torch or knows_torch(file.tree, call.lineno) else ["import torch"]
        file.add_after(block[position], [*imported, *lines])

    def _optimizer(self) -> tuple[SourceFile, ast.Call]:
        if len(self._script.optimizers) != 1:
            raise NotEditableError(f"a step has {len(self._script.optimizers)} optimizers, but only one can be edited")
        file, line = self._at("optimizer")
        return file, file.call(line, self._script.optimizers)

    def _model(self) -> str:
        """Return the variable of the model that the loop calls, if the optimizer was given the parameters of that
        variable.
        """
        if len(self._script.models) != 1 or self._script.wrappers:
            raise NotEditableError("the variable that holds the called model is unknown")
        file, call = self._optimizer()
        functions = [inner.func for inner in calls([call])]
        owners = {file.source_of(f.value) for f in functions if isinstance(f, ast.Attribute) and f.attr == "parameters"}
        if len(owners) != 1 or not (name := owners.pop()).removeprefix("self.").isidentifier():
            raise NotEditableError("the optimizer's parameters do not come from a single variable")
        if is_in_scope_of_its_own(file.tree, call):
            raise NotEditableError(f"{name} exists only inside a comprehension or lambda")
        last = name.removeprefix("self.")
        caller, line = self._at("model")
        if not is_called(caller.tree, line, last):
            raise NotEditableError(f"the loop does not call {name}, whose parameters the optimizer updates")
        if any(is_replaced(each.tree, call.lineno if each is file else 0, last) for each in (file, caller)):
            raise NotEditableError(f"{name} is assigned again later")
        return name

    def _at(self, name: str) -> tuple[SourceFile, int]:
        """Return the file and the line at which an object was made."""
        if name not in self._script.lines:
            raise NotEditableError(f"the line that makes the {name} is not in a file of your folder")
        path, position = self._script.lines[name]
        file = self._file(path)
        return file, counted_lines(file.text)[position]

    def _file(self, path: str) -> SourceFile:
        if path not in self.files:
            self.files[path] = SourceFile(_unchanged(self._script, path))
        return self.files[path]


def _of_torch(file: SourceFile, call: ast.Call, module: str) -> None:
    """Refuse a call of a class that is not torch's, because it may not accept the arguments of torch's class."""
    if not full_name(file.tree, call.func).startswith(module):
        raise NotEditableError(
            f"{last_name(call.func)} is not a class of {module.rstrip('.')}, according to the file's imports"
        )


def _unchanged(script: ScriptFacts, name: str) -> str:
    path = Path(script.folder) / name
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecommendationError(
            f"{path} cannot be read ({error}): the diff requires the file as it was tuned, so restore it"
        ) from None
    if source_digest(text) != script.files[name]:
        raise RecommendationError(f"{path} was edited since it was tuned: undo the edits, or tune the script again")
    return text


def _option(tree: ast.AST, present: ast.expr, value: Scalar) -> str:
    """Return the option of the script's own parser that sets an argument; empty if there is none."""
    found = option_of(tree, present)
    if found is None or value is None:
        return ""
    option, action = found
    if action is None and not isinstance(value, bool):
        return f"{option} {value}"
    return option if action == "store_true" and value is True else ""


def _num_changed(before: str, after: str) -> int:
    lines = list(difflib.unified_diff(_lines(before), _lines(after), n=0))
    return sum(line.startswith(("-", "+")) for line in lines[2:])


def _lines(text: str) -> list[str]:
    """Return the lines as a patch needs them: Windows line ends are kept."""
    return io.StringIO(text, newline="\n").readlines()
