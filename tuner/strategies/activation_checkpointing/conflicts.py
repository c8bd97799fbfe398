"""Combinations that `activation_checkpointing` refuses, drops or tries together."""

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
