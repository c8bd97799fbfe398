"""The roofline of a profile, as sentences and table rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from steptune.dashboards import units
from steptune.tuner.records import Breakdown
from steptune.tuner.trace_records import Roofline, RooflineRow

KINDS = ("operators", "kernels", "modules")


class RooflineLine(NamedTuple):
    """Roofline of one operator, kernel or module, per step."""

    name: str
    shapes: str
    module: str
    above_ns: float
    time_ns: float
    floor_ns: float
    reached: float
    """Floor (least possible time) as a share of the time taken."""
    limit: str
    calls: float
    saved: float | None
    """Share of the step that would be saved if this operator, kernel or module ran at its floor; None where that was
    not simulated.
    """


class RooflineInfo(NamedTuple):
    """Roofline section of a rendered page: its tables, and a `note` that explains the values or says why there are
    none.
    """

    note: str
    tables: tuple[tuple[str, tuple[RooflineLine, ...]], ...]


def get_utilisation(found: Sequence[Roofline | None]) -> str:
    """State the model FLOPs utilisation, averaged over the ranks; empty if it is unknown for any rank."""
    known = [(one.mfu, one.step_flops) for one in found if one is not None and one.mfu is not None and one.step_flops]
    if not known or len(known) < len(found):
        return ""
    mfu = sum(share for share, _ in known) / len(known)
    flops = units.amount(sum(count for _, count in known) / len(known), "FLOP")
    each = " and rank" if len(known) > 1 else ""
    return f"MFU {units.percent(mfu)}: {flops} of matmuls, convolutions and attention per step{each}"


def get_roofline_info(roofline: Roofline | None, breakdowns: Sequence[Breakdown], top: int) -> RooflineInfo | None:
    """Return the roofline section, with the rows furthest above the floor first. Return None for a CPU, whose peak is
    unknown, and for older records.
    """
    if roofline is None or all(breakdown.device == "cpu" for breakdown in breakdowns):
        return None
    num_steps = breakdowns[0].num_steps
    tables = tuple((kind, _lines(getattr(roofline, kind)[:top], num_steps)) for kind in KINDS)
    return RooflineInfo(note=_note(roofline), tables=tuple(table for table in tables if table[1]))


def _note(roofline: Roofline) -> str:
    if not roofline.operators and roofline.silent:
        return f"No roofline is available: {roofline.silent}."
    if not roofline.peak_known:
        return f"No roofline is available: the peaks of {roofline.device or 'this device'} are unknown."
    known = (
        ""
        if roofline.known_share is None
        else f" {units.percent(roofline.known_share)} of the kernel time has a floor."
    )
    missing = f" The MFU is unknown: {roofline.silent}." if roofline.silent else ""
    return (
        "Floor: the minimum time for a kernel's FLOP and bytes at the device's peaks, which kernels seldom reach. "
        "Saves: the share of the step that running the kernel at its floor would save, according to a replay."
        f"{known}{missing}"
    )


def _lines(rows: Sequence[RooflineRow], num_steps: int) -> tuple[RooflineLine, ...]:
    return tuple(
        RooflineLine(
            name=units.kernel_name(row.name),
            shapes=row.shapes,
            module=row.module,
            above_ns=row.above_ns / num_steps,
            time_ns=row.time_ns / num_steps,
            floor_ns=row.floor_ns / num_steps,
            reached=row.floor_ns / row.time_ns if row.time_ns else 0.0,
            limit=row.limit,
            calls=row.count / num_steps,
            saved=row.saved_share,
        )
        for row in rows
    )
