"""Tensor parallelism: the matmuls of a block's attention and feed-forward parts, sharded across ranks.

    Y = f(X A) B      with A cut by columns and B by rows:      Y = sum over ranks of f(X A_r) B_r

so that a rank has some heads, or some inner columns, and one sum over the ranks follows the second matmul (in the
backward pass, a sum of gradients follows the first one). Everything between such pairs is computed alike on all ranks.
Sums are made in FP32. The placements are those of torch's ColwiseParallel and RowwiseParallel; parts are plain tensors
rather than DTensors, because those styles know neither the transposed weight of transformers' Conv1D nor query, key and
value in one matmul, and because DDP and fused optimizers take plain ones.

What is cut is found from the structure of a block: names, shapes, and that nothing else there has weights. Whatever is
not known is refused. A forward function that takes its width from elsewhere than its own heads fails on its shapes.

Source: Shoeybi et al., "Megatron-LM" (2019), arXiv 1909.08053, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.training.mesh.parts import Cut

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Attribute names that a family of models uses for a pair of matmuls.

    Attributes:
        columns: Children that read the input; their outputs are cut.
        row: The matmul after them, below the same module or the one around it.
        heads: The attribute that counts heads; None where columns need not stay together.
        widths: Further attributes that count a rank's columns.
        stretches: Parts of the columns: 3 where one matmul computes query, key and value.
    """

    columns: tuple[str, ...]
    row: str
    heads: str | None = None
    widths: tuple[str, ...] = ()
    stretches: int = 1


ATTENTIONS = (
    Pattern(columns=("c_attn",), row="c_proj", heads="num_heads", widths=("split_size",), stretches=3),  # GPT-2
    Pattern(columns=("q_proj", "k_proj", "v_proj"), row="o_proj", heads="num_attention_heads"),  # ViT
    Pattern(
        columns=("query", "key", "value"), row="output.dense", heads="num_attention_heads", widths=("all_head_size",)
    ),  # BERT
)
FEED_FORWARDS = (
    Pattern(columns=("c_fc",), row="c_proj"),
    Pattern(columns=("fc1",), row="fc2"),
    Pattern(columns=("intermediate.dense",), row="output.dense"),
)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Pair of matmuls found in a block, to be sharded.

    Attributes:
        core: Module whose input the columns read.
        units: Number of units that ranks can share: heads, or inner columns.
    """

    pattern: Pattern
    core: Any
    columns: tuple[Any, ...]
    row: Any
    units: int


def splits_of(blocks: Sequence[torch.nn.Module]) -> list[Split]:
    """Return the pairs of matmuls of all blocks.

    Raises:
        UnsupportedError: A block's structure is not known; the message names the part.
    """
    if not blocks:
        raise UnsupportedError("the model has no repeated blocks; name them in Workload.blocks")
    found: list[Split] = []
    for block in blocks:
        of_block = [split for patterns in (ATTENTIONS, FEED_FORWARDS) for split in _matches(block, patterns)]
        kinds = {split.pattern.heads is not None for split in of_block}
        if kinds != {True, False} or len(of_block) != 2:
            missing = "attention" if True not in kinds else "feed-forward layer"
            what = f"no {missing}" if len(kinds) < 2 else "more than one attention or feed-forward layer"
            raise UnsupportedError(f"{type(block).__name__} has {what} whose matmuls can be sharded")
        _check_nothing_else(block, of_block)
        found += of_block
    return found


def shareable_units(blocks: Sequence[torch.nn.Module]) -> tuple[int, str]:
    """Return the number that the degree of tensor parallelism must divide, and an empty string; if nothing can be
    sharded, return 0 and the reason.
    """
    try:
        return math.gcd(*(split.units for split in splits_of(blocks))), ""
    except UnsupportedError as error:
        return 0, str(error)


def share_out(splits: Sequence[Split], group: Any) -> dict[int, Cut]:
    """Keep only this rank's part of every pair of matmuls.

    Returns:
        Each part's cut, by the identity of its new parameter.

    Raises:
        UnsupportedError: The number of heads or columns is not divisible by that of the ranks.
    """
    import torch.distributed as dist

    size, rank = dist.get_world_size(group), dist.get_rank(group)
    cuts: dict[int, Cut] = {}
    for split in splits:
        if split.units % size:
            what = "heads" if split.pattern.heads else "inner columns"
            raise UnsupportedError(
                f"{split.units} {what} of {type(split.core).__name__} cannot be divided evenly among {size} ranks"
            )
        for product in split.columns:
            for name in ("weight", "bias"):
                dim = _column_dim(product) if name == "weight" else 0
                cuts.update(_part(product, name, Cut(dim=dim, num_parts=size, stretches=split.pattern.stretches), rank))
            for attribute in ("out_features", "nf"):
                if hasattr(product, attribute):
                    setattr(product, attribute, getattr(product, attribute) // size)
        cuts.update(_part(split.row, "weight", Cut(dim=1 - _column_dim(split.row), num_parts=size), rank))
        counts = (split.pattern.heads, *split.pattern.widths) if split.pattern.heads else ()
        for count in counts:
            setattr(split.core, count, getattr(split.core, count) // size)
        _enter(split, group)
        _leave(split.row, group)
    return cuts


# --- finding --------------------------------------------------------------------------------------


def _matches(block: torch.nn.Module, patterns: Sequence[Pattern]) -> Iterator[Split]:
    modules = dict(block.named_modules())
    for path, core in modules.items():
        for pattern in patterns:
            columns = [_below(core, name) for name in pattern.columns]
            around = modules[path.rpartition(".")[0]] if path else core
            row = _below(core, pattern.row) or _below(around, pattern.row)
            if row is None or not all(columns) or not all(_is_product(product) for product in (*columns, row)):
                continue
            if pattern.heads is not None and not hasattr(core, pattern.heads):
                continue
            yield _checked(Split(pattern=pattern, core=core, columns=tuple(columns), row=row, units=0))


def _checked(split: Split) -> Split:
    """Check a pair of matmuls, and count its units that can be sharded: heads, or columns without attention. Sizes must
    be consistent, and attention may have no parameters outside its matmuls.
    """
    pattern, name = split.pattern, type(split.core).__name__
    outputs = {_size(product, _column_dim(product)) for product in split.columns}
    inner = _size(split.row, 1 - _column_dim(split.row))
    if outputs != {inner * pattern.stretches}:
        raise UnsupportedError(
            f"{name} has linear layers with {sorted(outputs)} outputs before one with {inner} "
            "inputs, a structure that cannot be sharded"
        )
    if pattern.heads is None:
        return Split(**{**vars(split), "units": inner})
    inside = {id(parameter) for product in (*split.columns, split.row) for parameter in product.parameters()}
    others = [key for key, parameter in split.core.named_parameters() if id(parameter) not in inside]
    if others:
        raise UnsupportedError(f"{name} has parameters outside its matmuls: {', '.join(others)}")
    heads = int(getattr(split.core, pattern.heads))
    if inner % heads:
        raise UnsupportedError(f"{name} has {heads} heads, which do not divide its {inner} columns evenly")
    return Split(**{**vars(split), "units": heads})


def _check_nothing_else(block: torch.nn.Module, splits: Sequence[Split]) -> None:
    known = {id(p) for split in splits for product in (*split.columns, split.row) for p in product.parameters()}
    others = [name for name, p in block.named_parameters() if p.dim() > 1 and id(p) not in known]
    if others:
        raise UnsupportedError(
            f"{type(block).__name__} has weights outside its attention and feed-forward layers: {', '.join(others)}"
        )


def _below(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _is_product(module: Any) -> bool:
    import torch

    return type(module) is torch.nn.Linear or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def _column_dim(product: Any) -> int:
    """Return the dimension of the weight's output columns: weights are (outputs, inputs) in torch, (inputs, outputs) in
    Conv1D.
    """
    return 1 if hasattr(product, "nf") else 0


def _size(product: Any, dim: int) -> int:
    return int(product.weight.shape[dim])


# --- sharing out ----------------------------------------------------------------------------------


def _part(module: Any, name: str, cut: Cut, rank: int) -> dict[int, Cut]:
    import torch

    whole = getattr(module, name)
    if whole is None:
        return {}
    part = torch.nn.Parameter(cut.part(whole.detach(), rank), requires_grad=whole.requires_grad)
    setattr(module, name, part)
    return {id(part): cut}


def _enter(split: Split, group: Any) -> None:
    """Pass the input, equal on all ranks, to the column-sharded matmuls, and sum its gradient over the ranks."""
    entering, _ = _exchanges()
    # Columns of one attention share an input: its gradient is summed once.
    module = split.core if split.pattern.heads else split.columns[0]

    def enter(_: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (entering.apply(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": entering.apply(kwargs["hidden_states"], group)}

    module.register_forward_pre_hook(enter, with_kwargs=True)


def _leave(row: Any, group: Any) -> None:
    """Sum the outputs of the row-sharded matmul over all ranks, and add the bias once."""
    import torch.nn.functional as F

    _, leaving = _exchanges()

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = row.weight if _column_dim(row) == 0 else row.weight.t()
        total: torch.Tensor = leaving.apply(F.linear(x, weight), group)
        return total if row.bias is None else total + row.bias.to(total.dtype)

    row.forward = forward


def _exchanges() -> Any:
    """Return two functions: the identity, and the sum over ranks. Each is the gradient of the other."""
    import torch
    import torch.distributed as dist

    def summed(value: torch.Tensor, group: Any) -> torch.Tensor:
        total = value.float() if value.dtype.itemsize < 4 else value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.to(value.dtype)

    class Entering(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
            ctx.group = group
            return value.view_as(value)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return summed(gradient, ctx.group), None

    class Leaving(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
            return summed(value, group)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient, None

    return Entering, Leaving
