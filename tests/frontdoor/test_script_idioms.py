"""Every idiom of a training loop is recognised from outside, item by item, and computes what it computes without us."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import pytest
from script_runs import ScriptFolder, interpreter, losses

from steptune.tuner.scripts.recognised import recognised, remarks


@dataclass(frozen=True)
class Idiom:
    """A script, and what is to be recognised in it.

    Attributes:
        optimizers: Kinds of those in a step, in order.
        backwards, batches: In a step.
        dataset: Of the training loader; None without one in the loop.
        items: A part of an item's text, by the item's name.
        note: A part of a remark.
        library: What it needs beside torch.
    """

    script: str
    optimizers: tuple[str, ...]
    backwards: int
    batches: int
    dataset: str | None
    models: tuple[str, ...]
    items: dict[str, str] = field(default_factory=dict)
    note: str = ""
    library: str | None = None


IDIOMS = (
    Idiom(
        script="plain.py",
        optimizers=("AdamW",),
        backwards=1,
        batches=1,
        dataset="TensorDataset",
        models=("Sequential",),
        items={
            "step": "plain.py:18 in train",
            "loader": "batches of 8, 96 an epoch, 0 workers, not pinned",
            "optimizer": "plain.py:35 in main",
            "precision": "FP32, no autocast, no gradient scaler",
            "clipping": "norm at most 1",
            "schedule": "CosineAnnealingLR",
            "accumulation": "none",
        },
    ),
    Idiom(
        script="gan.py",
        optimizers=("Adam", "Adam"),
        backwards=3,
        batches=1,
        dataset="Pictures",
        models=("Sequential", "Sequential"),
        items={"step": "1 x Adam #1 + 1 x Adam #2, 3 backward passes, 1 batch; gan.py:42", "accumulation": "none"},
    ),
    Idiom(
        script="own_batches.py",
        optimizers=("AdamW",),
        backwards=4,
        batches=0,
        dataset=None,
        models=("Sequential",),
        items={
            "loader": "creates its batches without a loader",
            "optimizer": "fused",
            "precision": "autocast on cpu bfloat16, no gradient scaler",
            "accumulation": "4 backward passes a step",
        },
    ),
    Idiom(
        script="by_hand.py",
        optimizers=(),
        backwards=1,
        batches=0,
        dataset=None,
        models=("LSTM", "Linear"),
        items={"step": "one backward pass (parameters are updated by hand)", "optimizer": "none"},
        note="2 modules are called separately",
    ),
    Idiom(
        script="own_trainer.py",
        optimizers=("SGD",),
        backwards=1,
        batches=1,
        dataset="TensorDataset",
        models=("Linear",),
        items={"loader": "1 worker", "optimizer": "foreach", "step": "in run"},
    ),
    Idiom(
        script="reinforcement.py",
        optimizers=("Adam",),
        backwards=1,
        batches=0,
        dataset=None,
        models=("Sequential", "Sequential"),
        note="2 modules are called separately",
    ),
    Idiom(
        script="averaged.py",
        optimizers=("AdamW",),
        backwards=2,
        batches=2,
        dataset="TensorDataset",
        models=("Task",),
        items={"accumulation": "2 micro-batches a step", "optimizer": "in 2 groups", "model": "channels last"},
    ),
    Idiom(
        script="detection.py",
        optimizers=("SGD",),
        backwards=1,
        batches=1,
        dataset="Scenes",
        models=("Detector",),
        items={"schedule": "LinearLR"},
    ),
    Idiom(
        script="lbfgs.py",
        optimizers=("LBFGS",),
        backwards=4,
        batches=0,
        dataset=None,
        models=("Sequential",),
        items={"step": "inside the optimizer's step", "accumulation": "none"},
    ),
    Idiom(
        script="recommender.py",
        optimizers=("SGD",),
        backwards=1,
        batches=1,
        dataset="Clicks",
        models=("Sequential",),
        note="sparse",
    ),
    Idiom(
        script="compiled.py",
        optimizers=("SGD",),
        backwards=1,
        batches=1,
        dataset="TensorDataset",
        models=("Sequential",),
        items={"compile": "Sequential (backend='aot_eager')", "precision": "autocast on cpu bfloat16"},
    ),
    Idiom(
        script="hf_trainer.py",
        optimizers=("AdamW",),
        backwards=2,
        batches=2,
        dataset="Texts",
        models=("GPT2LMHeadModel",),
        items={"trainer": "transformers OwnLoss", "accumulation": "2 micro-batches a step"},
        library="transformers",
    ),
    Idiom(
        script="accelerated.py",
        optimizers=("AdamW",),
        backwards=2,
        batches=2,
        dataset="TensorDataset",
        models=("Sequential",),
        items={"trainer": "gradient_accumulation_steps=2", "precision": "bfloat16"},
        library="accelerate",
    ),
    Idiom(
        script="lightning_automatic.py",
        optimizers=("Adam",),
        backwards=1,
        batches=1,
        dataset="TensorDataset",
        models=("Sequential",),
        items={"trainer": "lightning Trainer"},
        library="lightning",
    ),
    Idiom(
        script="lightning_manual.py",
        optimizers=("Adam", "Adam"),
        backwards=2,
        batches=1,
        dataset="TensorDataset",
        models=("Linear", "Linear"),
        items={"trainer": "lightning Trainer"},
        library="lightning",
    ),
)


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.script.removesuffix(".py"))
def test_an_idiom_is_recognised_and_computes_the_same(idiom: Idiom, folder: ScriptFolder) -> None:
    command = (interpreter(idiom.library), folder.add(idiom.script))
    before = folder.files()

    run = folder.profiled(*command)

    assert not run.profile.refusal, f"{run.profile.refusal}\n{run.out}\n{run.err}"
    record = run.first
    kinds = {optimizer.number: optimizer.kind for optimizer in record.optimizers}
    assert record.step.optimizers is not None
    assert tuple(kinds[number] for number in record.step.optimizers) == idiom.optimizers
    assert (record.step.num_backwards, record.step.num_batches) == (idiom.backwards, idiom.batches)
    loader = record.training_loader
    assert (loader.dataset if loader is not None else None) == idiom.dataset
    assert tuple(model.kind for model in record.models) == idiom.models
    texts = {item.name: item.text for item in recognised(record)}
    for name, part in idiom.items.items():
        assert part in texts[name]
    assert idiom.note in " ".join(remarks(record))
    breakdown = run.profile.breakdowns[0]
    assert breakdown.num_steps == len(record.recorded_step_ns)
    assert breakdown.facts.own_capture

    assert idiom.library or not run.err, "what the script does not say, it does not say under inspection"
    assert folder.files() == before, "an inspection leaves nothing behind"
    plain = folder.plain(*command)
    assert plain.returncode == 0, plain.stderr
    seen, expected = losses(run.out), losses(plain.stdout)
    assert len(expected) > len(seen) >= record.num_steps, "the script was ended after its steps were recorded"
    assert seen == expected[: len(seen)], "the hooks change no loss"


AUTOCAST_IN_FORWARD = """
from types import MethodType
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
model.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(model.forward.__func__), model)
model = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(1000):
    model(torch.randn(4, 8)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SLEEPS = """
import time
import torch
from torch.utils.data import DataLoader, Dataset
class Sleeps(Dataset):
    def __init__(self, seconds):
        self.seconds = seconds
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.ones(8)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
next(iter(DataLoader(Sleeps(0.0), batch_size=4)))
for batch in DataLoader(Sleeps(0.005), batch_size=2, num_workers=WORKERS):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_autocast_inside_a_compiled_forward_is_seen(folder: ScriptFolder) -> None:
    """As Accelerate, and so the Trainer, prepares a model."""
    (folder.path / "inside.py").write_text(AUTOCAST_IN_FORWARD)
    run = folder.profiled(sys.executable, "inside.py")
    assert not run.profile.refusal, f"{run.profile.refusal}\n{run.err}"
    texts = {item.name: item.text for item in recognised(run.first)}
    assert "autocast on cpu bfloat16" in texts["precision"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_s_time_is_measured_where_batches_are_made(workers: int, folder: ScriptFolder) -> None:
    (folder.path / "sleeps.py").write_text(SLEEPS.replace("WORKERS", str(workers)))
    run = folder.profiled(sys.executable, "sleeps.py")
    assert not run.profile.refusal, f"{run.profile.refusal}\n{run.err}"
    loader = run.first.training_loader
    assert loader is not None
    assert loader.sample_ns is not None
    assert loader.sample_ns >= 5_000_000
    assert "ms a sample" in {item.name: item.text for item in recognised(run.first)}["loader"]
