"""Phases of recording a process, advanced at the end of each step.

    warm-up     the time of a step becomes steady
    timing      blocks of whole steps without a profiler; on a GPU a block ends when its work has ended
    recording   some steps under torch.profiler, inside an epoch where that is long enough
    again       blocks of steps without a profiler, where the epoch is long enough
    detail      one more step with call stacks and shapes, which is never timed
    over        recorded, or refused

Rank 0 decides when to record, three steps ahead, and how many steps; the others read both from the shared folder: all
ranks end after the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum
from time import perf_counter_ns
from typing import Any

import torch

from .detail_step import DetailStep
from .files import SharedFolder
from .ranks import num_ranks_here, rank_and_size
from .tensor_blocks import TensorBlock

WARM_UP_STEPS, MOST_WARM_UP_STEPS = 6, 24
STEADY_STEPS, STEADY_WITHIN = 4, 1.3
"""Number of steps, and maximum ratio of the longest to the shortest of them, for the step time to count as steady."""
NUM_BLOCKS = 5
SLOW_STEP_S = 0.5
"""Minimum duration, in seconds, of a step that counts as slow. If steps are slow, fewer of them are awaited and timed,
because host noise is a small share of each step, and each step lengthens the inspection.
"""
SLOW_WARM_UP_STEPS, SLOW_STEADY_STEPS, SLOW_BLOCKS = 4, 3, 3
"""Values of `WARM_UP_STEPS`, `STEADY_STEPS` and `NUM_BLOCKS` for slow steps."""
TIMED_S = 0.4
"""Time, in seconds, for which short steps are timed; at least `NUM_BLOCKS` steps are timed."""
MOST_BLOCK_STEPS = 8
RECORDED_S = 0.6
MOST_RECORDED_STEPS = 10
AGAIN_BLOCKS, MOST_AGAIN_STEPS = 3, 6
"""Minimum number of blocks and maximum number of steps that are timed after the recorded steps; if only one step was
recorded, only one is timed. The median of fewer blocks would be the longest. A script may end in this phase, before the
step with call stacks.
"""
ANNOUNCED_AHEAD = 3
"""Number of steps from rank 0's announcement to the first recorded one: ranks that exchange gradients are never further
apart."""
RANKS_WAIT_S = 60.0
OWN_MARK = "steptune.capture"
"""Copy of `tuner.profiling.facts.OWN_MARK`, by which the analysis recognises Steptune's own captures."""
PERIOD_STEPS = 3
"""Number of training steps after which the period of the optimizers' steps counts as known."""
LEAST_STEPS = PERIOD_STEPS + SLOW_WARM_UP_STEPS + SLOW_BLOCKS + 1 + 1
MOST_STEPS = PERIOD_STEPS + MOST_WARM_UP_STEPS + NUM_BLOCKS * MOST_BLOCK_STEPS + 1 + MOST_RECORDED_STEPS + 1
"""Minimum number of steps that a script must make if its steps are short; `LEAST_STEPS` is the minimum for slow steps.
Both include one profiled step whose record is discarded, and no step after the recorded ones.
"""


class Phase(Enum):
    """Phase of recording a process."""

    WARM_UP = "warm-up"
    TIMING = "timing"
    RECORDING = "recording"
    AGAIN = "again"
    DETAIL = "detail"
    OVER = "over"


class Window:
    """Recording window of one process.

    Args:
        folder: Folder shared with other ranks.
        step_times_ns: Times of the steps so far; the list grows by one with each step.
        remaining: Returns the steps left in the epoch; None where unknown.
        blocks: Returns the memory of the tensors that training is known to hold.

    Attributes:
        complete: Whether the trace was written.
        refusal: Reason why nothing was recorded; empty if there is none.
    """

    def __init__(
        self,
        folder: SharedFolder,
        step_times_ns: Sequence[int],
        remaining: Callable[[], tuple[int, int] | None],
        blocks: Callable[[], list[TensorBlock]] = list,
    ) -> None:
        self._folder = folder
        self._times_ns = step_times_ns
        self._remaining = remaining
        self._detail = DetailStep(blocks)
        self.phase = Phase.WARM_UP
        self.complete = False
        self.refusal = ""
        self._rank = self._num_ranks = 0  # not known before the first step
        self._block_steps = 1
        self._block_from, self._block_begin_ns = 0, 0
        self._block_times_ns: list[float] = []
        self._again_times_ns: list[float] = []
        self._timed_from = self._recorded_from = self._again_from = self._num_again = 0
        self._begin_at: int | None = None
        self._num_recorded = 0
        self._profiler: Any = None
        self.recorded_step_ns: list[int] = []

    @property
    def num_steps(self) -> int:
        return len(self._times_ns)

    def step_ended(self) -> None:
        """Advance the phase at the end of a step."""
        if self._num_ranks == 0:
            self._rank, self._num_ranks = rank_and_size()
        if self.phase is Phase.RECORDING:
            self._record_step()
        elif self.phase is Phase.AGAIN:
            self._time_again()
        elif self.phase is Phase.DETAIL:
            self._end_detail()
        elif self._rank > 0:
            self._follow()
        elif self.phase is Phase.WARM_UP and self._is_warm():
            self._begin_timing()
        elif self.phase is Phase.TIMING:
            self._time_step()

    def refuse(self, reason: str) -> None:
        """End without recording, for this reason."""
        self.refusal = self.refusal or reason
        self.phase = Phase.OVER

    def end(self) -> None:
        """End with everything recorded."""
        self.phase, self.complete = Phase.OVER, True

    def is_over(self) -> bool:
        """Say whether nothing more is to be recorded."""
        return self.phase is Phase.OVER

    @property
    def step_time_ns(self) -> float | None:
        """Step time without the profiler: the mean of the step times before and after the recorded steps; if only one
        of the two is known, that one.
        """
        known = [time for time in (self.before_ns, self.after_ns) if time]
        return sum(known) / len(known) if known else None

    @property
    def after_ns(self) -> float | None:
        """Step time after the recorded steps: the median over blocks. None if the script or its epoch ended before."""
        return median(self._again_times_ns) if self._again_times_ns else None

    @property
    def before_ns(self) -> float | None:
        """Step time before the recorded steps: on a CPU, the median over steps; on a GPU, where the host runs ahead,
        the median over blocks of steps. None before any was timed.
        """
        if torch.cuda.is_initialized():
            return median(self._block_times_ns) if self._block_times_ns else None
        timed = self._times_ns[self._timed_from : self._recorded_from or None]
        return median(timed) if self._timed_from and timed else None

    def wait_for_ranks(self) -> None:
        """Wait until all ranks of this host are recorded: a rank that ends closes its connections to the others."""
        end_s = time.monotonic() + RANKS_WAIT_S
        while self._folder.num_recorded() < num_ranks_here() and time.monotonic() < end_s:
            time.sleep(0.01)
        self._folder.all_recorded()

    def _is_warm(self) -> bool:
        if self.num_steps < SLOW_WARM_UP_STEPS:
            return False
        slow = self._is_slow()
        if not slow and self.num_steps < WARM_UP_STEPS:
            return False
        last = self._times_ns[-(SLOW_STEADY_STEPS if slow else STEADY_STEPS) :]
        return max(last) <= STEADY_WITHIN * min(last) or self.num_steps >= MOST_WARM_UP_STEPS

    def _is_slow(self) -> bool:
        """Say whether each of the last steps is slow. A single slow step among fast ones is not enough: it compiles, or
        saves a checkpoint.
        """
        return min(self._times_ns[-STEADY_STEPS:]) >= SLOW_STEP_S * 1e9

    def _begin_timing(self) -> None:
        if not self._claimed():
            return
        self.phase = Phase.TIMING
        usual_s = median(self._times_ns[-STEADY_STEPS:]) / 1e9
        self._block_steps = max(1, min(MOST_BLOCK_STEPS, int(TIMED_S / NUM_BLOCKS / max(usual_s, 1e-6))))
        synchronise()
        self._timed_from = self._block_from = self.num_steps
        self._block_begin_ns = perf_counter_ns()

    def _claimed(self) -> bool:
        if self._folder.claim(self._rank):
            return True
        self.refuse("another process of the script was recorded")
        return False

    def _time_step(self) -> None:
        num = self.num_steps - self._block_from
        if self._begin_at is None and num >= self._block_steps:
            synchronise()
            now_ns = perf_counter_ns()
            self._block_times_ns.append((now_ns - self._block_begin_ns) / num)
            self._block_from, self._block_begin_ns = self.num_steps, now_ns
            if len(self._block_times_ns) >= (SLOW_BLOCKS if self._is_slow() else NUM_BLOCKS):
                self._announce()
        if self._begin_at is not None and self.num_steps >= self._begin_at and self._fits():
            self._begin_recording()

    def _announce(self) -> None:
        several = self._num_ranks > 1
        self._begin_at = self.num_steps + (ANNOUNCED_AHEAD if several else 0)
        if several:
            self._num_recorded = self._length()
            self._folder.announce(self._begin_at, self._num_recorded)

    def _follow(self) -> None:
        """Record at the step that rank 0 announced, once the announcement exists."""
        if self._begin_at is None:
            self._begin_at, self._num_recorded = self._folder.announced() or (None, 0)
        if self._begin_at is not None and self.num_steps >= self._begin_at and self._claimed():
            self._begin_recording()

    def _fits(self) -> bool:
        """Say whether the window fits into the epoch. It need not fit if no epoch is long enough, or if ranks must
        record the same step.
        """
        rest = self._remaining()
        if rest is None or self._num_ranks > 1:
            return True
        remaining, whole = rest
        needed = self._length() + 2
        return needed > whole or remaining >= needed

    def _length(self) -> int:
        usual_s = median(self._block_times_ns or self._times_ns[-STEADY_STEPS:]) / 1e9
        return int(max(1, min(MOST_RECORDED_STEPS, RECORDED_S // max(usual_s, 1e-6))))

    def _begin_recording(self) -> None:
        from torch.profiler import ProfilerActivity, profile, schedule

        if torch._C._autograd._profiler_enabled():
            self.refuse(
                "the script already runs torch.profiler, and only one profiler can be active: switch off the "
                "script's own profiler"
            )
            return
        synchronise()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        self._num_recorded = self._num_recorded or self._length()
        self._recorded_from = self.num_steps
        self._profiler = profile(
            activities=activities, schedule=schedule(wait=0, warmup=1, active=self._num_recorded, repeat=1)
        )
        self._profiler.start()
        self.phase = Phase.RECORDING

    def _record_step(self) -> None:
        from torch.profiler import record_function

        done = self.num_steps - self._recorded_from
        last = done == 1 + self._num_recorded
        if last:
            synchronise()
        self._profiler.step()
        if done == 1:
            with record_function(OWN_MARK):
                pass
        if last:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._folder.trace(self._rank)))
            self._profiler = None
            self.recorded_step_ns = list(self._times_ns[-self._num_recorded :])
            # What was recorded counts, even if the script makes no more step.
            self.complete = True
            self._begin_again()

    def _begin_again(self) -> None:
        """Begin to time steps again. The first step is not timed, because caches are cold after the trace was written.
        It is timed if steps are so long that only one was recorded; all ranks record the same number of steps.
        """
        is_one = self._num_recorded == 1
        self._num_again = 1 if is_one else min(max(self._num_recorded, AGAIN_BLOCKS), MOST_AGAIN_STEPS)
        skipped = 0 if is_one else 1
        rest = self._remaining()
        if rest is not None and self._num_ranks == 1 and rest[0] < skipped + self._num_again + 1:
            self._begin_detail()
            return
        self.phase = Phase.AGAIN
        self._again_from = self.num_steps + skipped
        self._block_steps = max(1, self._num_again // AGAIN_BLOCKS)
        self._block_begin_ns = perf_counter_ns()

    def _time_again(self) -> None:
        done = self.num_steps - self._again_from
        if done > 0 and done % self._block_steps == 0:
            synchronise()
            self._again_times_ns.append((perf_counter_ns() - self._block_begin_ns) / self._block_steps)
        if done >= self._num_again:
            self._begin_detail()
        elif done % self._block_steps == 0:
            synchronise()
            self._block_begin_ns = perf_counter_ns()

    def _begin_detail(self) -> None:
        self._detail.begin()
        self.phase = Phase.DETAIL

    def _end_detail(self) -> None:
        self._detail.end(self._folder.details(self._rank), self._folder.blocks(self._rank))
        self.phase = Phase.OVER


def median(values: Sequence[float]) -> float:
    """Return the median; of two middle values, the upper one. `statistics` is not imported: a script may have a file of
    that name.
    """
    return sorted(values)[len(values) // 2]


def synchronise() -> None:
    """Wait until the GPU has finished its work, if one is used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
