"""Which updates of a script excuse that its candidate stands further from the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steptune.tuner.scripts.guard_files import JudgeRequest
from steptune.tuner.scripts.judge import _Judgement

LR = 0.5
REQUEST = JudgeRequest(
    reference="", repeated="", disturbed={}, candidate="", unit_roundoff=6e-8, own_roundoff=6e-8, device="cpu"
)


def run(*modules: str, wrong: bool = False, moved: float = 0.0) -> dict[str, Any]:
    """Four steps of one optimizer for each module, over a weight of its own; `moved` is added between its updates."""
    weights = [torch.ones(2, dtype=torch.float64) for _ in modules]
    steps = []
    for _ in range(4):
        updates = []
        for number, module in enumerate(modules):
            gradient = weights[number] / 4
            after = weights[number] - LR * gradient * (1.01 if wrong else 1.0)
            updates.append(
                {
                    "number": number,
                    "kind": "SGD",
                    "module": module,
                    "before": {"w": weights[number]},
                    "after": {"w": after},
                    "gradients": {"w": gradient},
                    "norm": float(gradient.norm()),
                    "states": {"w": {}},
                    "groups": [{"names": ["w"], "options": {**torch.optim.SGD([torch.ones(1)], lr=LR).defaults}}],
                    "roundoff": 6e-8,
                }
            )
            weights[number] = after + moved
        steps.append({"losses": [], "updates": updates})
    return {"steps": steps, "notes": []}


@pytest.mark.parametrize(
    ("reference", "candidate", "right"),
    [
        (run("torch.optim.sgd"), run("torch.optim.sgd"), True),
        (run("torch.optim.sgd"), run("torch.optim.sgd", wrong=True), False),
        (run("torch.optim.sgd"), run("torch.optim.sgd", moved=0.1), False),
        (run("torch.optim.sgd", moved=0.1), run("torch.optim.sgd", moved=0.1), False),
        (run("torch.optim.sgd", "mine"), run("torch.optim.sgd", "mine"), False),
        (run("mine"), run("mine"), False),
    ],
    ids=["shown", "wrong", "moved between", "the loop moves them", "one of its own", "only its own"],
)
def test_only_updates_that_are_all_shown_excuse_a_distance(
    reference: dict[str, Any], candidate: dict[str, Any], right: bool
) -> None:
    judgement = _Judgement(REQUEST, reference, reference, {}, candidate)
    judgement._check_updates()
    assert judgement._has_right_updates == right
