"""Causes that fused kernels remove: parts of a training step that such a kernel could compute."""

from __future__ import annotations

from steptune.kernels.names import WITHOUT_WAITING
from steptune.tuner.profiling.evidence import Evidence
from steptune.tuner.profiling.rules.remedies import COMPILE, LAUNCH_LESS, READ_NOTHING
from steptune.tuner.profiling.rules.rule import Cause, Remedy
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.fused_kernels.choice import FusedKernelsSetting


def _usable_kernels(evidence: Evidence) -> list[str]:
    """Return the kernels that could compute a part of the training and are not enabled yet."""
    situation = evidence.situation
    if situation is None:
        return []
    used = situation.choices.get(FusedKernelsSetting.strategy, {})
    return [n for n, refusal in situation.workload.model.kernel_refusals.items() if not refusal and not used.get(n)]


def _of_loss(evidence: Evidence) -> list[str]:
    """Return the usable kernels for parts of the loss that loop over images and read values from the device."""
    return [name for name in _usable_kernels(evidence) if name in WITHOUT_WAITING]


def fusable_cause(evidence: Evidence) -> Cause | None:
    """Return the cause for parts of the model that a fused kernel could compute, but does not yet."""
    return _kernels_cause(_usable_kernels(evidence), "can compute a part of this work", COMPILE)


def waiting_cause(evidence: Evidence) -> Cause | None:
    return _kernels_cause(_of_loss(evidence), "can assign the boxes of a batch without waiting", READ_NOTHING)


def launching_cause(evidence: Evidence) -> Cause | None:
    found = _of_loss(evidence)
    return _kernels_cause(found, "can assign the boxes of a batch in a few launches", *LAUNCH_LESS)


def _kernels_cause(found: list[str], message: str, *otherwise: Remedy) -> Cause | None:
    if not found:
        return None
    kernels = " and ".join(found)
    fuse = Remedy(advice=f"use the fused kernels that apply: {kernels}", cures=(Cure.FUSE_PARTS,))
    return Cause(name="kernels", message=f"{kernels} {message}", remedies=(fuse, *otherwise))
