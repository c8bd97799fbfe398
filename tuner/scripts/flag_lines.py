"""Lines that set torch's flags, placed after an optimizer is made, unless the script sets the same flags later."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from steptune.tuner.records import Scalar
from steptune.tuner.scripts.source_edits import NotEditableError
from steptune.tuner.scripts.source_meaning import function_of

FLAGS = {
    "num_threads": "torch.set_num_threads({})",
    "cudnn_benchmark": "torch.backends.cudnn.benchmark = {}",
    "cudnn_tf32": "torch.backends.cudnn.allow_tf32 = {}",
    "matmul_precision": "torch.set_float32_matmul_precision({})",
    "flush_denormals": "torch.set_flush_denormal({})",
}
DEFAULTS = {"cudnn_benchmark": False, "matmul_precision": "highest", "flush_denormals": False}
SETTERS = {
    "num_threads": ("set_num_threads(",),
    "cudnn_benchmark": ("cudnn.benchmark =",),
    "cudnn_tf32": ("cudnn.allow_tf32 =",),
    "matmul_precision": ("set_float32_matmul_precision(", "matmul.allow_tf32 ="),
    "flush_denormals": ("set_flush_denormal(",),
}
"""Statements by which a script itself sets each flag, by flag."""


def flag_lines(changes: Mapping[str, Scalar], tree: ast.AST, line: int, others: Sequence[ast.AST]) -> list[str]:
    """Return lines that set the flags of a choice; a flag's default needs a line only where the script sets another
    value.

    Args:
        tree: The file into which they go.
        line: Line after which they go.
        others: Further files of the script.

    Raises:
        NotEditableError: The script may set a flag again later, or the lines would change nothing.
    """
    flags = {name: value for name, value in changes.items() if name in FLAGS}
    lines = []
    for name, value in flags.items():
        own = _settings(tree, name)
        late = [
            node
            for node in own
            if node.lineno > line or function_of(tree, node.lineno) not in (tree, function_of(tree, line))
        ]
        if late or any(_settings(other, name) for other in others):
            raise NotEditableError(f"the script sets {name} itself, possibly after the inserted line")
        if own or name not in DEFAULTS or DEFAULTS[name] != value:
            lines.append(FLAGS[name].format(repr(value)))
    if flags and not lines:
        raise NotEditableError("the change only restores PyTorch's default settings")
    return lines


def _settings(tree: ast.AST, name: str) -> list[ast.stmt]:
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.Expr)]
    return [node for node in statements if any(setter in ast.unparse(node) for setter in SETTERS[name])]
