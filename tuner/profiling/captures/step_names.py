"""Recognition of steps in other profilers' captures, by the names of ranges.

A name is split into words ("train_step 12", "ProfilerStep#3", "[pl]run_training_batch"). Of several families of
such ranges on several threads (the iteration, a step inside it), the one that covers the most time is used.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_STEPS = frozenset({"step", "steps", "iter", "iters", "iteration", "iterations", "batch"})
_PARTS = frozenset(
    {
        *("forward", "backward", "fwd", "bwd", "optimizer", "optim", "opt", "scheduler", "sched", "lr", "zero", "grad"),
        *(
            "gradient",
            "update",
            "data",
            "load",
            "loader",
            "next",
            "fetch",
            "get",
            "copy",
            "to",
            "micro",
            "norm",
            "clip",
        ),
        *("eval", "evaluate", "evaluation", "val", "validate", "validation", "test", "warmup", "all", "reduce"),
    }
)
"""Words in the names of ranges that cover only a part of a step, or that belong to another loop."""


@dataclass(frozen=True, kw_only=True)
class StepRange:
    """A range that may be a step."""

    family: str
    start_ns: int
    end_ns: int
    thread: tuple[int | str, int | str]

    @staticmethod
    def of(
        name: str, start_ns: int, end_ns: int, thread: tuple[int | str, int | str], step: int | None
    ) -> Iterator[StepRange]:
        """Yield the range if its name or its format marks it as a step."""
        words = [word.lower() for word in _WORD.findall(name)]
        if step is None and (not _STEPS.intersection(words) or _PARTS.intersection(words)):
            return
        if end_ns > start_ns:
            yield StepRange(family=" ".join(words), start_ns=start_ns, end_ns=end_ns, thread=thread)


def chosen_steps(ranges: Sequence[StepRange]) -> list[StepRange]:
    """Return the steps of the training loop in order; empty if no range is a step."""
    families: defaultdict[tuple[object, str], list[StepRange]] = defaultdict(list)
    for one in ranges:
        families[one.thread, one.family].append(one)
    if not families:
        return []
    # A range around the whole loop would be a single step: several come first.
    found = max(families.values(), key=lambda own: (len(own) > 1, sum(one.end_ns - one.start_ns for one in own)))
    return sorted(found, key=lambda one: one.start_ns)
