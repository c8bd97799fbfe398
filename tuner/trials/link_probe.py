"""Timing of collectives between ranks, by message size.

The groups of one link (every host's ranks, say) run at the same time, as they do in training. Before each measurement
all ranks meet; the rank that arrives last waits for no other, so that the shortest time of a group's ranks is the
group's time. Small messages are sent several times in a row, so that meeting and synchronising the device cost little
of it. The median of some repeats counts. Random numbers are sent: hardware is faster with zeros.

What is left of the time decides how large messages become; rank 0 decides it for all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from steptune.tuner.network.collective_costs import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from steptune.tuner.records import CollectiveTiming

if TYPE_CHECKING:
    import torch

    from steptune.tuner.trials.coordination import Coordinator

COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
SIZES_BYTES = tuple(4**power << 12 for power in range(8))
"""Message sizes in bytes, from 4 KiB to 64 MiB."""
LEAST_SIZES = 5
"""Minimum number of sizes to measure, however long they take: fewer sizes do not determine a bandwidth."""
LEAST_REPEATS, MOST_REPEATS = 3, 9
MOST_CALLS = 8
CALLS_NS = 1_000_000
"""Minimum duration of the calls in one repeat, in nanoseconds, unless that takes more than `MOST_CALLS` calls."""
ELEMENT_BYTES = 4


class LinkProbe:
    """Timing of the collectives over one link.

    Args:
        groups: The ranks of the groups that run at the same time.
        own_group: The process group that this rank is in.
    """

    def __init__(
        self, groups: Sequence[tuple[int, ...]], own_group: Any, coordinator: Coordinator, device: torch.device
    ) -> None:
        self._groups = groups
        self._own_group = own_group
        self._coordinator = coordinator
        self._device = device
        self._num_ranks = len(groups[0])

    def timings(self, seconds: float) -> list[CollectiveTiming]:
        """Time all collectives at each message size, in about `seconds`; every rank returns the same list."""
        share_s = seconds / len(COLLECTIVES)
        return [timing for collective in COLLECTIVES for timing in self._by_size(collective, share_s)]

    def timing(self, collective: str, size_bytes: int) -> CollectiveTiming:
        """Time one collective at one message size, with the minimum number of repeats."""
        return self._timed(collective, size_bytes, seconds=0.0)[0]

    def _by_size(self, collective: str, seconds: float) -> list[CollectiveTiming]:
        began, found, fastest_ns = time.monotonic(), [], 0
        for number, size_bytes in enumerate(SIZES_BYTES):
            left_s = self._coordinator.agree(seconds - (time.monotonic() - began))
            # The next size takes four times as long, or less.
            if number >= LEAST_SIZES and 4 * fastest_ns * (2 + LEAST_REPEATS) > left_s * 1e9:
                break
            timing, fastest_ns = self._timed(collective, size_bytes, left_s / (len(SIZES_BYTES) - number))
            found.append(timing)
        return found

    def _prepared(self, collective: str, size_bytes: int) -> Callable[[int], int]:
        """Return a function that runs the collective a number of times and returns the nanoseconds per call."""
        import torch
        import torch.distributed as dist

        part = torch.randn(self._part_elements(size_bytes), device=self._device)
        source = torch.randn(part.numel() * self._num_ranks, device=self._device)
        message = torch.empty_like(source)
        calls: dict[str, Callable[[], object]] = {
            ALL_REDUCE: lambda: dist.all_reduce(message, group=self._own_group),
            ALL_GATHER: lambda: dist.all_gather_into_tensor(message, part, group=self._own_group),
            REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(part, message, group=self._own_group),
        }
        call = calls[collective]

        def run(num_calls: int) -> int:
            message.copy_(source)  # sums of sums grow without end
            self._synchronise()
            dist.barrier(group=self._coordinator.group)
            began_ns = time.perf_counter_ns()
            for _ in range(num_calls):
                call()
            self._synchronise()
            return (time.perf_counter_ns() - began_ns) // num_calls

        return run

    def _timed(self, collective: str, size_bytes: int, seconds: float) -> tuple[CollectiveTiming, int]:
        """Return the timing of one collective at one message size, and the nanoseconds of the fastest repeat.

        Args:
            seconds: Time limit for this size; the minimum number of repeats is always made.
        """
        run = self._prepared(collective, size_bytes)
        run(1)  # the first connects
        _, once_ns = self._of_groups([run(1)])
        num_calls = max(1, min(MOST_CALLS, CALLS_NS // once_ns))
        affordable = int(seconds * 1e9 / (num_calls * once_ns)) - 2
        num_repeats = max(LEAST_REPEATS, min(MOST_REPEATS, affordable))
        median_ns, fastest_ns = self._of_groups([run(num_calls) for _ in range(num_repeats)])
        timing = CollectiveTiming(
            collective=collective,
            num_ranks=self._num_ranks,
            message_bytes=self._part_elements(size_bytes) * ELEMENT_BYTES * self._num_ranks,
            duration_ns=median_ns,
        )
        return timing, fastest_ns

    def _of_groups(self, durations_ns: Sequence[int]) -> tuple[int, int]:
        """Return the median and the minimum duration over repeats, the same on all ranks."""
        rows = self._coordinator.gather(list(durations_ns))
        median_ns, fastest_ns = self._coordinator.agree(median_and_least(rows, self._groups) if rows else None)
        return median_ns, fastest_ns

    def _part_elements(self, size_bytes: int) -> int:
        return max(1, size_bytes // (ELEMENT_BYTES * self._num_ranks))

    def _synchronise(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def median_and_least(rows: Sequence[Sequence[int]], groups: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Return the median and the minimum duration over repeats, in nanoseconds (at least 1). The duration of a repeat is
    the slowest group's; the duration of a group is that of its last rank to arrive.

    Args:
        rows: Nanoseconds of each repeat, by rank.
    """
    slowest = [max(min(repeat[rank] for rank in ranks) for ranks in groups) for repeat in zip(*rows, strict=True)]
    return max(1, round(statistics.median(slowest))), max(1, min(slowest))
