"""Checkpoints of an optimizer that load under any implementation of its update.

A state dict of torch has the flags of the implementation among the options of its groups, and they determine the device
of a step count. Loaded as it is, it would turn an optimizer into the one that it was saved from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

IMPLEMENTATION = ("foreach", "fused", "capturable")
"""Options of an optimizer's parameter groups that select how an update runs. They do not change what it computes."""


def implementation_flags(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that select an implementation of the update."""
    return {name: group[name] for name in IMPLEMENTATION if name in group}


def with_flags(state_dict: Mapping[str, Any], flags: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an optimizer's state dict with other implementation flags.

    Step counts are on the CPU, where an update that is neither fused nor capturable wants them; torch moves them to the
    device for one that is, when it loads them.

    Args:
        flags: Flags of each group. Other implementation options are left out.
    """
    groups = [
        {**{name: value for name, value in group.items() if name not in IMPLEMENTATION}, **own}
        for group, own in zip(state_dict["param_groups"], flags, strict=True)
    ]
    state = {number: _with_step_on_cpu(values) for number, values in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def _with_step_on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    step: Any = values.get("step")
    return {**values, "step": step.cpu()} if hasattr(step, "data_ptr") else dict(values)
