"""Parameters of `backend_flags` that are dropped where they have no effect."""

from __future__ import annotations

from steptune.tuner.strategies.api import Dropped
from steptune.tuner.strategies.backend_flags.choice import BackendFlagsSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting

DROPPED = (
    Dropped(
        setting=BackendFlagsSetting,
        parameters=("tf32",),
        when=lambda s: s[PrecisionSetting].level == "tf32",
        reason="the precision strategy already enables TF32",
    ),
)
