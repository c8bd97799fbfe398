"""Parameters of `compile` that are dropped where they have no effect."""

from __future__ import annotations

from steptune.tuner.strategies.api import Dropped
from steptune.tuner.strategies.compile.choice import CompileSetting

DROPPED = (
    Dropped(
        setting=CompileSetting,
        parameters=("scope", "dynamic"),
        when=lambda s: s[CompileSetting].mode is None,
        reason="nothing is compiled",
    ),
)
