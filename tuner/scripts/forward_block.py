"""Statements of a training loop that autocast must enclose: from the model's call to the loss.

A trial casts inside the model's `forward`, wherever it is called. Autocast around lines is equivalent only where the
model is called once for each backward pass, and nothing else in the script chooses the precision or needs the outputs
in FP32.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from steptune.tuner.scripts.source_edits import NotEditableError, SourceFile, last_name
from steptune.tuner.scripts.source_meaning import calls, function_of, names

SCALING = ("backward", "scale")
"""Calls in a backward statement that do not compute the loss."""
TO_OTHERS = ("float", "double", "argmax", "long", "int")
"""Methods whose results have another dtype than bfloat16."""


def forward_and_loss(file: SourceFile, line: int) -> Sequence[ast.stmt]:
    """Return the statements from the one that calls the model to the one that computes the loss.

    Raises:
        NotEditableError: There is no such block, or autocast around it would train differently from the trial.
    """
    _refuse_own_autocast(file.tree, line)
    found: tuple[list[ast.stmt], int] | None = file.block_of(line)
    while found is not None and not any(_backward_calls(found[0][found[1] :])):
        found = file.around(found[0])
    if found is None:
        raise NotEditableError("the model call and the backward call are not in the same block of code")
    block, first = found
    passes = [n for n, statement in enumerate(block) if any(_backward_calls([statement]))]
    if len(passes) != 1 or passes[0] <= first:
        raise NotEditableError("the block that calls the model calls backward several times, or in the same statement")
    forward, backward = block[first : passes[0]], list(_backward_calls([block[passes[0]]]))
    made, used = names(forward, ast.Store), names(backward, ast.Load)
    if any(
        last_name(c.func) not in SCALING and names([*c.args, *c.keywords], ast.Load) & made for c in calls(backward)
    ):
        raise NotEditableError("the loss is computed in the statement that runs backward")
    _refuse_numpy(function_of(file.tree, line), made - used)
    ends = [n for n, statement in enumerate(forward) if names([statement], ast.Store) & used]
    return forward[: ends[-1] + 1] if ends else forward


def _refuse_own_autocast(tree: ast.AST, line: int) -> None:
    """Refuse a script that already calls the model in an autocast context, which would override the recommended one."""
    contexts = [n for n in ast.walk(tree) if isinstance(n, ast.With) and n.lineno <= line <= (n.end_lineno or n.lineno)]
    items = [ast.unparse(item.context_expr) for context in contexts for item in context.items]
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and names(n.targets, ast.Store) & set(items)]
    switches = [text for text in map(ast.unparse, assigned) if "autocast" in text and "enabled" in text]
    if switches or any("autocast" in text for text in items):
        raise NotEditableError(
            "the script calls the model inside its own autocast, which overrides the recommended one"
        )


def _refuse_numpy(function: ast.AST, outputs: set[str]) -> None:
    for call in calls([function]):
        if last_name(call.func) == "numpy" and names([call], ast.Load) & outputs:
            methods = {last_name(inner.func) for inner in calls([call])}
            if not methods & set(TO_OTHERS):
                raise NotEditableError("outputs of the model go to NumPy, which has no bfloat16")


def _backward_calls(nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    return (call for call in calls(nodes) if last_name(call.func) == "backward")
