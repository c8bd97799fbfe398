"""The optimizers once more, a parameter at a time and step by step as the papers write them: the specification."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes a parameter and its gradient; returns the new parameter."""


def norm(x: torch.Tensor) -> float:
    return math.sqrt(sum(float(v) ** 2 for v in x.reshape(-1)))


def lamb(lr: float, betas: tuple[float, float], eps: float, weight_decay: float, exclude_vectors: bool = True) -> Step:
    """LAMB, algorithm 2 of https://arxiv.org/abs/1904.00962, with bias correction."""
    memory: dict[str, torch.Tensor] = {}
    count = 0

    def step(p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        m = betas[0] * memory.get("m", torch.zeros_like(p)) + (1 - betas[0]) * g
        v = betas[1] * memory.get("v", torch.zeros_like(p)) + (1 - betas[1]) * g * g
        memory.update(m=m, v=v)
        u = (m / (1 - betas[0] ** count)) / ((v / (1 - betas[1] ** count)).sqrt() + eps)
        if exclude_vectors and p.dim() < 2:
            return p - lr * u
        u = u + weight_decay * p
        weight, update = norm(p), norm(u)
        ratio = weight / update if weight > 0 and update > 0 else 1.0
        return p - lr * ratio * u

    return step


def lars(lr: float, momentum: float, weight_decay: float, trust: float, exclude_vectors: bool = True) -> Step:
    """LARS, algorithm 1 of https://arxiv.org/abs/1708.03888: the local rate is inside of the momentum."""
    velocity: torch.Tensor | None = None

    def step(p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        nonlocal velocity
        rate = lr
        if not (exclude_vectors and p.dim() < 2):
            weight, slope = norm(p), norm(g)
            if weight > 0 and slope > 0:
                rate = lr * trust * weight / (slope + weight_decay * weight)
            g = g + weight_decay * p
        velocity = rate * g if velocity is None else momentum * velocity + rate * g
        return p - velocity

    return step


def sm3(lr: float, momentum: float, weight_decay: float) -> Step:
    """SM3-II of https://arxiv.org/abs/1901.11150 on matrices and vectors, element by element."""
    rows: dict[int, float] = {}
    columns: dict[int, float] = {}
    average: torch.Tensor | None = None

    def step(p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        nonlocal average
        flat_p, flat_g = p.reshape(p.shape[0], -1), g.reshape(g.shape[0], -1)
        is_vector = p.dim() == 1
        direction = torch.zeros_like(flat_p)
        new_rows: dict[int, float] = {}
        new_columns: dict[int, float] = {}
        for i in range(flat_p.shape[0]):
            for j in range(flat_p.shape[1]):
                covers = [rows.get(i, 0.0)] if is_vector else [rows.get(i, 0.0), columns.get(j, 0.0)]
                total = min(covers) + float(flat_g[i, j]) ** 2
                new_rows[i] = max(new_rows.get(i, 0.0), total)
                new_columns[j] = max(new_columns.get(j, 0.0), total)
                direction[i, j] = float(flat_g[i, j]) / math.sqrt(total) if total else 0.0
        rows.update(new_rows)
        columns.update(new_columns)
        direction = direction.reshape(p.shape)
        if momentum:
            average = (1 - momentum) * direction + (momentum * average if average is not None else 0.0)
            direction = average
        return p * (1 - lr * weight_decay) - lr * direction

    return step
