"""Findings from torch.compile's records of a trial, in addition to the findings from its profile.

None of them bounds a gain: how much a graph break costs is seen in the profile, as host time and unfused work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steptune.tuner.records import Compilation, CompilationEvent, Finding

PLACES = 3
"""Maximum number of places in the code that a finding names."""
MANY = 5
"""Minimum number of graph breaks for a warning."""


@dataclass(frozen=True, kw_only=True)
class CompileRule:
    """Rule for one kind of event in the records of a compilation.

    Attributes:
        count: Number of the events.
        severity: Severity for that count.
        message: Text shown to users; `{count}` is filled in.
        events: Place and reason of each event.
    """

    name: str
    count: Callable[[Compilation], int]
    severity: Callable[[int], str]
    message: str
    advice: str
    events: Callable[[Compilation], Sequence[CompilationEvent]]


COMPILE_RULES: tuple[CompileRule, ...] = (
    CompileRule(
        name="compiled_too_often",
        count=lambda c: c.num_given_up,
        severity=lambda count: "high",
        message="torch.compile gave up {count} times: a function was recompiled so often that it now runs uncompiled",
        advice="keep the values that the guards check (numbers on modules, lengths, flags) the same in every step, "
        "compile with dynamic shapes, or raise torch._dynamo.config.recompile_limit if each variant is used "
        "again",
        events=lambda c: c.recompilations,
    ),
    CompileRule(
        name="late_compilation",
        count=lambda c: c.late_graphs,
        severity=lambda count: "warning",
        message="{count} graphs were compiled after the warm-up, during the measured steps",
        advice="use few distinct batch shapes (pad or bucket the batches), or compile with dynamic shapes",
        events=lambda c: c.recompilations,
    ),
    CompileRule(
        name="graph_breaks",
        count=lambda c: c.num_graph_breaks,
        severity=lambda count: "warning" if count >= MANY else "note",
        message=(
            "the compiled graph is broken {count} times: operators are not fused across a break, and Python runs "
            "in between"
        ),
        advice=(
            "in the model's forward pass, avoid prints, reads of tensor values and calls that TorchDynamo does not "
            "support"
        ),
        events=lambda c: c.graph_breaks,
    ),
    CompileRule(
        name="cudagraphs_skipped",
        count=lambda c: c.num_cudagraph_skips,
        severity=lambda count: "warning",
        message="{count} compiled graphs run without the CUDA graphs that their mode asks for",
        advice="remove the cause that torch.compile reports, or compile in the default mode, which uses no CUDA graphs",
        events=lambda c: c.cudagraph_skips,
    ),
)


def diagnose_compilation(compilation: Compilation | None) -> tuple[Finding, ...]:
    """Return the findings of a trial's compilation; none if nothing was compiled."""
    if compilation is None:
        return ()
    return tuple(_finding(rule, compilation, count) for rule in COMPILE_RULES if (count := rule.count(compilation)))


def _finding(rule: CompileRule, compilation: Compilation, count: int) -> Finding:
    places = [f"{event.place}: {event.reason}".removeprefix(": ") for event in rule.events(compilation)[:PLACES]]
    return Finding(
        rule=rule.name,
        severity=rule.severity(count),
        message=rule.message.format(count=count),
        advice=rule.advice,
        strategies=(),
        bound=0.0,
        evidence={"count": count, **{f"at_{number}": place for number, place in enumerate(places, 1)}},
    )
