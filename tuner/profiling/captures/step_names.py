"""Steps of other profilers' captures: ranges whose name says so.

A name is taken apart into words ("train_step 12", "ProfilerStep#3", "[pl]run_training_batch"). Of several families of
such ranges on several threads (the iteration, a step inside of it), the one that covers the most time is the loop's.
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
"""Words of ranges that are a part of a step, or another loop."""


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
        """The range, if its name or its format says that it is one."""
        words = [word.lower() for word in _WORD.findall(name)]
        if step is None and (not _STEPS.intersection(words) or _PARTS.intersection(words)):
            return
        if end_ns > start_ns:
            yield StepRange(family=" ".join(words), start_ns=start_ns, end_ns=end_ns, thread=thread)


def chosen_steps(ranges: Sequence[StepRange]) -> list[StepRange]:
    """Steps of the loop, in their order; empty where no range is one."""
    families: defaultdict[tuple[object, str], list[StepRange]] = defaultdict(list)
    for one in ranges:
        families[one.thread, one.family].append(one)
    if not families:
        return []
    # A range around the whole loop would be a single step: several come first.
    found = max(families.values(), key=lambda own: (len(own) > 1, sum(one.end_ns - one.start_ns for one in own)))
    return sorted(found, key=lambda one: one.start_ns)
