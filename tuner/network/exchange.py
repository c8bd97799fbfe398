"""Exchange of a step between ranks: the data sent, its pieces and the calls.

Each strategy states the fields that its choice sets (`Strategy.exchange`); costs read the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARDED = ("grad_op", "full", "hybrid")
"""Modes that shard parameters across ranks."""
USUAL_SOCKETS = 1
"""Sockets of a connection, where nothing says how many; in some clouds NCCL has more by itself."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Exchange of gradients and weights between ranks; the defaults are plain DDP's.

    Attributes:
        level: Precision level: at O2 and O3 gradients have 16 bits.
        dtype: Format of 16 bits, where there is one.
        mode: "ddp", "zero1", or one of `SHARDED`.
        reshard: In mode "hybrid", parameters are freed after the forward pass.
        wrap: What is gathered as one: "root", "block" or "size".
        min_num_params: Fewest parameters of a unit where `wrap` is "size".
        ignored: Normalisation layers are left out of units.
        reduce_each: Gradients are reduced after every micro-batch.
        first_bucket_mb, bucket_cap_mb: Mebibytes of DDP's first bucket, and of the others.
        compression: What compresses a gradient; None where nothing does.
        rank: Of the matrices of "powersgd".
        ratio: Share of the elements that "dgc" sends.
        levels: 2 where hosts reduce among themselves first.
        num_micro_batches: Of a step.
        model_ranks: Ranks that hold one model together.
        every: Steps between two averages of the models.
        sockets: Of a connection between hosts.
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
        """True where FSDP replaces DDP: parameters are sharded."""
        return self.mode in SHARDED

    @property
    def frees(self) -> bool:
        """True where parameters are freed after the forward pass, and gathered again."""
        return frees(self.mode, reshard=self.reshard)


def frees(mode: str, *, reshard: bool) -> bool:
    """Say whether parameters are freed after the forward pass, and gathered again."""
    return mode == "full" or (mode == "hybrid" and reshard)
