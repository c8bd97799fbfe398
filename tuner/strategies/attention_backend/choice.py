"""Setting of `attention_backend`: back end of scaled_dot_product_attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class AttentionBackendSetting(Setting):
    strategy: ClassVar[str] = "attention_backend"

    backend: Literal[None, "flash", "efficient", "cudnn", "math"] = None
