"""Combinations that `activation_compression` refuses."""

from __future__ import annotations

from steptune.tuner.strategies.activation_compression.choice import ActivationCompressionSetting
from steptune.tuner.strategies.api import Conflict
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.strategies.cuda_graph.choice import CudaGraphSetting

CONFLICTS = (
    Conflict(
        between=(ActivationCompressionSetting, CudaGraphSetting),
        when=lambda s, e, w: (
            s[CudaGraphSetting].scope == "step" and s[ActivationCompressionSetting].kept_as == "relu_sparse"
        ),
        reason="the size of a compressed activation depends on the data, and a CUDA graph needs fixed sizes",
    ),
    Conflict(
        between=(ActivationCompressionSetting, CompileSetting),
        when=lambda s, e, w: s[ActivationCompressionSetting].kept_as is not None and s[CompileSetting].mode is not None,
        reason="torch.compile itself chooses which activations to save for the backward pass",
    ),
)
