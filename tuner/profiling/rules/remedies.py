"""Remedies that rules of several subjects share."""

from __future__ import annotations

from steptune.tuner.profiling.rules.rule import Remedy
from steptune.tuner.records import StepFacts
from steptune.tuner.strategies.cures import Cure

READ_NOTHING = Remedy(advice="do not read device values during the step: avoid .item() and printing the loss")


COMPILE = Remedy(
    advice="compile the model",
    cures=(Cure.FUSE_OPERATORS,),
    useful=lambda facts: not facts.compiled,
    unless="it is compiled",
)
REPLAY = Remedy(
    advice="replay the step as a CUDA graph",
    cures=(Cure.REPLAY_LAUNCHES,),
    useful=lambda facts: not facts.cuda_graphs,
    unless="CUDA graphs are replayed",
)
FUSABLE = frozenset({"Adam", "AdamW", "SGD", "Adagrad", ""})
"""PyTorch optimizers that have a fused implementation. The empty name stands for an optimizer of unknown class, which
may be any of them.
"""


def _can_fuse(facts: StepFacts) -> bool:
    """Say whether the optimizer can be fused; if a trial's trace does not tell, the strategy itself decides later."""
    known = ("for_loop", "foreach", "") if facts.own_capture else ("for_loop", "foreach")
    return facts.optimizer in known and facts.optimizer_name in FUSABLE


FUSE = Remedy(
    advice="fuse the optimizer (fused=True)",
    cures=(Cure.FUSE_UPDATE,),
    useful=_can_fuse,
    unless="the optimizer is fused, PyTorch has no fused version of it, or the trace does not show how it updates",
)
AT_ONCE = Remedy(
    advice="update all parameters at once (foreach=True, or a third-party fused implementation)",
    cures=FUSE.cures,
    useful=lambda facts: facts.optimizer == "for_loop" and facts.optimizer_name not in (*FUSABLE, "LBFGS"),
    unless="the optimizer already updates them at once, PyTorch has a fused version of it, or the trace does not show "
    "how it updates",
)
ENLARGE = Remedy(advice="use larger micro-batches", cures=(Cure.ENLARGE_PIECES,))


LAUNCH_LESS = (
    REPLAY,
    COMPILE,
    FUSE,
    AT_ONCE,
    Remedy(advice="use larger micro-batches", cures=(Cure.LAUNCH_PER_LARGER_PIECE,)),
)
