"""Bytes that tensors take on ranks of a CPU, counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from live_bytes import LiveBytes
from rank_jobs import build

from steptune.tuner.records import Choice
from steptune.tuner.workloads.loading import load_workload


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Bytes on a rank: after a step, and the most that was there during one."""

    after: int
    peak: int


def count_steps(rank: int, reference: str, choices: Mapping[str, Choice]) -> Counted:
    """Count a rank's third step: in the first the optimizer's states are made, in the second DDP's buckets again."""
    with LiveBytes() as live:
        job = build(rank, load_workload(reference), choices)
        batches = iter(job.loader)
        for _ in range(3):
            live.peak = 0
            loss = job.step(next(batches))
        del loss
        return Counted(after=live.now(), peak=live.peak)
