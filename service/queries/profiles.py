"""Measurements of a trial: windows, breakdown, kernels, gaps, collectives, findings, guard."""

from __future__ import annotations

import functools
from typing import Any

from sqlalchemy import Engine, Integer, Select, bindparam, select

from steptune.service.connections import querying
from steptune.service.messages import BreakdownCategory, DeviceBreakdown, TrialBreakdown
from steptune.service.models import BreakdownRow, CollectiveStatsRow, FindingRow, GapStatsRow, KernelStatsRow, TrialRow
from steptune.service.queries.packed import packed_rows
from steptune.service.queries.stored import parts_of, stored, value_of
from steptune.tuner.profiling.diagnosis import BAD_CAPTURE

NumberedRow = type[KernelStatsRow] | type[GapStatsRow] | type[CollectiveStatsRow] | type[FindingRow]


def list_numbered(
    engine: Engine, kind: NumberedRow, trial_id: str, *, limit: int, after: int | None
) -> list[tuple[int, Any]]:
    """Return a trial's records of one kind (kernels, gaps, collectives or findings) with numbers above `after`, each
    with its number: up to `limit` + 1, so that the caller sees if there are more.
    """
    given = {"trial_id": trial_id, "after": -1 if after is None else after, "limit": limit + 1}
    with querying(engine) as connection:
        return [(number, stored(record)) for number, record in connection.execute(_numbered(kind), given)]


def breakdown_of(engine: Engine, trial_id: str) -> TrialBreakdown:
    """Return a trial's breakdown, read from its own table: the trial's full record contains every step, and would take
    longer to read.
    """
    by_device: dict[tuple[int, str, int], list[tuple[str, int, int | None]]] = {}
    with querying(engine) as connection:
        rows = packed_rows(connection, _BREAKDOWN, {"trial_id": trial_id})
        bad = [parts_of(record) for record in connection.scalars(_BAD_CAPTURE, {"trial_id": trial_id})]
    for rank, device, num_steps, category, ns, rescaled_ns in rows:
        by_device.setdefault((rank, device, num_steps), []).append((category, ns, rescaled_ns))
    return TrialBreakdown(
        trial_id=trial_id,
        devices=tuple(_device(*key, found) for key, found in by_device.items()),
        problems=tuple(value_of(parts["message"]) for parts in bad),
    )


def result_part(engine: Engine, trial_id: str, name: str) -> Any:
    """Return one field of a trial's result; None until there is one."""
    with querying(engine) as connection:
        result = connection.scalar(_RESULT, {"trial_id": trial_id})
    return None if result is None else parts_of(result).get(name)


# Making a statement takes longer than running it, so those of reads are made once.
_RESULT = select(TrialRow.result).where(TrialRow.trial_id == bindparam("trial_id"))
_BAD_CAPTURE = (
    select(FindingRow.record)
    .where(FindingRow.trial_id == bindparam("trial_id"), FindingRow.rule == BAD_CAPTURE)
    .order_by(FindingRow.number)
)
_BREAKDOWN = (
    select(
        BreakdownRow.rank,
        BreakdownRow.device,
        BreakdownRow.num_steps,
        BreakdownRow.category,
        BreakdownRow.ns,
        BreakdownRow.rescaled_ns,
    )
    .where(BreakdownRow.trial_id == bindparam("trial_id"))
    .order_by(BreakdownRow.rank, BreakdownRow.device, BreakdownRow.ns.desc(), BreakdownRow.category)
)


@functools.cache
def _numbered(kind: NumberedRow) -> Select[int, str]:
    return (
        select(kind.number, kind.record)
        .where(kind.trial_id == bindparam("trial_id"), kind.number > bindparam("after"))
        .order_by(kind.number)
        .limit(bindparam("limit", type_=Integer))
    )


def _device(rank: int, device: str, num_steps: int, rows: list[tuple[str, int, int | None]]) -> DeviceBreakdown:
    step_time_ns = sum(ns for _, ns, _ in rows)
    return DeviceBreakdown(
        rank=rank,
        device=device,
        num_steps=num_steps,
        step_time_ns=step_time_ns,
        categories=tuple(
            BreakdownCategory(
                category=category, ns=ns, share=ns / step_time_ns if step_time_ns else 0.0, rescaled_ns=rescaled_ns
            )
            for category, ns, rescaled_ns in rows
        ),
    )
