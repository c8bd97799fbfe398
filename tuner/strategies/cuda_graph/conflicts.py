"""Combination rules of `cuda_graph`: refused combinations and choices to try together."""

from __future__ import annotations

from steptune.kernels.names import OURS, WITHOUT_WAITING
from steptune.tuner.strategies.api import Conflict, Together
from steptune.tuner.strategies.attention_mask.choice import AttentionMaskSetting
from steptune.tuner.strategies.compile.choice import MODES_WITH_GRAPHS, CompileSetting
from steptune.tuner.strategies.cuda_graph.choice import CudaGraphSetting
from steptune.tuner.strategies.fused_kernels.choice import FusedKernelsSetting

MAY_WAIT = frozenset(OURS) - frozenset(WITHOUT_WAITING)
"""Steptune's kernels that leave every host wait in place; kernels of other packages may remove one."""
CONFLICTS = (
    Conflict(
        between=(CompileSetting, CudaGraphSetting),
        when=lambda s, e, w: s[CudaGraphSetting].scope == "step" and s[CompileSetting].mode in MODES_WITH_GRAPHS,
        reason="both record CUDA graphs, which cannot be nested: compile with mode default or max-autotune-no-"
        "cudagraphs",
    ),
    Conflict(
        between=(CudaGraphSetting, FusedKernelsSetting),
        when=lambda s, e, w: (
            s[CudaGraphSetting].scope == "step" and bool(w.host_read_in_loss) and s[FusedKernelsSetting].on <= MAY_WAIT
        ),
        reason="the loss synchronises the host with the device, which a CUDA graph cannot record, and no kernel "
        "computes that part of it",
        detail=lambda w: f" ({w.host_read_in_loss})",
    ),
    Conflict(
        between=(CudaGraphSetting, CompileSetting),
        when=lambda s, e, w: (
            s[CudaGraphSetting].scope == "step"
            and (w.host_read_beside_masks if s[AttentionMaskSetting].is_causal else w.host_read)
            not in ("", w.host_read_in_loss)
            and not (s[CompileSetting].mode is not None and s[CompileSetting].scope == "whole")
        ),
        reason="the step synchronises the host with the device, which a CUDA graph cannot record; compiling the "
        "whole model may remove the synchronisation",
        detail=lambda w: f" ({w.host_read})",
    ),
)

TOGETHER = (
    Together(
        between=(FusedKernelsSetting, CudaGraphSetting),
        reason="a CUDA graph cannot record a loss that waits for the device, which a kernel may make unnecessary",
    ),
    Together(
        between=(AttentionMaskSetting, CudaGraphSetting),
        reason="a CUDA graph cannot record the host's check of whether a mask is needed",
    ),
)
