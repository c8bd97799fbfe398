"""The examples that classify images, as scripts of a user would make them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from examples.digits_vit import Digits, VisionTransformer
from examples.photo_resnet import PhotoResNet, Photos, ResNet


def digits(folder: Path) -> tuple[Any, Any, Any]:
    """Model, dataset, and what makes the optimizer of parameters and its export's arguments."""
    return VisionTransformer(), Digits(), partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.05)


def photo(folder: Path) -> tuple[Any, Any, Any]:
    if not (folder / "photos").is_dir():
        PhotoResNet().prepare(folder)
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-4)
    return ResNet(), Photos(folder / "photos"), optimizer


EXAMPLES = {"digits": digits, "photo": photo}
