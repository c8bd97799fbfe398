"""Writes the reference pages that list what the code has.

    python docs/generate.py            writes them
    python docs/generate.py --check    status 1 where one is not what the code says

What a table cannot take from the code (the source of a threshold, the cause of a failure) stands here, by
name; a name that is missing or left over is an error, so that it cannot be forgotten.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import typer
from pydantic_core import PydanticUndefined

from steptune.service.app import create_app
from steptune.service.cli.console import INTERRUPTED
from steptune.service.cli.main import USER_ERROR, application
from steptune.service.described import MACHINES, WORKLOADS
from steptune.service.settings import Settings
from steptune.tuner.costs.categories import CATEGORIES, GROUPS
from steptune.tuner.profiling.compile_findings import COMPILE_RULES
from steptune.tuner.profiling.diagnosis import RULES
from steptune.tuner.profiling.evidence import RECURRING, UNPACED
from steptune.tuner.profiling.quality import PROBLEMS
from steptune.tuner.profiling.rank_findings import SKEW_THRESHOLDS
from steptune.tuner.profiling.rules.input import BUSY
from steptune.tuner.profiling.rules.rule import Rule
from steptune.tuner.profiling.stall_findings import STALL_ADVICE, STALL_THRESHOLDS
from steptune.tuner.profiling.stalls import LEAST_NS, MOST_NS, PACES
from steptune.tuner.records import (
    Choice,
    FailureKind,
    Scalar,
    choice_label,
)
from steptune.tuner.strategies import STRATEGIES, Strategy, Unsupported
from steptune.tuner.strategies.combine import CONFLICTS, DROPPED, TOGETHER

DOCS = Path(__file__).parent
ROOT = DOCS.parent
NOTE = "<!-- Written by `python docs/generate.py` from the code. Change that, then run it again. -->"


# --- categories -------------------------------------------------------------------------------

CATEGORIES_TEXT = """\
# Categories of a step's time

Every nanosecond of a step belongs to exactly one category, and the categories sum to the step. Where several would
fit, the one that stands first in this table wins: compute before communication, communication before copies. Only
time in which the device does nothing is a gap; it is blamed on what the host was doing. On a CPU the host is the
device: an operator's own time, without the operators inside it, counts for its class, and what no operator covers
is `host`.

Categories of the host (last column) are what a profiler makes longer. In a trace with device work they are
shrunk so that the sum is the step as measured without the profiler; in a trace of a CPU all categories are, but
for `data_wait` and `epoch_restart`.
"""


def categories() -> str:
    rows = [
        (str(number), f"`{info.category.value}`", info.group, info.title, info.counts, "host" if info.host else "")
        for number, info in enumerate(CATEGORIES, 1)
    ]
    table = _table(("", "category", "group", "title", "counts", ""), rows)
    groups = _table(
        ("group", "categories"),
        [(g, ", ".join(f"`{i.category.value}`" for i in CATEGORIES if i.group == g)) for g in GROUPS],
    )
    return f"{CATEGORIES_TEXT}\n{table}\n\n## Groups\n\nWhat people see first.\n\n{groups}"


# --- diagnosis --------------------------------------------------------------------------------

DIAGNOSIS_TEXT = """\
# Diagnosis

What limits a step, from its [breakdown](reference/categories.md). A rule adds up the shares of its categories in the
step. From the first threshold on it fires as a note, from the second as a warning, from the third as high. Unless a
rule states a lower limit, the maximum saving is that share; of communication, only the part that held compute up
counts. A larger bound than the share is refused. Findings of which a replay states the gain come first, the largest
before others; then those that only bound one, by their bound: nothing says how much of it would be saved. A rank that
comes late stands before what its peers compute and wait for; only launches that cost all ranks more come before it.
Launches cost something throughout the step, so launch_bound follows a cause at one place unless its gain is more than
5 % larger. Where stalls in every step pace it, or waits for batches of which more is saved, those have to go first: it
follows them, and stands before what saves less ([why](decisions/0046-stated-gains-first.md),
[and](decisions/0054-launches-beside-late-ranks.md)).

Seven rules state a gain that is replayed, not a share of categories: input_bound, launch_bound, synchronisation,
allocation, host_stall, extra_work and rank_skew. The recorded steps are simulated on the graph of their dependencies
without that cause ([why](decisions/0034-replay.md)), and the saved share is compared with the thresholds. The bound is
that share and two points of the step: nine in ten replays of simulated pairs miss the truth by less. The evidence says
"replayed", or, where the steps cannot be replayed, a range from none to the share of the categories, and why: fewer
than two steps, launches or events that are not recorded, a replay that misses the recorded step by more than 5 %,
first steps (only those of a long window are simulated) whose waits or stalls differ from those of all steps by more
than two points of the step, or that do not show the cause. A replay that misses the unprofiled step by more than 5 %
gives its gain as a range, more or less so much, and at most the time in which the device does not compute. The gain of
launch_bound is the cost of launches where stalls, waits and batches are gone, of several ranks in all of them at once
and without late ones; its bound is the gain of a CUDA graph where they stay, if that is larger. Each gain is of one
cause alone.

Gains of two causes do not add up; claims do. In their order, each finding claims what it saves once those before it are
mended, simulated without all of them; one that only its categories bound claims what is left of those, and all together
no more of waiting than the device waits ([why](decisions/0061-claims.md)). Where a claim is another figure than
the gain alone, the finding says both.

Nothing is advised that is already on: each remedy below says when it is left out, and a rule without a remedy left
finds nothing. What is on is read from the trace, and of a trial also from its choices: compilation, CUDA graphs, the
implementation of the optimizer, worker processes of the loader, pinned memory, copies on a stream of their own, the
arithmetic of matmuls (by the recorded types of arguments, else by names of kernels that state it), the layout of
convolutions, activation checkpointing, and what the device can do. `steptune analyze` and `steptune profile` print
it as "already on". What a trace does not say is unknown, and advice that depends on it is withheld.

Advice on how to record is for traces of other programs only; of a profile that Steptune recorded itself, the advice
is what can be done about it.

The evidence of a finding is the time of each of its categories, in milliseconds per step; of an analysed trace also
where it happens: the longest gaps blamed on it, with the operator and the line of code where call stacks were recorded,
and the longest kernels.
"""

THRESHOLD_SOURCES = {
    "input_bound": "5 %: torch-tb-profiler, for the share of the DataLoader. 10 %: XProf, for input. 20 %: "
    'TensorFlow\'s input-pipeline analysis ("highly input-bound").',
    "exposed_copies": "Our own.",
    "launch_bound": "2 %: our own, as of other replayed gains. 10 %: XProf, for a core that idles. 30 %: our own.",
    "python_bound": "Our own.",
    "synchronisation": "Our own.",
    "allocation": "Our own.",
    "blocked": "Our own.",
    "exposed_communication": "5 %: our own. 10 %: torch-tb-profiler. 30 %: XProf, for collectives.",
    "pipeline_bubble": "Those of exposed communication.",
    "recomputation": "Our own.",
    "optimizer": "Our own.",
    "unfused": "Our own.",
    "layout_conversions": "Our own: 13 to 18 % of a ResNet's step were measured.",
    "single_precision": "Our own. That eligible work does not use tensor cores is a rule of torch-tb-profiler and of "
    "torch.profiler's pattern matcher, which have no threshold.",
    "idle_tensor_cores": "Those of single_precision.",
    "inefficient_compute": "Our own.",
    "extra_work": "Our own; the steps have 20 % more operations than the median one.",
    "unsteady_steps": "10 %: our own; SageMaker's rules call a step an outlier beyond three standard deviations.",
    "memory_nearly_full": "90 %: torch-tb-profiler and gpuprof. 97 %: gpuprof. 85 %: our own.",
}

CONDITIONS = {
    "_products_would_pay": "The incumbent computes in FP32, and the measured peak of bfloat16, float16 or TF32 is more "
    "than 1.5 times that of FP32.",
    "_tensor_cores_idle": "In an analysed trace, less than a tenth of the time in matrix kernels uses tensor cores, "
    "and names of kernels or types of arguments state that most of it is FP32.",
    "_far_from_roofline": "Compute takes more than three times its roofline (unknown peaks: the rule does not fire).",
}


MEASURES = {
    "_step_variation": "the standard deviation of the steps' times over their mean, in a trace of another program. It "
    "bounds no gain.",
    "_extra_share": "compute of steps with more operations, beyond that of the others: a part of the categories.",
    "_converting": "the time of kernels that convert layouts, which is part of the category.",
    "_memory_filled": "the allocator's reserved peak over the device's memory, where the trace records memory. It "
    "bounds no gain.",
}

CAUSES = {
    "exposed_communication": "`network`, where several ranks were analysed and some of the communication is waiting "
    "for a late rank: that is rank_skew's, and left out here. `overlapped`, where at least a fifth of the "
    "communication overlaps with compute already.",
    "exposed_copies": "`pinned`, where most of what is copied to the device comes from pinned memory already.",
    "input_bound": "`restart`, where starting epochs takes more than waiting for batches. Of a trial, where the "
    f"processes that make batches were watched: `preprocessing`, where they compute or queue for a core at least "
    f"{BUSY:.0%} of their time, else `storage` (they sleep: a disk, a network, a lock). `workers`, where a trace shows "
    "worker processes. Each has its own advice and strategies.",
    "synchronisation": "`kernels`, where a part of the loss waits that a fused kernel computes without: an assignment "
    "of boxes, image by image.",
    "unfused": "`kernels`, where fused kernels can compute a part of it, and do not yet.",
}


def diagnosis() -> str:
    _same("THRESHOLD_SOURCES", THRESHOLD_SOURCES, [rule.name for rule in RULES])
    unconditional = next(f.default for f in fields(Rule) if f.name == "applies")
    conditions = {rule.name: rule.applies.__name__ for rule in RULES if rule.applies is not unconditional}
    _same("CONDITIONS", CONDITIONS, conditions.values())
    overview = _table(
        ("rule", "note", "warning", "high", "on"),
        [(f"[{r.name}](#{r.name})", *map(_percent, r.thresholds), " and ".join(r.devices)) for r in RULES],
    )
    sections = [_rule(rule, CONDITIONS.get(conditions.get(rule.name, ""))) for rule in RULES]
    capture = (
        "## bad_capture\n\nWhere a profile cannot be trusted, this is the only finding, with what to do about it:\n\n"
        + _table(
            ("problem", "when", "advice", "of Steptune's own profiles"),
            [(problem.name, problem.when, problem.advice, problem.own_advice) for problem in PROBLEMS],
        )
    )
    skew = (
        "## rank_skew\n\nOf several ranks together: while nothing is computed, a rank waits in collectives for one "
        f"that has not arrived yet, for at least {', '.join(map(_percent, SKEW_THRESHOLDS))} of its step (note, "
        "warning, high: our own). What a call takes beyond the rank on which it is shortest is waiting, at its "
        "beginning; the rest of "
        "exposed communication is the network's, and is all that exposed_communication then speaks of. The rank that "
        "waits least is the one that the others wait for. It is named before what its peers "
        "compute.\n\nAdvice: balance the ranks' work and data; buckets would "
        "not help."
    )
    stall = (
        "## host_stall\n\nThe host launches nothing (on a CPU: runs no operator) for much longer than between two "
        "launches, and the device waits: a sleep, a lock, garbage collection, a checkpoint, a Python loop. That is no "
        f"dispatch, so launch_bound and python_bound leave it out. A stall lasts more than {PACES} times the median "
        f"time between two launches, at least {LEAST_NS / 1e6:g} ms and whatever lasts {MOST_NS / 1e6:g} ms. "
        f"Thresholds: {', '.join(map(_percent, STALL_THRESHOLDS))} of the step (note, warning, high: our own). Stalls "
        f"in less than {_percent(RECURRING)} of the steps cost the mean share that they take of all; the message names "
        "them. A stall in one of several steps is a note: nothing says that it comes again.\n\nThe "
        "message names the shortest recorded event that covers most of the longest stall. Its name may say what the "
        f"stall is ({', '.join(STALL_ADVICE)}), each with advice of its own. Without an event, the advice is "
        "to record call stacks: nothing else in a trace tells the causes apart."
    )
    compiled = [
        f"## {rule.name}\n\nOf a trial that compiles, from TorchDynamo's own records. It bounds no gain.\n\n"
        f"- Says: {rule.message.format(count='…')}\n- Advice: {rule.advice}"
        for rule in COMPILE_RULES
    ]
    return f"{DIAGNOSIS_TEXT}\n{overview}\n\n" + "\n\n".join([*sections, stall, skew, *compiled, capture])


def _rule(rule: Rule, condition: str | None) -> str:
    strategies = (
        ", ".join(f"[{name}](strategies/{name}.md)" for name in rule.strategies) or "none: a change of your code"
    )
    lines = [
        f"- Says: {rule.message.format(share='…')}",
        *([f"- Says, replayed: {rule.replayed_message.format(share='…')}"] if rule.replayed else []),
        *(
            [
                f"- Says, where stalls and waits for batches are at least {UNPACED:.0%} of the device's waits for the "
                "host, and stalls are in every step or more than launches is saved without them, as a note after "
                f"those: {rule.aside_message.format(share='…')}"
            ]
            if rule.aside_message
            else []
        ),
        *([f"- Adds up: {', '.join(f'`{c.value}`' for c in rule.categories)}"] if rule.categories else []),
        *([f"- Compares: {MEASURES[rule.measure.__name__]}"] if rule.measure else []),
        *([f"- Causes: {CAUSES[rule.name]}"] if rule.name in CAUSES else []),
        *([f"- Only where: {condition[0].lower()}{condition[1:]}"] if condition else []),
        *_remedies(rule),
        *([f"- Could save at most {rule.reach:.0%} of that share"] if rule.reach < 1 else []),
        f"- Strategies that act on it: {strategies}",
        f"- Thresholds: {THRESHOLD_SOURCES[rule.name]}",
    ]
    return f"## {rule.name}\n\n" + "\n".join(lines)


def _remedies(rule: Rule) -> list[str]:
    said = [f"{r.advice}{f' (not where {r.unless})' if r.unless else ''}" for r in rule.remedies]
    return [f"- Advice: {said[0]}"] if len(said) == 1 else ["- Advice:", *(f"    - {text}" for text in said)]


# --- errors -----------------------------------------------------------------------------------

ERRORS_TEXT = """\
# Errors and exit statuses

Every error that is meant for a person is a `SteptuneError`, which is a `ValueError`. Its message names what was
violated, the value that was found, and the way out. The command line prints it without a traceback (`--debug` shows
it) and ends with status {user}.
"""

STATUSES_TEXT = """\
## Exit statuses of `steptune`

| status | when |
|---|---|
| 0 | done; "no significant gain" is an answer, not a failure |
| 1 | `doctor` found a problem, or a network that could not all be examined; `verify` found that the losses differ |
| {user} | one of the errors above, or a command line that cannot be read |
| {interrupted} | interrupted (Ctrl-C or SIGTERM) before there was an answer |
"""

FAILURES_TEXT = """\
## Failures of a trial

A trial that fails is a result, not an error: the study goes on. The kind comes from exceptions and exit statuses,
never from searching a log, and is stored with the phase (`build`, `guard`, `warm_up`, `measure`, `profile`,
`report`) and the message.
"""

FAILURES = {
    FailureKind.OUT_OF_MEMORY: "memory ran out, on the device or (by the trial's memory limit) on the CPU",
    FailureKind.UNSUPPORTED: "the choice turned out to be impossible here, or the compiler failed on the model",
    FailureKind.NUMERICS: "the loss is not finite",
    FailureKind.TIMEOUT: "a phase took longer than its deadline",
    FailureKind.CRASH: "a process of the trial was ended by a signal, or ended by itself; the signal is stored",
    FailureKind.WORKLOAD_ERROR: "the workload's own code raised an exception",
    FailureKind.INFRASTRUCTURE: "Steptune's own machinery failed",
}


def error_classes() -> list[tuple[str, ast.ClassDef]]:
    """The public errors of all packages with their modules, a base before what derives from it.

    They are read, not imported: a module may need a library that is not installed.
    """
    classes = [
        (".".join(path.relative_to(ROOT).with_suffix("").parts), node)
        for package in ("tuner", "service", "dashboards", "kernels")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    found: list[tuple[str, ast.ClassDef]] = []
    known = {name for name, kind in vars(builtins).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    while new := [(place, c) for place, c in classes if (place, c) not in found and known.intersection(_bases(c))]:
        found += new
        known |= {c.name for _, c in new}
    return found


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).rpartition(".")[2] for base in node.bases]


def errors() -> str:
    _same("FAILURES", FAILURES, FailureKind)
    rows = [
        (f"`{c.name}`", f"`steptune.{place}`", f"`{_bases(c)[-1]}`", (ast.get_docstring(c) or "").split("\n\n")[0])
        for place, c in error_classes()
    ]
    return "\n".join(
        [
            ERRORS_TEXT.format(user=USER_ERROR),
            _table(("class", "module", "is a", "when"), rows) + "\n",
            STATUSES_TEXT.format(user=USER_ERROR, interrupted=INTERRUPTED),
            FAILURES_TEXT,
            _table(("kind", "when"), [(f"`{kind.value}`", FAILURES[kind]) for kind in FailureKind]),
        ]
    )


# --- settings ---------------------------------------------------------------------------------

SETTINGS_TEXT = """\
# Settings

Read from the environment, or from a file `.env` in the current folder. All have usable defaults; a command's option
wins over the setting; `steptune serve` has one for each that is no secret.
"""


def settings() -> str:
    rows = []
    for name, field in Settings.model_fields.items():
        default = "required" if field.default is PydanticUndefined else f"`{_shown(field.default)}`"
        meaning = field.description
        assert meaning, f"Settings.{name} has no description"
        rows.append((f"`{_prefix()}{name.upper()}`", default, meaning))
    return f"{SETTINGS_TEXT}\n{_table(('variable', 'default', 'meaning'), rows)}"


def _prefix() -> str:
    return str(Settings.model_config.get("env_prefix", "")).upper()


# --- strategies -------------------------------------------------------------------------------

STRATEGIES_TEXT = """\
# Strategies and their choices

As the code has them. What each strategy does, and when it helps or hurts, is on [its page](../strategies/README.md).

The tables list the choices that a search considers where PyTorch's defaults run today, judged for four machines (a
CPU with 8 cores, one GPU, four GPUs of one host, two hosts of four) and these workloads: {workloads}. "Legal on" names
the machines on which at least one of the workloads can have the choice, "needs" why other machines and workloads
cannot. `steptune strategies` says what is tried on your machine, and `steptune strategies --workload ...` for your
workload.
"""


def strategies() -> str:
    names = ", ".join(facts.name for facts in WORKLOADS)
    parts = [
        STRATEGIES_TEXT.format(workloads=names),
        *(_strategy(strategy) for strategy in STRATEGIES),
        _combinations(),
    ]
    return "\n".join(parts).rstrip()


def _strategy(strategy: Strategy) -> str:
    parameters = _table(
        ("parameter", "values", "default"),
        [
            (f"`{name}`", ", ".join(map(_value, strategy.values[name])), _value(default))
            for name, default in strategy.defaults.items()
        ],
    )
    attacks = ", ".join(f"`{c.value}`" for c in strategy.attacks) or "no time"
    return "\n".join(
        [
            f"## [{strategy.name}](../strategies/{strategy.name}.md)\n",
            f"*{strategy.summary}*\n",
            f"Attacks: {attacks}{'; saves memory' if strategy.memory else ''}.\n",
            parameters + "\n",
            _table(("choice", "numerics", "legal on", "needs: refused elsewhere because"), _tried(strategy)) + "\n",
        ]
    )


def _tried(strategy: Strategy) -> list[tuple[str, ...]]:
    """Every choice that differs from the defaults, where it is legal, and why elsewhere it is not."""
    verdicts: dict[str, tuple[Choice, dict[tuple[str, str], str]]] = {}
    for machine, environment in MACHINES.items():
        for facts in WORKLOADS:
            for choice in strategy.choices(environment, facts):
                difference = strategy.difference(choice, facts)
                if difference:
                    support = strategy.supports(choice, environment, facts)
                    refusal = support.reason if isinstance(support, Unsupported) else ""
                    verdicts.setdefault(choice_label(difference), (choice, {}))[1][machine, facts.name] = refusal
    return [(label, strategy.numerics(choice).value, *_where(found)) for label, (choice, found) in verdicts.items()]


def _where(refusals: Mapping[tuple[str, str], str]) -> tuple[str, str]:
    """The machines on which a choice is legal, and the refusals elsewhere, each once: first those of other machines,
    then those of other workloads where it is legal. One that only says what runs today is left out.
    """
    legal = list(dict.fromkeys(machine for (machine, _), refusal in refusals.items() if not refusal))
    elsewhere = [refusal for (machine, _), refusal in refusals.items() if refusal and machine not in legal]
    beside = [refusal for (machine, _), refusal in refusals.items() if refusal and machine in legal]
    reasons = [r for r in dict.fromkeys([*elsewhere, *beside]) if not r.startswith("already ")]
    return ", ".join(legal), "; ".join(reasons)


def _combinations() -> str:
    conflicts = [(", ".join(row.strategies), row.reason) for row in CONFLICTS]
    dropped = [(row.setting.strategy, ", ".join(f"`{p}`" for p in row.parameters), row.reason) for row in DROPPED]
    together = [(", ".join(row.strategies), row.reason) for row in TOGETHER]
    return "\n".join(
        [
            "## Combinations\n",
            "Some choices of these strategies cannot be run together:\n",
            _table(("strategies", "reason"), conflicts) + "\n",
            "Parameters that mean nothing in a combination, and are dropped from a candidate:\n",
            _table(("strategy", "parameters", "when"), dropped) + "\n",
            "Tried at once:\n",
            _table(("strategies", "reason"), together),
        ]
    )


def _value(value: Scalar | range) -> str:
    return f"{value[0]} … {value[-1]}" if isinstance(value, range) else f"`{value}`"


# --- the command line -------------------------------------------------------------------------

COMMANDS_TEXT = """\
# Command line

Results go to standard output, everything else to standard error. With `--json` a result is one JSON document. Exit
statuses are listed under [errors](errors.md#exit-statuses-of-steptune), variables under [settings](settings.md).
Every command has `--help`, or `-h`.
"""


def command_line() -> str:
    root: Any = typer.main.get_command(application())
    return "\n".join([COMMANDS_TEXT, *_command("steptune", root)]).rstrip()


def _command(name: str, command: Any) -> list[str]:
    """A section for a command, then those of the commands below it."""
    shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option" and "completion" not in p.name]
    below = getattr(command, "commands", {})
    usage = [
        name,
        *(["[OPTIONS]"] if options else []),
        *(p.metavar if p.required else f"[{p.metavar}]" for p in arguments),
        *(["COMMAND"] if below else []),
    ]
    lines = [f"## {name}\n", f"    {' '.join(usage)}\n", f"{_sentence(command.help)}\n"]
    if arguments:
        lines.append(_table(("argument", "default", "meaning"), [_parameter(p, p.metavar) for p in arguments]) + "\n")
    if options:
        rows = [_parameter(p, ", ".join([*p.opts, *p.secondary_opts])) for p in options]
        lines.append(_table(("option", "default", "meaning"), rows) + "\n")
    for child_name, child in below.items():
        if not getattr(child, "hidden", False):
            lines += _command(f"{name} {child_name}", child)
    return lines


def _parameter(parameter: Any, written: str) -> tuple[str, str, str]:
    is_flag = getattr(parameter, "is_flag", False)
    is_option = parameter.param_type_name == "option"
    value = f" {parameter.metavar or 'VALUE'}" if is_option and not is_flag else ""
    default = parameter.default
    has_default = getattr(parameter, "show_default", True) and not is_flag and default is not None
    default = default() if callable(default) else default
    meaning = _sentence(parameter.help) + (" May be given several times." if parameter.multiple else "")
    return f"`{written}{value}`", f"`{_shown(default)}`" if has_default and not parameter.required else "", meaning


# --- the REST interface -------------------------------------------------------------------------


def openapi() -> str:
    """Document of an application whose database is never opened."""
    app = create_app(Settings(_env_file=None, database_url="sqlite://"))
    return msgspec.json.format(msgspec.json.encode(app.openapi()), indent=1).decode()


# --- Markdown ---------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _summary(documented: type) -> str:
    """The first paragraph of a docstring."""
    return inspect.cleandoc(documented.__doc__ or "").split("\n\n")[0]


def _sentence(text: str | None) -> str:
    joined = " ".join((text or "").split())
    return joined if not joined or joined.endswith((".", "?", "!")) else f"{joined}."


def _shown(default: Any) -> str:
    if isinstance(default, Path | str):
        return str(default)
    return msgspec.json.encode(default).decode()


def _same(table: str, written: Mapping[Any, str], wanted: Iterable[Any]) -> None:
    """Check that a table written by hand covers what the code has, and nothing else."""
    differing = sorted(map(str, set(written) ^ set(wanted)))
    assert not differing, f"{table} in docs/generate.py and the code differ in {', '.join(differing)}"


# --- all --------------------------------------------------------------------------------------

PAGES: dict[str, Callable[[], str]] = {
    "diagnosis.md": diagnosis,
    "reference/categories.md": categories,
    "reference/command-line.md": command_line,
    "reference/errors.md": errors,
    "reference/openapi.json": openapi,
    "reference/settings.md": settings,
    "reference/strategies.md": strategies,
}


def written(page: str) -> str:
    """The text of a page as it should be."""
    text = PAGES[page]().rstrip()
    return f"{text}\n" if page.endswith(".json") else f"{NOTE}\n\n{text}\n"


def stale() -> list[str]:
    """Pages that are not what the code says, or not there."""
    return [name for name in PAGES if not (DOCS / name).exists() or (DOCS / name).read_text() != written(name)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the reference pages that list what the code has.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where a page is stale")
    check = parser.parse_args().check
    old = stale()
    for name in old:
        if not check:
            (DOCS / name).parent.mkdir(exist_ok=True)
            (DOCS / name).write_text(written(name))
        sys.stdout.write(f"docs/{name} {'is stale: run `python docs/generate.py`' if check else 'written'}\n")
    sys.exit(1 if check and old else 0)


if __name__ == "__main__":
    main()
