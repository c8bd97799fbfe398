"""Inspections of a script. An inspection records the script's steps, and leaves a frozen copy of its process, from
which trials start.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from steptune.tuner.profiling.lanes import FULL_CELLS
from steptune.tuner.records import Breakdown, ScriptFacts, WorkloadFacts
from steptune.tuner.scripts.copies import CopyError, FrozenCopy
from steptune.tuner.scripts.facts import workload_facts
from steptune.tuner.scripts.launch import Ended, ran_script
from steptune.tuner.scripts.record import ScriptRecord
from steptune.tuner.scripts.traces import analyse_script
from steptune.tuner.trace_records import TraceAnalysis

SAME_FOR_ALL = {"PYTHONHASHSEED": "0", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment variables of all inspections and trials. They make sets of strings iterate in the same order everywhere,
and keep a query for GPUs from initialising CUDA: a process with CUDA initialised cannot be forked.
"""


class Look:
    """Inspection that recorded the steps of a command.

    Args:
        analysis: Analysis of the recorded steps.
        seconds: Duration of the inspection.
        traces: Traces of these steps; deleted when the inspection is closed.
        copy: Frozen copy from which trials start; None where each trial starts the command.
        why_no_copy: Reason why there is no copy, if one was wanted.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        folder: Path,
        record: ScriptRecord,
        analysis: TraceAnalysis,
        seconds: float,
        traces: tuple[Path, ...] = (),
    ) -> None:
        self.command = command
        self.folder = folder
        self.record = record
        self.analysis = analysis
        self.seconds = seconds
        self.traces = traces
        self.copy: FrozenCopy | None = None
        self.why_no_copy = ""
        self._kept = contextlib.ExitStack()

    def keep(self, copy: FrozenCopy, kept: contextlib.ExitStack) -> None:
        """Keep a frozen copy of the script's process, from which trials start. Also keep the copy-on-write view and the
        folder that this copy needs.
        """
        self.copy, self._kept = copy, kept

    def close(self) -> None:
        """End the processes and remove the files that the inspection keeps for trials."""
        self.copy = None
        self._kept.close()

    @property
    def breakdowns(self) -> tuple[Breakdown, ...]:
        """Breakdowns of the recorded steps, of all ranks."""
        return tuple(breakdown for rank in self.analysis.ranks for breakdown in rank.breakdowns)

    @functools.cached_property
    def facts(self) -> WorkloadFacts:
        """Facts about the script, in the form that the search uses."""
        facts = workload_facts(self.command, self.record)
        return facts if self.copy is None else msgspec.structs.replace(facts, fork_spares_ns=self.copy.spared_ns)

    @property
    def script(self) -> ScriptFacts:
        """Findings of the inspection, in the form that strategies use."""
        assert self.facts.script is not None, "the facts of an inspection must include script facts"
        return self.facts.script


def look_at(
    command: tuple[str, ...],
    folder: Path,
    log: Path,
    variables: Mapping[str, str] | None = None,
    *,
    frozen_seed: int | None = None,
    longest_s: float | None = None,
    check: Callable[[], None] | None = None,
) -> tuple[Look | None, Ended]:
    """Run a command until its steps are recorded; return None instead of an inspection if they could not be recorded.

    Args:
        frozen_seed: Seed of the trials that are to start from a frozen copy of its process; `Look.close` ends the copy.
    """
    began, began_ns = time.monotonic(), time.perf_counter_ns()
    own = {} if frozen_seed is None else same_for_all()
    with contextlib.ExitStack() as stack:
        ended = stack.enter_context(
            ran_script(
                command,
                folder=folder,
                log=log,
                variables={**own, **(variables or {})},
                frozen_seed=frozen_seed,
                longest_s=longest_s,
                check=check,
            )
        )
        record = next((record for record in ended.records if record.complete), None)
        if record is None or not ended.traces:
            return None, ended
        copy, reason = None, ""
        if frozen_seed is not None:
            try:
                # It goes on importing while the traces are analysed.
                copy = FrozenCopy(ended.folder, record, began_ns, folder)
            except CopyError as error:
                reason = str(error)
        unprofiled_ns = round(record.step_time_ns) if record.step_time_ns else None
        analysis = analyse_script(ended.traces, record, unprofiled_ns, FULL_CELLS)
        look = Look(command, folder, record, analysis, time.monotonic() - began, ended.traces)
        look.why_no_copy = reason
        if copy is not None:
            look.keep(copy, stack.pop_all())
        return look, ended


def same_for_all() -> dict[str, str]:
    """Return the environment variables that inspections and trials set unless the user has set them."""
    return {name: value for name, value in SAME_FOR_ALL.items() if name not in os.environ}
