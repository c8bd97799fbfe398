"""Setting of `sharding`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from steptune.tuner.network.exchange import SHARDED, frees
from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class ShardingSetting(Setting):
    strategy: ClassVar[str] = "sharding"

    mode: Literal["ddp", "zero1", "grad_op", "full", "hybrid"] = "ddp"
    wrap: Literal["root", "block", "size"] = "root"
    min_num_params: Annotated[int, range(1, 1000000000001)] = 100000000
    reshard: bool = True
    prefetch: Annotated[int, range(1, 17)] = 1
    backward_prefetch: Annotated[int, range(1, 17)] = 1
    cpu_offload: bool = False
    ignored: Literal[None, "norms"] = None
    reduce_each: bool = True

    @property
    def is_fsdp(self) -> bool:
        """True where FSDP replaces DDP: parameters are sharded."""
        return self.mode in SHARDED

    @property
    def frees(self) -> bool:
        """True where parameters are freed after the forward pass, and gathered again for the backward pass."""
        return frees(self.mode, reshard=self.reshard)
