"""Data exchanged between ranks in a step: the amount, its division and the number of calls.

Each strategy states the fields that its choice sets (`Strategy.exchange`); costs read the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARDED = ("grad_op", "full", "hybrid")
"""Modes that shard parameters across ranks."""
USUAL_SOCKETS = 1
"""Default number of sockets per connection; in some clouds NCCL uses more by default."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Exchange of gradients and weights between ranks; the defaults are plain DDP's.

    Attributes:
        level: Precision level: at O2 and O3 gradients have 16 bits.
        dtype: 16-bit dtype, if any.
        mode: "ddp", "zero1", or one of `SHARDED`.
        reshard: Whether parameters are freed after the forward pass, in mode "hybrid".
        wrap: Unit of gathering: "root", "block" or "size".
        min_num_params: Minimum number of parameters in a unit where `wrap` is "size".
        ignored: Whether normalisation layers are left out of units.
        reduce_each: Whether gradients are reduced after every micro-batch.
        first_bucket_mb, bucket_cap_mb: Mebibytes of DDP's first bucket, and of the others.
        compression: Method that compresses gradients; None where they are not compressed.
        rank: Rank of the matrices of "powersgd".
        ratio: Share of the elements that "dgc" sends.
        levels: 2 where hosts reduce among themselves first.
        num_micro_batches: Number of micro-batches in a step.
        model_ranks: Number of ranks that hold one model together.
        every: Steps between two averages of the models.
        sockets: Number of sockets per connection between hosts.
    """

    level: str = "fp32"
    dtype: str | None = None
    mode: str = "ddp"
    reshard: bool = True
    wrap: str = "root"
    min_num_params: int = 100_000_000
    ignored: bool = False
    reduce_each: bool = True
    first_bucket_mb: float = 1.0
    bucket_cap_mb: float = 25.0
    compression: str | None = None
    rank: int = 4
    ratio: float = 0.01
    levels: int = 1
    num_micro_batches: int = 1
    model_ranks: int = 1
    every: int = 1
    sockets: int = USUAL_SOCKETS

    @property
    def is_sharded(self) -> bool:
        """True if FSDP shards the parameters; False under DDP."""
        return self.mode in SHARDED

    @property
    def frees(self) -> bool:
        """True where parameters are freed after the forward pass, and gathered again."""
        return frees(self.mode, reshard=self.reshard)


def frees(mode: str, *, reshard: bool) -> bool:
    """Say whether parameters are freed after the forward pass, and gathered again."""
    return mode == "full" or (mode == "hybrid" and reshard)
