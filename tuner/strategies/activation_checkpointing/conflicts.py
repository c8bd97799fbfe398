"""Parameters of `activation_checkpointing` that are dropped where they have no effect."""

from __future__ import annotations

from steptune.tuner.strategies.activation_checkpointing.choice import ActivationCheckpointingSetting
from steptune.tuner.strategies.api import Dropped

DROPPED = (
    Dropped(
        setting=ActivationCheckpointingSetting,
        parameters=("save",),
        when=lambda s: s[ActivationCheckpointingSetting].every is None,
        reason="nothing is recomputed",
    ),
)
