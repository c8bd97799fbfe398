"""Chain of a model's repeated blocks: a run of the model can begin or end between any two blocks.

A stage of a pipeline runs the workload's own loss on the whole model, whose blocks are steered: those before the
stage are passed over, its first one takes what the stage before has sent, and behind its last one the model is left.
So the user's forward function need not be taken apart, and what it makes of a batch besides (masks, positions) is
there on every stage: what comes before the blocks is computed on all of them, without gradients on all but the first.

That is the same training only if the blocks are called once each, in order, each on the output of the one before, and
if nothing but the last output is used behind them; `examine` checks this on a batch, and refuses everything else.
Blocks that are passed over return NaN, so that any use of their output is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.training.structure import map_structure
from steptune.tuner.workloads.workload import leaves

if TYPE_CHECKING:
    import torch

Loss = Callable[[], "torch.Tensor"]


def chain_refusal(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], loss: Loss) -> str:
    """Return why blocks do not form a chain; empty where they do. The model is unchanged afterwards."""
    chain = Chain(model, blocks)
    try:
        chain.examine(loss)
    except UnsupportedError as error:
        return str(error)
    except Exception as error:  # the user's own code, given what is not a number
        return f"the model fails when its blocks are skipped ({type(error).__name__}: {error})"
    finally:
        chain.release()
    return ""


class _Left(BaseException):
    """Control-flow exception that leaves the model after a block; not a subclass of `Exception`, so that user code does
    not catch it.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


@dataclass(frozen=True, kw_only=True)
class Examined:
    """Result of examining a chain on one batch.

    Attributes:
        calls: Arguments of every block.
        dtypes: Dtype of each block's input.
        front: Names of the parameters that the first block's input depends on.
        back: Names of the parameters that the loss depends on after the last block.
    """

    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]
    dtypes: tuple[torch.dtype, ...]
    front: frozenset[str]
    back: frozenset[str]


@dataclass(kw_only=True)
class _Run:
    """Blocks that the current run of the model executes.

    Attributes:
        first: First block that is run.
        last: Block after which the model is left; None runs to the loss.
        received: Replacement for the first block's input; None leaves that.
        seen: Called with every block's number, arguments and output.
    """

    first: int = 0
    last: int | None = None
    received: torch.Tensor | None = None
    seen: Callable[[int, Any, Any, Any], None] | None = None


class Chain:
    """Blocks of a model with replaced forward passes, so that runs can start and end at any block.

    Attributes:
        on_leaving: Called with a stage's output, inside the contexts in which it was computed; or None.
    """

    def __init__(self, model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
        self.model = model
        self.blocks = list(blocks)
        self.on_leaving: Callable[[torch.Tensor], None] | None = None
        self._run: _Run | None = None
        self._inner = [block.forward for block in blocks]
        for number, block in enumerate(self.blocks):
            block.forward = self._steered(number)

    def release(self) -> None:
        """Restore the blocks' own forward functions."""
        for block, inner in zip(self.blocks, self._inner, strict=True):
            block.forward = inner

    # --- running ------------------------------------------------------------------------------

    def stage(self, loss: Loss, first: int, last: int, received: torch.Tensor | None) -> torch.Tensor:
        """Run the blocks from `first` to `last`; return the last one's output, or the loss after the model's final
        block.
        """
        import torch

        is_final = last == len(self.blocks) - 1
        with torch.set_grad_enabled(received is None):
            return self._ran(loss, _Run(first=first, last=None if is_final else last, received=received))

    def entry(self, loss: Loss) -> torch.Tensor:
        """Return the first block's input."""
        return self._ran(loss, _Run(last=-1))

    def back(self, loss: Loss, hidden: torch.Tensor, *, around: bool = False) -> torch.Tensor:
        """Return the loss of a last block's output.

        Args:
            around: Whether to compute gradients of what comes before the blocks, on which the loss may depend too.
        """
        import torch

        with torch.set_grad_enabled(around):
            return self._ran(loss, _Run(first=len(self.blocks), received=hidden))

    def block(self, number: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one block alone."""
        return self._inner[number](*args, **kwargs)  # type: ignore[no-any-return]

    def _ran(self, loss: Loss, run: _Run) -> torch.Tensor:
        with self._steering(run):
            try:
                return loss()
            except _Left as left:
                return left.hidden

    @contextmanager
    def _steering(self, run: _Run) -> Iterator[None]:
        self._run = run
        try:
            yield
        finally:
            self._run = None

    def _steered(self, number: int) -> Callable[..., Any]:
        import torch

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = self._run
            if run is None:
                return self._inner[number](*args, **kwargs)
            if run.last == -1:
                raise _Left(_hidden(args, kwargs))
            taking = run.received is not None and number == min(run.first, len(self.blocks) - 1)
            if taking:
                torch.set_grad_enabled(True)  # until the model is left
            if number < run.first:
                hidden = _hidden(args, kwargs)
                return run.received if taking else hidden.new_full((), float("nan")).expand(hidden.shape)
            if taking:
                args, kwargs = _with_hidden(args, kwargs, run.received)
            output = self._inner[number](*args, **kwargs)
            if run.seen is not None:
                run.seen(number, args, kwargs, output)
            if number == run.last:
                if self.on_leaving is not None:
                    self.on_leaving(output)
                raise _Left(output)
            return output

        return forward

    # --- examining ----------------------------------------------------------------------------

    def examine(self, loss: Loss) -> Examined:
        """Check that the blocks form a chain; the gradients are unchanged afterwards.

        Raises:
            UnsupportedError: The blocks are not a chain; the message has the reason.
        """
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        kept = [p.grad for p in parameters]
        try:
            calls, output = self._calls(loss)
            front = self._reached(self.entry(loss))
            hidden = output.detach().requires_grad_()
            value = self.back(loss, hidden, around=True)
            if not bool(value.detach().isfinite().all()):
                raise UnsupportedError("the modules after the blocks use more than the output of the last block")
            around = self._reached(value)
            back = self._reached(self.back(loss, hidden))
        finally:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient
        if around != back:
            raise UnsupportedError(
                "the loss depends on modules before the blocks directly, not only through the blocks: "
                + ", ".join(sorted(around - back)[:3])
            )
        inside = {name for block in self.blocks for name in self._names(block.parameters())}
        shared = sorted(inside & (front | back))
        if shared or len(inside) < sum(len(list(block.parameters())) for block in self.blocks):
            raise UnsupportedError(f"blocks share parameters ({', '.join(shared[:3]) or 'with one another'})")
        dtypes = tuple(_hidden(*call).dtype for call in calls)
        return Examined(calls=tuple(calls), dtypes=dtypes, front=front, back=back)

    def _calls(self, loss: Loss) -> tuple[list[Any], torch.Tensor]:
        """Return the arguments of all blocks, detached, and the last block's output."""
        calls: list[Any] = []
        outputs: list[Any] = []

        def see(number: int, args: Any, kwargs: Any, output: Any) -> None:
            self._check(number, args, kwargs, output, outputs)
            calls.append(map_structure(lambda leaf: leaf.detach() if hasattr(leaf, "detach") else leaf, (args, kwargs)))
            outputs.append(output)

        self._ran(loss, _Run(seen=see))
        if len(calls) < len(self.blocks):
            raise UnsupportedError(f"the loss calls only {len(calls)} of {len(self.blocks)} blocks")
        return calls, outputs[-1]

    def _check(self, number: int, args: Any, kwargs: Any, output: Any, outputs: list[Any]) -> None:
        import torch

        name = type(self.blocks[number]).__name__
        if number != len(outputs):
            raise UnsupportedError(f"block {number} ({name}) is called out of order, in place of block {len(outputs)}")
        if not isinstance(output, torch.Tensor):
            raise UnsupportedError(f"{name} returns {type(output).__name__}, but pipeline stages send a single tensor")
        hidden = _hidden(args, kwargs)
        if number and hidden is not outputs[-1]:
            raise UnsupportedError(
                f"the model runs operations between blocks {number - 1} and {number}, which no pipeline stage would run"
            )
        if output.shape != hidden.shape:
            raise UnsupportedError(
                f"{name} changes the shape from {tuple(hidden.shape)} to "
                f"{tuple(output.shape)}, but all pipeline stages must send the same shape"
            )
        others = [leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, torch.Tensor) and leaf is not hidden]
        if any(leaf.requires_grad for leaf in others):
            raise UnsupportedError(
                f"{name} takes a second tensor that requires a gradient, but pipeline stages send a single tensor"
            )

    def _reached(self, value: torch.Tensor) -> frozenset[str]:
        """Return the names of the parameters that a value depends on."""
        for parameter in self.model.parameters():
            parameter.grad = None
        if value.requires_grad:
            value.sum().backward()
        return frozenset(self._names(p for p in self.model.parameters() if p.grad is not None))

    def _names(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[str]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return (names[id(parameter)] for parameter in parameters)


def _hidden(args: Any, kwargs: Any) -> torch.Tensor:
    """Return a block's first argument."""
    value = args[0] if args else kwargs.get("hidden_states")
    if not hasattr(value, "shape"):
        raise UnsupportedError("the first argument of the blocks must be a tensor")
    return value  # type: ignore[no-any-return]


def _with_hidden(args: Any, kwargs: Any, hidden: Any) -> tuple[Any, Any]:
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
