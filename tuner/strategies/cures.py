"""Cures of a step's bottlenecks: findings advise them, and strategies carry them out.

A strategy lists its own in `cures`; `diagnosis` finds the strategies of an advice by them, and names none.
"""

from __future__ import annotations

from enum import StrEnum


class Cure(StrEnum):
    """Remedy for one limit of the step."""

    MAKE_BATCHES_SOONER = "make batches sooner"
    READ_LESS_OFTEN = "wait less for storage"
    KEEP_WORKERS = "keep worker processes between epochs"
    PIN_BATCHES = "pin the memory of batches"
    COPY_AHEAD = "copy the next batch during compute"
    FUSE_OPERATORS = "fuse operators"
    FUSE_PARTS = "compute whole parts in one kernel"
    FUSE_UPDATE = "update all parameters in few launches"
    REPLAY_LAUNCHES = "launch many kernels at once"
    LAUNCH_PER_LARGER_PIECE = "launch for more samples at a time"
    ENLARGE_PIECES = "use larger micro-batches"
    SHRINK_PIECES = "use smaller micro-batches"
    LOWER_PRECISION = "multiply in a lower precision"
    CHOOSE_LAYOUT = "lay out memory for convolutions"
    TUNE_COMPUTE = "try other threads, layouts and kernels"
    KEEP_ALLOCATED = "let the allocator keep its memory"
    COMMUNICATE_LESS = "communicate less often or in smaller types"
    RECOMPUTE_LESS = "checkpoint fewer blocks"
    RECOMPUTE_MORE = "checkpoint activations"
    HOLD_LESS = "hold less memory"
