"""States of the host's random number generators, read and set together."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def generator_states() -> Any:
    """Return the states of the CPU generators of torch, NumPy and Python."""
    import torch

    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_generators(states: Any) -> None:
    """Set these generators to states that `generator_states` returned."""
    import torch

    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
