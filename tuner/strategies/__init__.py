"""Strategies: techniques that can be switched on or set, each with a folder and an entry in `registry.STRATEGIES`."""

from __future__ import annotations

from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported
from steptune.tuner.strategies.registry import STRATEGIES, strategies_for, strategy_named

__all__ = ["STRATEGIES", "Strategy", "Support", "Supported", "Unsupported", "strategies_for", "strategy_named"]
