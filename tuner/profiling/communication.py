"""Device operations that communicate, with the collective that the trace records for each."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from steptune.tuner.costs.categories import is_communication
from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.trace import Kind, Trace

ANNOTATIONS = r"^(gloo|nccl|mpi|ucc|xccl|rccl):"
NAMES = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "sendrecv": "send_recv",
    "batchisendirecv": "send_recv",
    "send": "send",
    "recv": "recv",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
"""Names of collectives by a substring without underscores; the first match counts."""
POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})
NO_RECORD = -1


def collective_name(name: str) -> str:
    """Return one name for all spellings of a collective ("_allgather_base", "ncclDevKernel_AllGather_RING")."""
    plain = re.sub(r"[_\W]", "", name).lower()
    return next((found for part, found in NAMES.items() if part in plain), name)


def collective_records(trace: Trace) -> Ints:
    """Return the index in `trace.collectives` for every row of `trace.work`, or -1.

    New traces repeat the record on the kernel itself; older ones have it on the host call only, whose
    external id the kernel carries.
    """
    found = np.full(len(trace.work), NO_RECORD, dtype=np.int64)
    records = trace.collectives
    by_host = [(record.external, number) for number, record in enumerate(records) if record.correlation < 0]
    by_kernel = [(record.correlation, number) for number, record in enumerate(records) if record.correlation >= 0]
    _look_up(found, trace.work.external, by_host)
    _look_up(found, trace.work.correlation, by_kernel)
    return found


def _look_up(found: Ints, keys: Ints, table: list[tuple[int, int]]) -> None:
    table = sorted((key, number) for key, number in table if key >= 0)
    if not table:
        return
    known, numbers = (np.array(column, dtype=np.int64) for column in zip(*table, strict=True))
    position = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    matches = known[position] == keys
    found[matches] = numbers[position[matches]]


def communicates(trace: Trace, records: Ints) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return masks over `trace.work`: operations that communicate, and those that do so between two ranks only."""
    work = trace.work
    by_name = np.array([is_communication(name) for name in trace.names], dtype=bool)
    communication = (by_name[work.name] & (work.kind == Kind.KERNEL)) | (records >= 0)
    pair_records = np.array([collective_name(r.name) in POINT_TO_POINT for r in trace.collectives], dtype=bool)
    pairs = np.zeros(len(work), dtype=bool)
    pairs[records >= 0] = pair_records[records[records >= 0]]
    send_receive = trace.names_matching("SendRecv")[work.name]
    if trace.names_matching(r"^nccl:(send|recv)").any() and not trace.names_matching(r"^nccl:all_?to_?all").any():
        pairs |= send_receive & (records < 0)
    return communication, pairs & communication
