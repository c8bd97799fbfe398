"""Translation of a recorded `sharding` choice into the terms of other tools.

Parameters of the choice: `mode` (a key of `MODES`), `wrap` ("root", "block", "size"), `min_num_params` (with "size"),
`reshard` (parameters are freed after the forward pass), `prefetch` and `backward_prefetch` (units gathered ahead; FSDP
itself gathers one), `cpu_offload`, `ignored` (what is left out of sharding), `reduce_each` (gradients are reduced after
every micro-batch). A recommendation without the choice is data-parallel: every rank holds the whole model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from steptune.tuner.errors import RecommendationError
from steptune.tuner.records import Choice, Recommendation, Scalar
from steptune.tuner.strategies.sharding.choice import ShardingSetting

STRATEGY = ShardingSetting.strategy


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Equivalents of one sharding mode in other tools; None where a tool has no equivalent.

    Attributes:
        fsdp1: Sharding strategy of FSDP1.
        fsdp2: Whether FSDP2 shards over all ranks; `reshard` determines the rest.
        zero_stage: DeepSpeed's ZeRO stage.
    """

    fsdp1: str | None
    fsdp2: bool
    zero_stage: int | None


MODES = {
    "ddp": Mode(fsdp1=None, fsdp2=False, zero_stage=0),
    "zero1": Mode(fsdp1=None, fsdp2=False, zero_stage=1),
    "grad_op": Mode(fsdp1="SHARD_GRAD_OP", fsdp2=True, zero_stage=2),
    "full": Mode(fsdp1="FULL_SHARD", fsdp2=True, zero_stage=3),
    "hybrid": Mode(fsdp1="HYBRID_SHARD", fsdp2=False, zero_stage=None),
}
WRAPS = {"root": "NO_WRAP", "block": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP"}
NO_DEPTH = "this export gathers parameters only one unit ahead"


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Recorded `sharding` choice after validation."""

    mode: str = "ddp"
    wrap: str = "root"
    min_num_params: int | None = None
    reshard: bool = True
    prefetch: int = 1
    backward_prefetch: int = 1
    cpu_offload: bool = False
    ignored: str | None = None
    reduce_each: bool = True

    @property
    def shards(self) -> bool:
        """True where ranks hold only parts of parameters, gradients or optimizer states."""
        return self.mode != "ddp"

    @property
    def size(self) -> int | None:
        """Minimum number of parameters of an FSDP unit; None unless units are chosen by size."""
        return self.min_num_params if self.wrap == "size" else None

    @property
    def fsdp1(self) -> str | None:
        """Name of FSDP1's sharding strategy."""
        name = self.words.fsdp1
        return "HYBRID_SHARD_ZERO2" if self.mode == "hybrid" and not self.reshard else name

    @property
    def words(self) -> Mode:
        return MODES[self.mode]

    def unsaid(self, depth: str = NO_DEPTH) -> dict[str, str]:
        """Return the parameters of the `sharding` choice that no target tool has a setting for, each with the reason.

        Args:
            depth: Reason why the target does not gather several units ahead.
        """
        reasons = {
            "prefetch": (self.prefetch != 1, depth),
            "backward_prefetch": (self.backward_prefetch != 1, depth),
            "ignored": (self.ignored is not None, "this export also shards normalisation layers and routers"),
            "reduce_each": (
                not self.reduce_each,
                "this export leaves it to the framework when to reduce micro-batch gradients",
            ),
        }
        return {name: reason for name, (set_, reason) in reasons.items() if set_}


def reduced_by_fsdp(choice: Choice, recommendation: Recommendation) -> dict[str, str]:
    """Return, for each parameter of a gradient compression, the reason why no hook can apply it; empty where DDP
    reduces the gradients.
    """
    if sharding_of(recommendation).mode not in ("full", "grad_op", "hybrid"):
        return {}
    return dict.fromkeys(choice, "FSDP reduces in bfloat16 by MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)")


def sharding_of(recommendation: Recommendation) -> Sharding:
    """Return the recorded `sharding` choice after validation.

    Raises:
        RecommendationError: A parameter or value that this version does not know.
    """
    choice = recommendation.choices.get(STRATEGY, {})
    flag = (True, False)
    allowed: dict[str, Collection[Scalar]] = {
        "mode": list(MODES),
        "wrap": list(WRAPS),
        "prefetch": range(1, 17),
        "backward_prefetch": range(1, 17),
        "reshard": flag,
        "cpu_offload": flag,
        "ignored": (None, "norms"),
        "reduce_each": flag,
    }
    for name, value in choice.items():
        if name not in Sharding.__dataclass_fields__ or (name in allowed and value not in allowed[name]):
            raise RecommendationError(
                f"sharding {name}={value!r} is unknown to this version of Steptune: export it with the version "
                f"that made it ({recommendation.steptune_version})"
            )
    return Sharding(**choice)  # type: ignore[arg-type]
