"""Precision on the device: what leaves float16 is rejected, TF32 is used where asked for, norms stay FP32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from precision_trials import CANDIDATES, PrecisionTrials
from tiny_workloads import Everything

from steptune.tuner.strategies import STRATEGIES, strategy_named
from steptune.tuner.strategies.combine import make_plan
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.workloads.loading import load_workload

NUM_STEPS = 4
EXPERTS = "zoo:mixture_of_experts?batch=2&sequence=8&vocabulary=32&width=16&depth=1&num_heads=2&num_experts=4"


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrecisionTrials]:
    with PrecisionTrials(tmp_path_factory.mktemp("study"), "cuda") as made:
        yield made


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_training_that_leaves_float16_is_rejected_there(trials: PrecisionTrials, level: str) -> None:
    trials.check_rejected(CANDIDATES[level, "float16"])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_same_training_passes_in_bfloat16(trials: PrecisionTrials, level: str) -> None:
    trials.check_passed(CANDIDATES[level, "bfloat16"])


@pytest.fixture(autouse=True)
def fresh_flags() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def build(workload: Any, **precision: Any) -> TrainingJob:
    choices = {s.name: dict(s.defaults) for s in STRATEGIES} | {"precision": precision}
    torch.manual_seed(0)
    return assemble(workload, make_plan(choices), device=torch.device("cuda"))


@pytest.mark.parametrize(
    ("level", "dtype"),
    [("tf32", None), *((level, dtype) for level in ("O1", "O2", "O3") for dtype in ("bfloat16", "float16"))],
)
def test_every_level_trains_and_took_effect(level: str, dtype: str | None) -> None:
    job = build(Everything(), level=level, dtype=dtype)
    losses = [float(job.step(batch)) for batch in list(job)[:NUM_STEPS]]
    if (level, dtype) != ("O3", "float16"):  # AdamW's epsilon is zero in float16: the guard rejects what comes of it
        assert all(loss == loss for loss in losses)
    precision = strategy_named("precision")
    effect = precision.took_effect(precision.evidence(job), {"level": level, "dtype": dtype})
    assert effect.took, effect.detail


def test_tf32_rounds_products_and_fp32_does_not() -> None:
    """1 + 2^-12 has more mantissa than TF32 keeps."""
    factor, one = torch.full((256, 256), 1 + 2.0**-12, device="cuda"), torch.eye(256, device="cuda")
    assert torch.equal(factor @ one, factor)
    build(Everything(), level="tf32", dtype=None)
    assert torch.equal(factor @ one, torch.ones_like(factor))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_float16_step_with_a_fused_optimizer_does_not_wait_for_the_device() -> None:
    """Skipped steps are counted on the device."""
    choices = {s.name: dict(s.defaults) for s in STRATEGIES}
    choices |= {
        "precision": {"level": "O1", "dtype": "float16"},
        "optimizer_implementation": {**choices["optimizer_implementation"], "implementation": "fused"},
    }
    job = assemble(Everything(), make_plan(choices), device=torch.device("cuda"))
    batch = job.to_device(next(iter(job)))
    for _ in range(2):
        job.backward(job.loss(batch))
        job.update()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        job.backward(job.loss(batch))
        job.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert job.skipped_steps == 0


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_batched_experts_run_at_every_level_and_compute_what_looped_ones_do(level: str) -> None:
    losses = []
    for implementation in ("looped", "batched"):
        job = build(load_workload(f"{EXPERTS}&experts={implementation}"), level=level, dtype="bfloat16")
        losses.append([float(job.step(batch)) for _, batch in zip(range(NUM_STEPS), job, strict=False)])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
