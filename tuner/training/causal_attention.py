"""Causal attention of transformers models through SDPA's `is_causal` flag without a mask: test for equivalence, and
switch.

The library computes no mask for an attention implementation that has none registered; such an implementation then
passes `is_causal`. A call with more than plain sequences, such as one with padding, is computed as before, with masks:
such a batch may come late, or from an evaluation.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

IMPLEMENTATION = "causal_sdpa"
MASKED = "sdpa"
"""Name of the implementation in transformers that computes the same attention with masks."""
GIVEN = ("position_ids", "past_key_values", "token_type_ids", "mm_token_type_ids")
"""Arguments, apart from masks, whose presence in a call indicates more than plain causal sequences."""
WINDOWS = ("sliding_window", "attention_chunk_size")
"""Configuration options that keep tokens from attending to all earlier ones."""


def use_causal_flag(model: torch.nn.Module) -> torch.nn.Module:
    """Enable the causal flag in every transformers model inside the model."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(IMPLEMENTATION, sdpa_attention_forward)
    for outermost in outermost_models(model):
        outermost.set_attn_implementation(IMPLEMENTATION)
        turns = _Turns(outermost.config)
        for inner in _models_of(outermost):
            names = _argument_names(inner)
            inner.register_forward_pre_hook(partial(turns.begin, names), with_kwargs=True)
            inner.register_forward_hook(turns.end, always_call=True)
    return model


def uses_causal_flag(model: torch.nn.Module) -> bool:
    """Say whether the model contains transformers models and all of them use the causal flag."""
    return {str(inner.config._attn_implementation) for inner in _models_of(model)} == {IMPLEMENTATION}


def outermost_models(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the transformers models that are inside no other one."""
    inside: set[torch.nn.Module] = set()
    for found in _models_of(model):
        if found not in inside:
            inside.update(found.modules())
            yield found


def _models_of(model: torch.nn.Module) -> list[Any]:
    """Return all transformers models inside the model, itself included."""
    library = sys.modules.get("transformers")
    return [] if library is None else [m for m in model.modules() if isinstance(m, library.PreTrainedModel)]


def _argument_names(model: Any) -> tuple[str, ...]:
    """Return the names of the arguments that `forward` takes by position, in order."""
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


def _said(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return the names of a call's arguments that require masks."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [name for name, value in given.items() if value is not None and (name in GIVEN or "mask" in name)]


class _Turns:
    """Hooks that enable masks during calls with more than plain causal sequences, for a group of models that share one
    configuration.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._before: list[str] = []

    def begin(self, names: tuple[str, ...], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before.append(self._config._attn_implementation)
        if _said(names, args, kwargs):
            self._config._attn_implementation = MASKED

    def end(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self._config._attn_implementation = self._before.pop()


class CausalLook:
    """Observer of one step that tests whether the flag alone would give the same attention."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._models = _models_of(model)
        self._called: set[Any] = set()
        self._given: set[str] = set()
        self._hooks: list[Any] = []
        self._plain = self._masked = 0

    def __enter__(self) -> CausalLook:
        for model in self._models:
            hook = partial(self._note_given, _argument_names(model))
            self._hooks.append(model.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def note_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call of scaled_dot_product_attention."""
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        causal = kwargs.get("is_causal", args[5] if len(args) > 5 else False)
        if causal and mask is None:
            self._plain += 1
        else:
            self._masked += 1

    def _note_given(self, names: tuple[str, ...], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._called.add(module)
        self._given.update(_said(names, args, kwargs))

    @property
    def refusal(self) -> str:
        """Reason why the flag alone expresses less than the mask, or cannot be set; empty if the flag and the mask are
        equivalent.
        """
        if not self._models:
            return "requires a transformers model, whose attention masks Steptune can replace"
        if self._given:
            return (
                f"the attention mask depends on {' and '.join(sorted(self._given))}, which the workload passes to the "
                "model"
            )
        if self._masked or not self._plain:
            return "some attention layers of the model are not causal"
        for inner in self._models:
            if len(_models_of(inner)) == 1 and inner not in self._called:
                return f"{type(inner).__name__} was not called in the inspected step, so its inputs are unknown"
            if inner.config._attn_implementation != MASKED or not inner._can_set_attn_implementation():
                return f"the attention implementation of {type(inner).__name__} cannot be changed"
            if any(getattr(inner.config, name, None) is not None for name in WINDOWS):
                return f"{type(inner).__name__} may use sliding-window attention, which is_causal cannot express"
        return ""
