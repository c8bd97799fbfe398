"""Combinations that `attention_backend` refuses."""

from __future__ import annotations

from steptune.tuner.strategies.api import Conflict
from steptune.tuner.strategies.attention_backend.choice import AttentionBackendSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting

CONFLICTS = (
    Conflict(
        between=(AttentionBackendSetting, PrecisionSetting),
        when=lambda s, e, w: (
            e.hardware.device_kind == "cuda"
            and s[AttentionBackendSetting].backend in ("flash", "cudnn")
            and s[PrecisionSetting].level in ("fp32", "tf32")
        ),
        reason="flash and cuDNN attention on CUDA require 16-bit inputs: use precision level O1, O2 or O3",
    ),
)
