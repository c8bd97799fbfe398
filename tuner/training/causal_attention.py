"""Causal attention of transformers models by SDPA's flag alone: where that is the same, and how it is set.

The library computes no mask for an attention implementation that has none registered; such an implementation then
passes `is_causal`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

IMPLEMENTATION = "causal_sdpa"
GIVEN = ("attention_mask", "position_ids", "past_key_values")
"""What tells a model of more than plain sequences."""
WINDOWS = ("sliding_window", "attention_chunk_size")
"""By these a configuration says that tokens do not see all that came before them."""


def use_causal_flag(model: torch.nn.Module) -> torch.nn.Module:
    """Sets it in every model of transformers that is part of the model."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(IMPLEMENTATION, sdpa_attention_forward)
    for inner in outermost_models(model):
        inner.set_attn_implementation(IMPLEMENTATION)
    return model


def uses_causal_flag(model: torch.nn.Module) -> bool:
    """Whether it has models of transformers, and all are set so."""
    names = {str(inner.config._attn_implementation) for inner in outermost_models(model)}
    return names == {IMPLEMENTATION}


def outermost_models(model: torch.nn.Module) -> Iterator[Any]:
    """Models of transformers that are in no other."""
    library = sys.modules.get("transformers")
    if library is None:
        return
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        if module not in inside and isinstance(module, library.PreTrainedModel):
            inside.update(module.modules())
            yield module


class CausalLook:
    """Watches one step: would the flag alone have been the same?"""

    def __init__(self, model: torch.nn.Module) -> None:
        self._models = list(outermost_models(model))
        self._given: set[str] = set()
        self._hooks: list[Any] = []
        self._plain = self._masked = 0

    def __enter__(self) -> CausalLook:
        self._hooks = [m.register_forward_pre_hook(self._note_given, with_kwargs=True) for m in self._models]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def note_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of scaled_dot_product_attention."""
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        causal = kwargs.get("is_causal", args[5] if len(args) > 5 else False)
        if causal and mask is None:
            self._plain += 1
        else:
            self._masked += 1

    def _note_given(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        self._given.update(name for name in GIVEN if given.get(name) is not None)

    @property
    def refusal(self) -> str:
        """Why the flag alone says less than the mask, or cannot be set; empty where it is the same."""
        if not self._models:
            return "the model computes its own attention masks, or none"
        if self._given:
            return f"the workload gives the model {' and '.join(sorted(self._given))}, which the mask follows"
        if self._masked or not self._plain:
            return "not all attention of the model is causal"
        for inner in self._models:
            if inner.config._attn_implementation != "sdpa" or not inner._can_set_attn_implementation():
                return f"the attention of {type(inner).__name__} cannot be set"
            if any(getattr(inner.config, name, None) is not None for name in WINDOWS):
                return f"{type(inner).__name__} may look at a window of the tokens"
        return ""
