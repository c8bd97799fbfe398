"""Rule for memory that is nearly full."""

from __future__ import annotations

from steptune.tuner.profiling.evidence import Evidence
from steptune.tuner.profiling.rules.rule import Remedy, Rule
from steptune.tuner.strategies.cures import Cure


def _memory_filled(evidence: Evidence) -> float | None:
    """Return the peak memory that the allocator reserved, as a share of the device's memory or of the part that a rank
    may use.
    """
    stats = evidence.analysis.memory if evidence.analysis else ()
    situation = evidence.situation
    parts = [device.memory_bytes for device in situation.environment.hardware.devices] if situation else []
    filled = [s.peak_reserved_bytes / min([s.total_memory_bytes, *parts]) for s in stats if s.total_memory_bytes]
    return max(filled, default=None)


MEMORY_RULES: tuple[Rule, ...] = (
    Rule(
        name="memory_nearly_full",
        categories=(),
        thresholds=(0.85, 0.90, 0.97),
        message="{share} of the device's memory is reserved at the peak",
        remedies=(
            Remedy(
                advice="checkpoint activations",
                cures=(Cure.RECOMPUTE_MORE,),
                useful=lambda facts: not facts.checkpointed,
                unless="it is done",
            ),
            Remedy(
                advice=(
                    "use smaller micro-batches or shard the model, before fragmentation causes an out-of-memory error"
                ),
                cures=(Cure.HOLD_LESS,),
            ),
        ),
        devices=("cuda",),
        measure=_memory_filled,
    ),
)
