"""Cures for a step's bottlenecks: findings advise them, and strategies carry them out.

A strategy lists its own in `cures`; `diagnosis` finds the strategies for an advice by their cures, and names none
itself.
"""

from __future__ import annotations

from enum import StrEnum


class Cure(StrEnum):
    """Remedy for one limit of the step."""

    MAKE_BATCHES_SOONER = "make batches sooner"
    READ_LESS_OFTEN = "reduce the time spent waiting for storage"
    KEEP_WORKERS = "keep worker processes between epochs"
    PIN_BATCHES = "put batches into pinned memory"
    COPY_AHEAD = "copy the next batch during compute"
    FUSE_OPERATORS = "fuse operators"
    FUSE_PARTS = "compute groups of operators in one kernel"
    FUSE_UPDATE = "update all parameters with fewer kernel launches"
    REPLAY_LAUNCHES = "launch many kernels with one call"
    LAUNCH_PER_LARGER_PIECE = "process more samples per kernel launch"
    ENLARGE_PIECES = "use larger micro-batches"
    SHRINK_PIECES = "use smaller micro-batches"
    LOWER_PRECISION = "run matmuls in lower precision"
    CHOOSE_LAYOUT = "choose a memory layout that suits convolutions"
    TUNE_COMPUTE = "try other thread counts, layouts and kernels"
    KEEP_ALLOCATED = "keep freed memory in the allocator"
    COMMUNICATE_LESS = "communicate less often or in smaller dtypes"
    RECOMPUTE_LESS = "checkpoint fewer blocks"
    RECOMPUTE_MORE = "checkpoint activations"
    HOLD_LESS = "hold less memory"
