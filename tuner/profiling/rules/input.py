"""Rules for batches: waiting for them, and copying them to the device."""

from __future__ import annotations

from steptune.tuner.costs.categories import Category
from steptune.tuner.profiling.evidence import Evidence
from steptune.tuner.profiling.replay.answers import LOADER
from steptune.tuner.profiling.rules.rule import Cause, Remedy, Rule
from steptune.tuner.records import StepFacts
from steptune.tuner.strategies.cures import Cure

BUSY = 0.8
"""Minimum share of the loading time spent computing, or waiting for a core, for loading to count as CPU-bound."""


def _input_cause(evidence: Evidence) -> Cause | None:
    """Return the cause of waiting for data: epoch restart, preprocessing or storage; for a trace alone, the kind of
    loader.
    """
    if evidence.share(Category.EPOCH_RESTART) > evidence.share(Category.DATA_WAIT):
        return Cause(
            name="restart",
            message="most of this time is spent restarting the loader for every epoch",
            remedies=(Remedy(advice="keep the worker processes between epochs", cures=(Cure.KEEP_WORKERS,)),),
        )
    activity = evidence.situation.input if evidence.situation else None
    if activity is None:
        return _loader_cause(evidence.facts)
    if activity.num_workers:
        where = f"num_workers={activity.num_workers}: the worker processes"
    else:
        where = "num_workers=0: loading runs in the main process and"
    if activity.runnable_share >= BUSY:
        bound = "are CPU-bound" if activity.num_workers else "is CPU-bound"
        return Cause(
            name="preprocessing",
            message=f"{where} {bound} ({activity.runnable_share:.0%} of the time)",
            remedies=(
                Remedy(
                    advice="use as many worker processes as there are free cores, keep decoded samples, or make "
                    "the transforms cheaper",
                    cures=(Cure.MAKE_BATCHES_SOONER,),
                ),
            ),
        )
    sleeps = "are" if activity.num_workers else "is"
    return Cause(
        name="storage",
        message=f"{where} {sleeps} idle for {1 - activity.runnable_share:.0%} of the time, reading "
        f"{activity.read_bytes_per_s / 1e6:.0f} MB/s from storage: blocked on a disk, a network or a lock",
        remedies=(
            Remedy(
                advice="read ahead with more worker processes than cores, keep samples in memory or on a local disk, "
                "or pack small files",
                cures=(Cure.READ_LESS_OFTEN,),
            ),
        ),
    )


def _loader_cause(facts: StepFacts) -> Cause | None:
    """Return the cause for worker processes that are too slow; None if the main process loads, or the loader is
    unknown.
    """
    if facts.loader != "workers":
        return None
    count = f"{facts.num_workers} worker processes" if facts.num_workers else "worker processes"
    return Cause(
        name="workers",
        message=f"{count} already load batches, but do not keep up",
        remedies=(
            Remedy(
                advice="use more workers or prefetch more batches if cores are free, make samples cheaper to load, or "
                "keep decoded samples",
                cures=(Cure.MAKE_BATCHES_SOONER,),
            ),
        ),
    )


def _copy_cause(evidence: Evidence) -> Cause | None:
    """Return the cause for copies that already come from pinned memory; None for other copies."""
    if evidence.facts.pinned_memory is not True:
        return None
    return Cause(
        name="pinned",
        message="batches already come from pinned memory",
        remedies=(
            Remedy(
                advice="copy the next batch on another stream while this one computes, or send fewer bytes",
                cures=(Cure.COPY_AHEAD,),
                useful=lambda facts: not facts.prefetched,
            ),
            Remedy(
                advice="send fewer bytes: copies already use a separate stream",
                cures=(Cure.COPY_AHEAD,),
                useful=lambda facts: facts.prefetched,
            ),
        ),
    )


INPUT_RULES: tuple[Rule, ...] = (
    Rule(
        name="input_bound",
        categories=(Category.DATA_WAIT, Category.EPOCH_RESTART),
        thresholds=(0.05, 0.10, 0.20),
        message="input-bound: {share} of the step waits for data",
        remedies=(
            Remedy(
                advice="load with worker processes, keep them between epochs, or keep decoded samples",
                cures=(Cure.MAKE_BATCHES_SOONER,),
            ),
        ),
        cause=_input_cause,
        replayed=LOADER,
        replayed_message="input-bound: with batches always ready the step would be {share} shorter",
    ),
    Rule(
        name="exposed_copies",
        categories=(Category.COPY_H2D,),
        thresholds=(0.03, 0.05, 0.15),
        message="{share} of the step is spent copying batches to the device while it computes nothing",
        remedies=(
            Remedy(
                advice="pin memory, so that copies are asynchronous, and copy the next batch while this one computes",
                cures=(Cure.PIN_BATCHES, Cure.COPY_AHEAD),
            ),
        ),
        devices=("cuda",),
        cause=_copy_cause,
    ),
)
