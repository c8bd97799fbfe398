"""Rules for devices that wait for the host, for memory or for other streams."""

from __future__ import annotations

from steptune.tuner.costs.categories import Category
from steptune.tuner.profiling.replay.answers import ALLOCATIONS, DISPATCH, LAUNCHES, SYNCHRONISATION
from steptune.tuner.profiling.rules.kernel_causes import launching_cause, waiting_cause
from steptune.tuner.profiling.rules.remedies import AT_ONCE, COMPILE, ENLARGE, FUSE, LAUNCH_LESS, READ_NOTHING
from steptune.tuner.profiling.rules.rule import Remedy, Rule
from steptune.tuner.strategies.cures import Cure

HOST_RULES: tuple[Rule, ...] = (
    Rule(
        name="launch_bound",
        categories=(Category.HOST, Category.LAUNCH_LATENCY),
        thresholds=(0.02, 0.10, 0.30),
        message="launch-bound: for {share} of the step the device waits for the host to launch work",
        remedies=LAUNCH_LESS,
        cause=launching_cause,
        of_causes=(Cure.FUSE_PARTS,),
        devices=("cuda",),
        replayed=DISPATCH,
        replayed_message="launch-bound: apart from stalls and waits, launches take {share} of the step",
        bounded_by=LAUNCHES,
        aside=lambda evidence: evidence.sets_launches_aside,
        aside_message="apart from stalls and waits, launches take {share} of the step",
    ),
    Rule(
        name="python_bound",
        categories=(Category.HOST,),
        thresholds=(0.10, 0.20, 0.40),
        message="{share} of the step is spent running Python and dispatching operators",
        remedies=(COMPILE, FUSE, AT_ONCE, ENLARGE),
        devices=("cpu",),
    ),
    Rule(
        name="synchronisation",
        categories=(Category.SYNCHRONISATION,),
        thresholds=(0.02, 0.05, 0.15),
        message="for {share} of the step the device is idle because the host waits for it",
        remedies=(READ_NOTHING,),
        cause=waiting_cause,
        of_causes=(Cure.FUSE_PARTS,),
        devices=("cuda",),
        replayed=SYNCHRONISATION,
        replayed_message="the host waits for the device, and the launch queue runs empty: without these waits the "
        "step would be {share} shorter",
    ),
    Rule(
        name="allocation",
        categories=(Category.ALLOCATION,),
        thresholds=(0.01, 0.03, 0.10),
        message="for {share} of the step the device is idle because memory is allocated or freed",
        remedies=(
            Remedy(
                advice=(
                    "let the allocator reuse its memory: keep tensor shapes constant, do not call empty_cache(), "
                    "or use expandable segments"
                ),
                cures=(Cure.KEEP_ALLOCATED,),
            ),
        ),
        devices=("cuda",),
        replayed=ALLOCATIONS,
        replayed_message="without allocating and freeing memory the step would be {share} shorter",
    ),
    Rule(
        name="blocked",
        categories=(Category.QUEUED,),
        thresholds=(0.05, 0.10, 0.30),
        message="for {share} of the step launched work waits for another stream, a peer or a full queue",
        remedies=(
            Remedy(
                advice="look for the collective or copy that the next kernel waits for, and for waits between streams"
            ),
        ),
        devices=("cuda",),
    ),
)
