"""The events of a trace file, decoded to typed objects.

Kineto's fields and their traps:

* `pid` and `tid` can be integers or strings within one file.
* The id that links an operator to its kernels is spelt "External id" or "external id".

The module `times` converts times, `columns` makes columns of events.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

NO_RAW = msgspec.Raw(b"")


class Args(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename={
        "external": "External id",
        "external_old": "external id",
        "num_bytes": "bytes",
        "occupancy": "est. achieved occupancy %",
        "blocks_per_sm": "blocks per SM",
        "graph_node": "graph node id",
        "sequence": "Sequence number",
        "forward_thread": "Fwd thread id",
        "dims": "Input Dims",
        "types": "Input type",
        "values": "Concrete Inputs",
        "call_stack": "Call stack",
        "collective": "Collective name",
        "in_elements": "In msg nelems",
        "out_elements": "Out msg nelems",
        "group_size": "Group size",
        "group_name": "Process Group Name",
        "collective_sequence": "Seq",
        "total_allocated": "Total Allocated",
        "total_reserved": "Total Reserved",
        "address": "Addr",
        "block_bytes": "Bytes",
        "device_id": "Device Id",
        "device_type": "Device Type",
    },
):
    """Event arguments that Steptune reads. A default value means that the argument was not recorded."""

    correlation: int = -1
    external: int = -1
    external_old: int = -1
    device: int = -1
    stream: int = -1
    num_bytes: int = -1
    occupancy: float = -1.0
    blocks_per_sm: float = -1.0
    graph_node: int = -1
    sequence: int = -1
    forward_thread: int = -1
    dims: msgspec.Raw = NO_RAW
    types: msgspec.Raw = NO_RAW
    values: msgspec.Raw = NO_RAW
    call_stack: str = ""
    collective: str = ""
    in_elements: int = 0
    out_elements: int = 0
    group_size: int = 0
    group_name: str = ""
    dtype: str = ""
    collective_sequence: int = -1
    total_allocated: int = -1
    total_reserved: int = -1
    device_id: int = -1
    device_type: int = -1
    address: Any = 0
    block_bytes: Any = 0


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """Event with times as numbers, for files whose times are small enough for floats."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = math.nan
    dur: float = 0.0
    pid: int | str = ""
    tid: int | str = ""
    args: Args = NO_ARGS


class ExactEvent(msgspec.Struct, gc=False):
    """Event with times as text, for files whose times are too large for floats."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: msgspec.Raw = NO_RAW
    dur: msgspec.Raw = NO_RAW
    pid: int | str = ""
    tid: int | str = ""
    args: Args = NO_ARGS


class Header(
    msgspec.Struct,
    rename={
        "device_properties": "deviceProperties",
        "distributed": "distributedInfo",
        "base_time_ns": "baseTimeNanoseconds",
    },
):
    """Contents of a trace other than its events."""

    device_properties: Any = None
    distributed: Any = None
    base_time_ns: Any = None


class EventFile(Header, kw_only=True, rename={"trace_events": "traceEvents"}):
    trace_events: list[Event]


class ExactEventFile(Header, kw_only=True, rename={"trace_events": "traceEvents"}):
    trace_events: list[ExactEvent]


def loose_event(row: Any) -> ExactEvent | None:
    """Return an event from a JSON value with unusual field types; None if the value cannot be an event."""
    if not isinstance(row, dict):
        return None
    args = row.get("args")
    return ExactEvent(
        ph=_text(row.get("ph")),
        cat=_text(row.get("cat")),
        name=_text(row.get("name")),
        ts=_number_text(row.get("ts")),
        dur=_number_text(row.get("dur")),
        pid=_identity(row.get("pid")),
        tid=_identity(row.get("tid")),
        args=_loose_args(args) if isinstance(args, dict) else NO_ARGS,
    )


def _loose_args(args: dict[str, Any]) -> Args:
    found: dict[str, Any] = {}
    for key, value in args.items():
        field = _ARGS.get(key)
        if field is not None and value is not None:
            try:
                found[field.name] = _CONVERT[field.type](value)
            except (TypeError, ValueError, OverflowError):
                continue
    return Args(**found)


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, int) else int(float(value))


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _identity(value: Any) -> int | str:
    """Return a process or thread id in the type that strict decoding gives: an integer if it is one, else text."""
    return value if isinstance(value, int) else _text(value)


def _number_text(value: Any) -> msgspec.Raw:
    """Return the text of a number; empty if there is none."""
    return NO_RAW if value is None else msgspec.Raw(str(value).encode())


_ARGS = {field.encode_name: field for field in msgspec.structs.fields(Args)}
_CONVERT: dict[Any, Callable[[Any], Any]] = {
    int: _whole,
    float: float,
    str: str,
    msgspec.Raw: lambda value: msgspec.Raw(msgspec.json.encode(value)),
}
