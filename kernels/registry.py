"""Registry of kernels: Steptune's, and those of other packages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from steptune.kernels import compaction, deep_gradient, fcos3d, int8_blocks, lamb, lars, simota, window_attention
from steptune.kernels.assigners import assigner_pattern
from steptune.kernels.base import OPTIMIZER, Case, Kernel, Pattern
from steptune.kernels.lamb import pattern as lamb_pattern
from steptune.kernels.lars import pattern as lars_pattern
from steptune.kernels.names import GROUP
from steptune.kernels.triton_device import unavailable
from steptune.kernels.window_attention import pattern


def _window_case(
    label: str,
    batch: int,
    height: int,
    width: int,
    heads: int,
    head_dim: int,
    geometry: window_attention.Geometry,
    *,
    bias: bool = True,
    cosine: bool = False,
) -> Case:
    channels = heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "qkv_bhwc": (batch, height, width, 3 * channels),
        "table_rh": (geometry.table_length, heads),
        "scale_h": (heads,),
    }
    if bias:
        shapes["qkv_bias_c"] = (3 * channels,)
    return Case(
        label=label, shapes=shapes, options={"geometry": geometry, "cosine": cosine}, positive=frozenset({"scale_h"})
    )


_WINDOW_7 = window_attention.Geometry(rows=7, columns=7)
_SHIFTED_7 = window_attention.Geometry(rows=7, columns=7, shift_rows=3, shift_columns=3)
_WITHOUT_PADDING = ("whole", "shifted", "one window", "oblong windows", "256 tokens")

WINDOW_ATTENTION = Kernel(
    name="window_attention",
    summary="Swin attention within shifted windows, without rolling, cutting, padding or masking in memory",
    function=window_attention.window_attention,
    reference=window_attention.reference,
    cases=(
        _window_case("whole", 1, 7, 14, 3, 16, _WINDOW_7),
        _window_case("shifted", 2, 14, 21, 1, 16, _SHIFTED_7),
        _window_case("one window", 3, 7, 7, 1, 32, _WINDOW_7),
        _window_case("padded", 1, 11, 16, 2, 16, _SHIFTED_7),
        _window_case("padded after rolling", 1, 11, 16, 2, 16, replace(_SHIFTED_7, rolls_before_padding=True)),
        _window_case("no bias", 1, 10, 7, 2, 16, _SHIFTED_7, bias=False),
        _window_case(
            "oblong windows",
            1,
            6,
            9,
            1,
            16,
            window_attention.Geometry(rows=2, columns=3, shift_rows=1, shift_columns=2),
        ),
        _window_case(
            "cosine", 1, 16, 8, 2, 16, window_attention.Geometry(rows=8, columns=8, shift_rows=4), cosine=True
        ),
        _window_case(
            "144 tokens",
            1,
            13,
            12,
            1,
            16,
            window_attention.Geometry(rows=12, columns=12, shift_rows=6, shift_columns=6),
            cosine=True,
        ),
        _window_case("256 tokens", 1, 16, 16, 1, 16, window_attention.Geometry(rows=16, columns=16)),
    ),
    tolerances={torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 1e-2},
    without_gradient=frozenset(
        [(label, "scale_h") for label in (*_WITHOUT_PADDING, "padded", "padded after rolling", "no bias")]
        + [(label, "qkv_bias_c") for label in (*_WITHOUT_PADDING, "cosine")]
    ),
    pattern=Pattern(
        what=pattern.WHAT,
        refusal=pattern.refusal,
        replace=pattern.replace,
        operators=pattern.OPERATORS,
        unavailable=unavailable,
    ),
)

_TENSORS = ((5000,), (3, 7), (1,), (64, 64), (4097,))
"""Shapes of an optimizer's test tensors: whole and partial chunks, aligned and unaligned."""


def _updated(update: Callable[..., Any], *names: str) -> Callable[..., Tensor]:
    """Wrap an in-place update of lists of tensors so that it keeps its inputs and returns all results in one tensor.

    Args:
        names: Names of the lists; the second are the gradients, which are not changed.
    """

    def function(*, settings: tuple[Any, ...], max_grad_norm: float | None = None, **tensors: Tensor) -> Tensor:
        count = len(settings)
        lists = [[tensors[f"{name}_{n}"].detach().clone() for n in range(count)] for name in names]
        more = {} if max_grad_norm is None else {"max_grad_norm": max_grad_norm}
        given = lists if len(lists) > 2 or update not in (lars.lars, lars.reference) else [*lists, None]
        update(*given, settings, **more)
        return torch.cat([tensor.flatten() for own in (lists[0], *lists[2:]) for tensor in own])

    return function


def _optimizer_case(label: str, names: tuple[str, ...], settings: tuple[Any, ...], **options: Any) -> Case:
    shapes = {f"{name}_{n}": _TENSORS[n] for name in names for n in range(len(settings))}
    positive = frozenset(name for name in shapes if name.startswith("squares"))
    return Case(label=label, shapes=shapes, options={"settings": settings, **options}, positive=positive)


_LAMB = ("parameters", "gradients", "means", "squares")
_LARS = ("parameters", "gradients", "momenta")
_ADAM = {"decay1": 0.9, "share1": 0.1, "decay2": 0.999, "share2": 0.001, "rate": 0.01}


def _lamb_settings(**changed: Any) -> tuple[lamb.Settings, ...]:
    decays = (0.1, 0.0, 0.1, 0.3, 0.1)
    return tuple(lamb.Settings(**{**_ADAM, "weight_decay": d, "adapts": d > 0, **changed}) for d in decays)


def _lars_settings(**changed: Any) -> tuple[lars.Settings, ...]:
    own = {"rate": 0.1, "kept": 0.9, "share": 1.0, "trust": 0.02, "eps": 1e-8}
    return tuple(
        lars.Settings(**{**own, "weight_decay": d, "adapts": d > 0, **changed}) for d in (0.1, 0.0, 0.3, 0.1, 0.1)
    )


def _of_optimizer(module: ModuleType) -> Pattern:
    """Return the pattern that an optimizer kernel's module describes."""
    return Pattern(
        what=module.WHAT,
        refusal=module.RULE.refusal,
        replace=module.RULE.replace,
        operators=module.OPERATORS,
        subject=OPTIMIZER,
        unavailable=unavailable,
    )


LAMB = Kernel(
    name="lamb",
    summary="LAMB over all parameters at once",
    function=_updated(lamb.lamb, *_LAMB),
    reference=_updated(lamb.reference, *_LAMB),
    cases=(
        _optimizer_case("clipped", _LAMB, _lamb_settings(mean_correction=3.0, root_correction=2.0), max_grad_norm=1.0),
        _optimizer_case("not clipped", _LAMB, _lamb_settings()),
        _optimizer_case("norm below the bound", _LAMB, _lamb_settings(), max_grad_norm=1e6),
        _optimizer_case("bounded ratio", _LAMB, _lamb_settings(adapts=True, largest_ratio=1.0)),
        _optimizer_case("bounded weight norm", _LAMB, _lamb_settings(largest_weight_norm=10.0)),
        _optimizer_case("decoupled decay", _LAMB, _lamb_settings(shrink=0.97, weight_decay=0.0)),
        _optimizer_case("no averaging", _LAMB, _lamb_settings(share1=1.0)[:1]),
    ),
    tolerances={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2},
    has_gradients=False,
    in_graphs=False,
    pattern=_of_optimizer(lamb_pattern),
)

LARS = Kernel(
    name="lars",
    summary="LARS over all parameters at once",
    function=_updated(lars.lars, *_LARS),
    reference=_updated(lars.reference, *_LARS),
    cases=(
        _optimizer_case("momentum", _LARS, _lars_settings()),
        _optimizer_case("first step", _LARS, _lars_settings(kept=0.0)),
        _optimizer_case("Nesterov", _LARS, _lars_settings(momentum=0.9)),
        _optimizer_case("bounded ratio", _LARS, _lars_settings(divisor=0.01, largest_ratio=1.0)),
        _optimizer_case("rate inside", _LARS, _lars_settings(rate=1.0, share=0.1)),
        _optimizer_case("dampened", _LARS, _lars_settings(share=0.5)[:2]),
    ),
    tolerances={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2},
    has_gradients=False,
    in_graphs=False,
    pattern=_of_optimizer(lars_pattern),
)


def _assigned(assign: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap an assigner so that boxes are given by centres and sizes; random boxes then lie in an image of about 8 x 8
    pixels.
    """

    def function(
        *,
        centres: Tensor,
        sizes: Tensor,
        objectness: Tensor,
        classes: Tensor,
        wanted_centres: Tensor,
        wanted_sizes: Tensor,
        labels: tuple[tuple[int, ...], ...],
        every: int = 1,
        has_priors: bool = False,
    ) -> Tensor:
        def corners(centre: Tensor, size: Tensor) -> Tensor:
            centre, size = 2 * centre.float(), size.float()
            return torch.cat([centre - size, centre + size], -1)

        batch, candidates = objectness.shape
        device = objectness.device
        number = torch.arange(candidates, device=device)
        options: dict[str, Tensor] = {}
        if every > 1:
            options["valid_bm"] = ((number % every) > 0).expand(batch, -1)
        if has_priors:
            options["priors_m3"] = torch.stack([number % 8 - 3.5, number // 8 % 8 - 3.5, 0 * number + 0.5], 1)
        wanted = corners(wanted_centres, wanted_sizes)
        given = torch.tensor(labels, device=device)
        return assign(corners(centres, sizes), objectness, classes, wanted, given, **options)

    return function


def _assignment_case(
    label: str, candidates: int, num_classes: int, labels: tuple[tuple[int, ...], ...], **options: Any
) -> Case:
    batch, boxes = len(labels), len(labels[0])
    shapes = {
        "centres": (batch, candidates, 2),
        "sizes": (batch, candidates, 2),
        "objectness": (batch, candidates),
        "classes": (batch, candidates, num_classes),
        "wanted_centres": (batch, boxes, 2),
        "wanted_sizes": (batch, boxes, 2),
    }
    positive = frozenset({"sizes", "wanted_sizes"})
    return Case(label=label, shapes=shapes, options={"labels": labels, **options}, positive=positive)


SIMOTA = Kernel(
    name="simota",
    summary="SimOTA's assignment of a whole batch, without synchronising with the device",
    function=_assigned(simota.assign),
    reference=_assigned(simota.reference),
    cases=(
        _assignment_case("three images", 70, 5, ((0, 4, 2, -1), (1, -1, -1, -1), (3, 3, 0, 2))),
        _assignment_case("an empty image", 33, 3, ((-1, -1), (2, 0))),
        _assignment_case("only empty images", 20, 2, ((-1,), (-1,))),
        _assignment_case("padding between boxes", 40, 4, ((-1, 3, -1, 1),)),
        _assignment_case("few candidates", 4, 6, ((5, 1, 0),)),
        _assignment_case("some candidates count", 90, 130, ((0, 129, 64),), every=3),
        _assignment_case("priors", 64, 3, ((0, 2, 1, -1), (1, 1, 2, 0)), has_priors=True),
        _assignment_case("priors with some candidates excluded", 64, 3, ((0, 2), (-1, 0)), has_priors=True, every=4),
    ),
    tolerances={torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0},
    has_gradients=False,
    pattern=assigner_pattern(
        simota.Assigner,
        simota.FusedAssigner,
        "SimOTA's assignment in a loss, made by steptune.kernels.simota.Assigner",
        "simota_assign",
        "simota_choices",
    ),
)


def _targets_in_one(targets: Callable[..., fcos3d.Targets]) -> Callable[..., Tensor]:
    """Wrap a target function so that it computes the targets of a fixed grid of points (8 x 8 at stride 8, 4 x 4 at
    stride 16) and returns them in one tensor.
    """

    def function(
        *, centres: Tensor, sizes: Tensor, shifts: Tensor, boxes: Tensor, labels: tuple[tuple[int, ...], ...]
    ) -> Tensor:
        device, dtype = centres.device, centres.dtype if centres.dtype == torch.float64 else torch.float32
        number = torch.arange(80, device=device)
        stride = torch.where(number < 64, 8, 16)
        side = 128 // stride // 2
        place = torch.where(number < 64, number, number - 64)
        xy = torch.stack([place % side, place // side], 1) * stride[:, None] + stride[:, None] // 2
        low, high = torch.where(number < 64, -1, 24), torch.where(number < 64, 24, 1e8)
        points = fcos3d.Points(xy.to(dtype), stride.to(dtype), low.to(dtype), high.to(dtype))
        middle, half = 32 + 24 * centres.detach().to(dtype), 10 * sizes.detach().to(dtype)
        given = torch.tensor(labels, device=device)
        box = boxes.detach().to(dtype)
        corners = torch.cat([middle - half, middle + half], -1)
        centre = middle + 2 * shifts.detach().to(dtype)
        found = targets(points, fcos3d.Scenes(corners, given, (given + 1) % 3, centre, box[..., 2], box), 5, 3)
        whole = (found.label[..., None], found.attribute[..., None], found.centerness[..., None])
        return torch.cat([*whole, found.distances, found.box], -1).to(boxes.dtype)

    return function


def _targets_case(label: str, labels: tuple[tuple[int, ...], ...]) -> Case:
    shape = (len(labels), len(labels[0]))
    shapes = {"centres": (*shape, 2), "sizes": (*shape, 2), "shifts": (*shape, 2), "boxes": (*shape, 9)}
    return Case(label=label, shapes=shapes, options={"labels": labels}, positive=frozenset({"sizes"}))


FCOS3D = Kernel(
    name="fcos3d",
    summary="FCOS3D's targets of a whole batch, without synchronising with the device",
    function=_targets_in_one(fcos3d.targets),
    reference=_targets_in_one(fcos3d.reference),
    cases=(
        _targets_case("three images", ((0, 4, 2, -1, 3), (1, -1, -1, -1, -1), (3, 3, 0, 2, 1))),
        _targets_case("an empty image", ((-1, -1), (2, 0))),
        _targets_case("only empty images", ((-1,), (-1,))),
        _targets_case("padding between boxes", ((-1, 3, -1, 1),)),
        _targets_case("no boxes per image", ((),)),
    ),
    tolerances={torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3},
    has_gradients=False,
    pattern=assigner_pattern(
        fcos3d.Assigner,
        fcos3d.FusedAssigner,
        "FCOS3D's targets in a loss, made by steptune.kernels.fcos3d.Assigner",
        "fcos3d_targets",
    ),
)


def _compacted(compact: Callable[..., list[Tensor]]) -> Callable[..., Tensor]:
    """Wrap a function that compacts coordinates, so that it returns the selected distances and boxes in one tensor."""

    def function(*, distances: Tensor, boxes: Tensor) -> Tensor:
        points, num_boxes, _ = distances.shape
        chosen = torch.arange(points, device=distances.device) * 7 % num_boxes
        return torch.cat(compact((distances.detach(), boxes.detach()), chosen), 1)

    return function


COMPACTION = Kernel(
    name="compaction",
    summary="coordinate compaction: each point gets the values of its box, without building an index of points",
    function=_compacted(compaction.compact),
    reference=_compacted(compaction.reference),
    cases=(
        Case(label="several blocks", shapes={"distances": (77, 5, 4), "boxes": (77, 5, 9)}),
        Case(label="one box", shapes={"distances": (3, 1, 4), "boxes": (3, 1, 9)}),
        Case(label="other parts", shapes={"distances": (33, 3, 16), "boxes": (33, 3, 1)}),
    ),
    tolerances={torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0},
    has_gradients=False,
)


def _sent(compensate_and_select: Callable[..., deep_gradient.Sent]) -> Callable[..., Tensor]:
    """Wrap an in-place function of deep gradient compression (compensation and selection), so that it returns its
    outputs and its updated inputs in one tensor.
    """

    def function(*, settings: tuple[deep_gradient.Settings, ...], threshold: float, **tensors: Tensor) -> Tensor:
        first = tensors["gradients_0"]
        dtype = first.dtype if first.dtype == torch.float64 else torch.float32
        lists = [
            [
                tensors[f"{name}_{n}"].detach().to(dtype).clone(memory_format=torch.contiguous_format)
                for n in range(len(settings))
            ]
            for name in _DEEP_GRADIENT
        ]
        thresholds = torch.full((len(settings),), threshold, dtype=dtype, device=first.device)
        sent = compensate_and_select(*lists, thresholds, settings)
        kept = [tensor.flatten() for own in lists[1:] for tensor in own]
        return torch.cat([sent.values, sent.places.to(dtype) / 1000, sent.thresholds, *kept]).to(first.dtype)

    return function


_DEEP_GRADIENT = ("gradients", "momenta", "unsent")


def _sending(label: str, momentum: float, threshold: float, *, nesterov: bool = False, share: float = 0.05) -> Case:
    counts = [max(1, int(share * math.prod(shape))) for shape in _TENSORS]
    settings = tuple(deep_gradient.Settings(momentum, nesterov, count) for count in counts)
    return _optimizer_case(label, _DEEP_GRADIENT, settings, threshold=threshold)


DEEP_GRADIENT = Kernel(
    name="deep_gradient",
    summary="deep gradient compression over all tensors: momentum correction, counting and selection",
    function=_sent(deep_gradient.compensate_and_select),
    reference=_sent(deep_gradient.reference),
    cases=(
        _sending("momentum", 0.9, 3.3),
        _sending("Nesterov", 0.9, 4.5, nesterov=True),
        _sending("no momentum", 0.0, 2.5),
        _sending("everything is beyond", 0.9, 1e-6),
        _sending("nothing is beyond", 0.9, 1e3),
        _sending("all are sent", 0.9, 0.0, share=1.0),
    ),
    tolerances={torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2},
    has_gradients=False,
    in_graphs=False,
)


def _in_8_bits(encode: Callable[..., Any], mean_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Combine an 8-bit encoder and the function that averages encoded rows over ranks into a function that returns this
    mean and all decoded rows in one tensor.
    """

    def function(*, rows: Tensor) -> Tensor:
        ranks, num_rows, length = rows.shape
        given = rows.detach() if rows.dtype == torch.float64 else rows.detach().float()
        payload, scales = encode(given.reshape(-1, length))
        mean = mean_of(payload.view(ranks, num_rows, length), scales.view(ranks, num_rows))
        return torch.cat([mean.flatten(), (payload.to(scales.dtype) * scales[:, None]).flatten()]).to(rows.dtype)

    return function


INT8_BLOCKS = Kernel(
    name="int8_blocks",
    summary="8-bit blocks with one scale each: encoding, and mean over ranks",
    function=_in_8_bits(int8_blocks.encode, int8_blocks.mean_of),
    reference=_in_8_bits(int8_blocks.encode_reference, int8_blocks.mean_reference),
    cases=(
        Case(label="two ranks", shapes={"rows": (2, 5, 256)}),
        Case(label="one rank, many rows", shapes={"rows": (1, 33, 256)}),
        Case(label="three ranks, short rows", shapes={"rows": (3, 7, 16)}),
    ),
    tolerances={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2},
    has_gradients=False,
    in_graphs=False,
)


def _registered() -> tuple[Kernel, ...]:
    """Load the kernels that other packages register.

    Raises:
        ImportError: An entry point cannot be loaded.
        TypeError: An entry point is not a kernel.
        ValueError: A kernel's name is taken or differs from its entry point's, or the kernel has no pattern.
    """
    found: list[Kernel] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        where = f"the entry point {entry.name} of {GROUP} ({entry.value})"
        try:
            kernel = entry.load()
        except Exception as error:
            raise ImportError(f"{where} cannot be loaded ({error}): repair or uninstall its package") from error
        if not isinstance(kernel, Kernel):
            raise TypeError(f"{where} must name a steptune.kernels.Kernel, not {kernel!r}")
        if kernel.name != entry.name:
            raise ValueError(
                f"{where} names the kernel {kernel.name!r}: use the same name for the entry point and the kernel"
            )
        if kernel.name in (*(own.name for own in _OWN), *(other.name for other in found)):
            raise ValueError(f"{where} has the name of another kernel: choose a different name")
        if kernel.pattern is None:
            raise ValueError(
                f"{where} has no pattern: set Kernel.pattern to one that matches the parts that the kernel replaces"
            )
        found.append(kernel)
    return tuple(found)


_OWN = (WINDOW_ATTENTION, LAMB, LARS, SIMOTA, FCOS3D, COMPACTION, DEEP_GRADIENT, INT8_BLOCKS)
KERNELS: tuple[Kernel, ...] = (*_OWN, *_registered())


def kernel_named(name: str) -> Kernel:
    """Return the kernel with this name.

    Raises:
        KeyError: No kernel has that name.
    """
    return {kernel.name: kernel for kernel in KERNELS}[name]
