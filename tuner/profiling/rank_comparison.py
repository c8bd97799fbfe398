"""Comparison of the collectives of several ranks: who arrives late, who waits, and how long the network takes.

Calls match by process group and sequence number, or (where the library records none) by process group
and order within a step. Ranks' clocks need not agree: the collectives in which every rank waits for
every other one end together, so their ends align the clocks (as in dPRO).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptune.tuner.costs.categories import Category
from steptune.tuner.profiling.collectives import CollectiveCalls, Message, bus_bandwidth, kinds_of
from steptune.tuner.profiling.communication import POINT_TO_POINT
from steptune.tuner.profiling.intervals import Intervals, Ints, pieces, union
from steptune.tuner.records import Breakdown, CollectiveStats
from steptune.tuner.trace_records import RankAnalysis, RankWait, TraceAnalysis
from steptune.tuner.wording import counted

WAITS_FOR_ALL = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Collectives that no rank can finish before every rank has begun."""

MAX_DRIFT_NS = 1_000_000
"""Maximum difference, in nanoseconds, that may remain between aligned clocks at any moment of a capture."""

_Key = tuple[str, int, int, int]


@dataclass(frozen=True, kw_only=True)
class RankComparison:
    """Results that need the traces of several ranks.

    Attributes:
        offsets_ns: Offset of each rank, added to its times so that collectives end together; 0 for the first rank.
    """

    collectives: tuple[CollectiveStats, ...]
    waits: tuple[RankWait, ...]
    offsets_ns: dict[int, int]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Collective calls of one process group, matched across those of its ranks that have a trace.

    Attributes:
        numbers: int64 of shape (calls, ranks): number of each call among the rank's own.
        start, end: int64 of shape (calls, ranks).
        waiting: By call: True if every rank waits for every other one.
    """

    ranks: tuple[int, ...]
    messages: tuple[Message, ...]
    numbers: Ints
    start: Ints
    end: Ints
    waiting: npt.NDArray[np.bool_]

    def aligned(self, offsets_ns: Mapping[int, int]) -> Matched:
        """Return the calls on the clock of the first rank."""
        shift = np.array([offsets_ns[rank] for rank in self.ranks], dtype=np.int64)
        return replace(self, start=self.start + shift, end=self.end + shift)

    def only(self, kept: npt.NDArray[np.bool_]) -> Matched:
        """Return the calls that a mask selects."""
        return replace(
            self,
            messages=tuple(message for message, keep in zip(self.messages, kept.tolist(), strict=True) if keep),
            numbers=self.numbers[kept],
            start=self.start[kept],
            end=self.end[kept],
            waiting=self.waiting[kept],
        )


def compare_ranks(calls: Mapping[int, CollectiveCalls]) -> RankComparison:
    """Compare the collectives of ranks.

    Args:
        calls: Calls of each rank, on one clock as far as the ranks' clocks agree.
    """
    ranks = tuple(sorted(calls))
    notes: list[str] = []
    groups = _matched_groups(calls, ranks, notes)
    offsets = _offsets(groups, ranks)
    if unaligned := [rank for rank in ranks if rank not in offsets]:
        listed = ", ".join(map(str, unaligned))
        notes.append(
            f"the clocks of rank {ranks[0]} and rank {listed} were not aligned: no collective that synchronises all "
            "its ranks connects them"
        )
    offsets = {rank: offsets.get(rank, 0) for rank in ranks}
    groups = [_same_moment(group.aligned(offsets), notes) for group in groups]
    return RankComparison(
        collectives=_stats(calls, groups),
        waits=_waits(calls, groups),
        offsets_ns=offsets,
        notes=tuple(notes),
    )


def _matched_groups(calls: Mapping[int, CollectiveCalls], ranks: tuple[int, ...], notes: list[str]) -> list[Matched]:
    keyed = {rank: _keys(calls[rank]) for rank in ranks}
    members: dict[str, dict[int, dict[_Key, int]]] = {}
    for rank in ranks:
        for key, number in sorted(keyed[rank].items(), key=lambda item: item[0][0]):
            members.setdefault(key[0], {}).setdefault(rank, {})[key] = number
    found, left_out = [], 0
    for name, own in members.items():
        inside = list(own)
        sizes = {calls[rank].messages[number].group_size for rank in inside for number in own[rank].values()}
        if name and len(inside) > max(sizes):
            notes.append(
                f"process group {name!r} was not compared: its size is {max(sizes)}, but {len(inside)} ranks report it"
            )
        elif len(inside) > 1:
            matched, missing = _match(calls, own)
            left_out += missing
            found.append(matched)
    if left_out:
        notes.append(f"{counted(left_out, 'collective call')} not compared: missing on some ranks of the group")
    return [matched for matched in found if matched.messages]


def _same_moment(group: Matched, notes: list[str]) -> Matched:
    """Drop matched calls that cannot be one collective, because there is no moment at which all ranks are in it."""
    apart = group.waiting & (group.start.max(axis=1) > group.end.min(axis=1) + MAX_DRIFT_NS)
    if not apart.any():
        return group
    notes.append(f"{counted(int(apart.sum()), 'collective call')} not compared: not in progress on all ranks at once")
    return group.only(~apart)


def _keys(calls: CollectiveCalls) -> dict[_Key, int]:
    """Return the index of each call by a key that identifies its collective on all ranks.

    Keys are (process group, sequence number, -1, count of earlier ones) or (process group, -1, step, count of earlier
    ones).
    """
    found: dict[_Key, int] = {}
    counts: dict[tuple[str, int, int], int] = {}
    for number, (message, step) in enumerate(zip(calls.messages, calls.step.tolist(), strict=True)):
        if message.name in POINT_TO_POINT or (message.sequence < 0 and step < 0):
            continue
        place = (message.group, message.sequence, -1 if message.sequence >= 0 else step)
        counts[place] = position = counts.get(place, -1) + 1
        found[(*place, position)] = number
    return found


def _match(calls: Mapping[int, CollectiveCalls], keyed: Mapping[int, dict[_Key, int]]) -> tuple[Matched, int]:
    """Return the matched calls of one group, and the number of calls that some ranks of the group lack."""
    ranks = tuple(keyed)
    everywhere = set.intersection(*(set(keys) for keys in keyed.values()))
    anywhere = set[_Key]().union(*keyed.values())
    # Without sequence numbers one call too many in a step shifts the order of all others in it.
    uneven = {key[:3] for key in anywhere - everywhere if key[1] < 0}
    common = []
    for key in everywhere:
        names = {calls[rank].messages[keys[key]].name for rank, keys in keyed.items()}
        if key[:3] not in uneven and len(names) == 1:
            common.append(key)
    common.sort(key=lambda key: keyed[ranks[0]][key])
    numbers = np.array([[keyed[rank][key] for rank in ranks] for key in common], dtype=np.int64)
    numbers = numbers.reshape(len(common), len(ranks))
    messages = tuple(calls[ranks[0]].messages[number] for number in numbers[:, 0].tolist())
    matched = Matched(
        ranks=ranks,
        messages=messages,
        numbers=numbers,
        start=np.stack([calls[rank].start[numbers[:, place]] for place, rank in enumerate(ranks)], axis=1),
        end=np.stack([calls[rank].end[numbers[:, place]] for place, rank in enumerate(ranks)], axis=1),
        waiting=np.array([message.name in WAITS_FOR_ALL for message in messages], dtype=bool),
    )
    return matched, len(anywhere) - len(common)


def _offsets(groups: Sequence[Matched], ranks: tuple[int, ...]) -> dict[int, int]:
    """Return the clock offset of each rank: the median time by which collectives end earlier on the rank's clock than
    on the first rank's.
    """
    offsets = dict.fromkeys(ranks[:1], 0)
    by_size = sorted((group for group in groups if group.waiting.any()), key=lambda group: -int(group.waiting.sum()))
    while True:
        reached = next((g for g in by_size if 0 < sum(rank in offsets for rank in g.ranks) < len(g.ranks)), None)
        if reached is None:
            return offsets
        end = reached.end[reached.waiting]
        place = next(place for place, rank in enumerate(reached.ranks) if rank in offsets)
        behind = np.rint(np.median(end[:, place : place + 1] - end, axis=0)).astype(np.int64)
        for rank, shift in zip(reached.ranks, behind.tolist(), strict=True):
            offsets.setdefault(rank, offsets[reached.ranks[place]] + shift)


def _waits(calls: Mapping[int, CollectiveCalls], groups: Sequence[Matched]) -> tuple[RankWait, ...]:
    """Return the waits of each rank: the time by which each of its calls lasts longer than the same call on the fastest
    rank, placed at the start of the call.
    """
    waited: dict[int, int] = {}
    waiting: dict[int, list[Intervals]] = {}
    compared: dict[int, set[int]] = {}
    last: dict[int, int] = {}
    count: dict[int, int] = {}
    for group in groups:
        duration = (group.end - group.start)[group.waiting]
        if len(duration) == 0:
            continue
        wait = duration - duration.min(axis=1, keepdims=True)
        arrived = np.bincount(group.start[group.waiting].argmax(axis=1), minlength=len(group.ranks))
        for place, rank in enumerate(group.ranks):
            waited[rank] = waited.get(rank, 0) + int(wait[:, place].sum())
            last[rank] = last.get(rank, 0) + int(arrived[place])
            count[rank] = count.get(rank, 0) + len(duration)
            numbers = group.numbers[group.waiting, place]
            begin = calls[rank].start[numbers]
            waiting.setdefault(rank, []).append((begin, begin + wait[:, place]))
            compared.setdefault(rank, set()).update(calls[rank].step[numbers].tolist())
    return tuple(
        RankWait(
            rank=rank,
            wait_ns=waited[rank],
            late_share=last[rank] / count[rank],
            exposed_ns=_exposed(calls[rank], waiting[rank]),
            step_share=len(compared[rank] - {-1}) / max(1, len(set(calls[rank].step.tolist()) - {-1})) or 1.0,
        )
        for rank in sorted(waited)
    )


def _exposed(calls: CollectiveCalls, waiting: Sequence[Intervals]) -> int:
    """Return the part of a rank's waiting that compute does not hide. Waits that overlap count once."""
    start, end = (np.concatenate(side) for side in zip(*waiting, strict=True))
    low, high, *_ = pieces(*union(start, end), (calls.exposed_start, calls.exposed_end))
    return int((high - low).sum())


def late_part(wait: RankWait | None, breakdown: Breakdown) -> float:
    """Return the share of a rank's exposed communication that is spent waiting for a late rank; the rest is network
    time. Steps whose collectives could not be compared are assumed to have the same share.
    """
    exposed_ns = breakdown.categories.get(Category.COMMUNICATION.value, 0) * (wait.step_share if wait else 1.0)
    return min(1.0, wait.exposed_ns / exposed_ns) if wait and exposed_ns else 0.0


def straggler(waits: Sequence[RankWait]) -> int | None:
    """Find the rank that the others wait for: the one with the least wait, and among equals the one that is last most
    often.
    """
    if not waits:
        return None
    return min(waits, key=lambda wait: (wait.wait_ns, -wait.late_share, wait.rank)).rank


def main_rank(analysis: TraceAnalysis) -> RankAnalysis:
    """Return the rank whose kernels, operators and gaps are shown: the one that the others wait for."""
    late = straggler(analysis.waits)
    return next((rank for rank in analysis.ranks if rank.rank == late), analysis.ranks[0])


def _stats(calls: Mapping[int, CollectiveCalls], groups: Sequence[Matched]) -> tuple[CollectiveStats, ...]:
    """Return statistics by kind of collective. Latency and skew are computed only from collectives that all ranks
    share.
    """
    kinds: dict[Message, dict[int, list[int]]] = {}
    for rank, own in calls.items():
        for kind, numbers in kinds_of(own.messages).items():
            kinds.setdefault(kind, {})[rank] = numbers
    shortest: dict[Message, list[int]] = {}
    spread: dict[Message, list[int]] = {}
    for group in groups:
        least = (group.end - group.start).min(axis=1)
        apart = np.ptp(group.start, axis=1)
        for kind, rows in kinds_of(group.messages).items():
            shortest.setdefault(kind, []).extend(least[rows].tolist())
            spread.setdefault(kind, []).extend(apart[rows].tolist())
    found = [
        _of_kind(calls, kind, numbers, shortest.get(kind, []), spread.get(kind, [])) for kind, numbers in kinds.items()
    ]
    return tuple(sorted(found, key=lambda stats: -stats.total_ns))


def _of_kind(
    calls: Mapping[int, CollectiveCalls],
    kind: Message,
    numbers: Mapping[int, list[int]],
    shortest: list[int],
    spread: list[int],
) -> CollectiveStats:
    latency = int(np.median(shortest)) if shortest else None
    durations = np.concatenate([(calls[rank].end - calls[rank].start)[chosen] for rank, chosen in numbers.items()])
    return CollectiveStats(
        name=kind.name,
        group=kind.group,
        group_size=kind.group_size,
        message_bytes=kind.num_bytes,
        dtype=kind.dtype,
        count=round(sum(map(len, numbers.values())) / len(numbers)),
        total_ns=round(np.mean([calls[rank].busy_ns[chosen].sum() for rank, chosen in numbers.items()])),
        exposed_ns=round(np.mean([calls[rank].exposed_ns[chosen].sum() for rank, chosen in numbers.items()])),
        latency_ns=latency,
        skew_ns=int(np.median(spread)) if spread else None,
        bus_bytes_per_s=bus_bandwidth(kind, float(np.median(durations)) if latency is None else latency),
    )
