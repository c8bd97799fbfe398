"""Division of a chain of blocks into pipeline stages by measured times and memory, rather than by the number of blocks.

The slowest stage paces the others, so its time is made as short as contiguous stages allow. Keeping stages within the
memory of their device takes precedence. What comes before the blocks belongs to the first stage (and is computed once
more, forward only, by every other one), what comes after them to the last.

A stage keeps the activations of the micro-batches that it has begun and not finished: all of them under GPipe; under
1F1B as many as there are stages from it to the end; interleaved, those of its warm-up (Narayanan et al., 2021, arXiv
2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

STATE_FACTOR = 4
"""Memory of a parameter with its gradient and Adam's two moments, in multiples of the parameter's own bytes."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Costs of one micro-batch in a block, or in the part of the model before or after the blocks.

    Attributes:
        time_s: Time forward and backward.
        forward_s: Forward part of that time.
        parameter_bytes: Size of the trained parameters.
        kept_bytes: Activations kept for the backward pass.
    """

    time_s: float
    forward_s: float
    parameter_bytes: int
    kept_bytes: int


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a whole chain."""

    front: Piece
    blocks: tuple[Piece, ...]
    back: Piece


def in_flight(schedule: str, stage: int, num_stages: int, num_ranks: int, num_micro_batches: int) -> int:
    """Return the maximum number of micro-batches whose activations a stage keeps at once."""
    if schedule == "gpipe":
        return num_micro_batches
    if schedule == "1f1b":
        return min(num_micro_batches, num_stages - stage)
    rank, chunks = stage % num_ranks, num_stages // num_ranks
    warm_up = (chunks - 1) * num_ranks + 2 * (num_ranks - 1 - rank) + 1
    return min(num_micro_batches, -(-warm_up // chunks))


def cut_stages(
    costs: Costs, num_stages: int, *, num_ranks: int, schedule: str, num_micro_batches: int, memory_bytes: float
) -> tuple[int, ...]:
    """Return the number of the first block of every stage.

    Args:
        memory_bytes: Memory limit of a rank.
    """
    num_blocks, per_rank = len(costs.blocks), num_stages // num_ranks

    def cost(stage: int, start: int, end: int) -> tuple[float, float]:
        pieces = list(costs.blocks[start:end])
        time_s = sum(piece.time_s for piece in pieces)
        if stage == 0:
            pieces.append(costs.front)
            time_s += costs.front.time_s
        else:
            time_s += costs.front.forward_s
        if stage == num_stages - 1:
            pieces.append(costs.back)
            time_s += costs.back.time_s
        kept = sum(piece.kept_bytes for piece in pieces)
        needed = STATE_FACTOR * sum(piece.parameter_bytes for piece in pieces)
        needed += kept * in_flight(schedule, stage, num_stages, num_ranks, num_micro_batches)
        return max(0.0, needed - memory_bytes / per_rank), time_s

    # best[end]: the costliest stage, and the starts, of the blocks before `end` in as many stages as were looked at
    best: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {
        end: (cost(0, 0, end), (0,)) for end in range(1, num_blocks + 1)
    }
    for stage in range(1, num_stages):
        longer = {}
        for end in range(stage + 1, num_blocks + 1):
            options = (
                (max(best[start][0], cost(stage, start, end)), (*best[start][1], start))
                for start in best
                if start < end
            )
            longer[end] = min(options)
        best = longer
    return best[num_blocks][1]
