"""Strategies of memory and device input on a real device: the same training, and the memory that they are for."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

import steptune
from steptune.tuner.records import Choice
from steptune.tuner.strategies import STRATEGIES, strategy_named
from steptune.tuner.strategies.allocator.strategy import Allocator
from steptune.tuner.strategies.combine import make_plan
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.job import TrainingJob

pytestmark = pytest.mark.filterwarnings("ignore")
DEVICE = torch.device("cuda", 0)
BATCH = 32


class Block(nn.Module):
    """Attention and a feed-forward part, of a size that activations weigh more than parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(batch, tokens, width)
        return x + self.feed(x)


class Vision(steptune.Workload):
    """A small vision transformer."""

    global_batch = BATCH

    def model(self) -> nn.Module:
        layers = [nn.Conv2d(3, 256, 16, 16), nn.Flatten(2)]
        return nn.ModuleDict(
            {
                "patches": nn.Sequential(*layers),
                "blocks": nn.ModuleList(Block(256) for _ in range(6)),
                "head": nn.Linear(256, 10),
            }
        )

    def dataset(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (4 * BATCH, 3, 224, 224), dtype=torch.uint8, generator=generator)
        self.bytes, self.labels = images, torch.randint(10, (4 * BATCH,), generator=generator)
        return TensorDataset(self.converted(images), self.labels)

    def converted(self, images: torch.Tensor) -> torch.Tensor:
        return (images.float() / 255 - 0.45) / 0.25

    def byte_dataset(self, dataset: Any) -> Any:
        return TensorDataset(self.bytes, self.labels)

    def from_bytes(self, batch: Any) -> Any:
        return self.converted(batch[0]), batch[1]

    def sampler(self, dataset: Any) -> Any:
        return torch.utils.data.SequentialSampler(dataset)

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        """Calm, so that rounding stays rounding."""
        return torch.optim.SGD([p for _, p in named_parameters], lr=1e-3)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        images, labels = batch
        x = model["patches"](images).transpose(1, 2)
        for block in model["blocks"]:
            x = block(x)
        return F.cross_entropy(model["head"](x.mean(1)), labels)


class Rectified(Vision):
    """Convolutions between ReLUs and a pooling."""

    def model(self) -> nn.Module:
        def layer(width: int, out: int) -> list[nn.Module]:
            return [nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]

        body = [*layer(3, 32), nn.MaxPool2d(3, 2, 1), *layer(32, 64), nn.MaxPool2d(2), *layer(64, 64)]
        return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


class Encoder(Vision):
    """torch's own encoder."""

    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True, norm_first=True)
        return nn.ModuleDict(
            {
                "patches": nn.Sequential(nn.Conv2d(3, 256, 16, 16), nn.Flatten(2)),
                "encoder": nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
                "head": nn.Linear(256, 10),
            }
        )

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        x = model["encoder"](model["patches"](batch[0]).transpose(1, 2))
        return F.cross_entropy(model["head"](x.mean(1)), batch[1])


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(False)


def build(workload: steptune.Workload, **choices: Choice) -> TrainingJob:
    complete = {s.name: {**s.defaults, **choices.get(s.name, {})} for s in STRATEGIES}
    torch.manual_seed(0)
    return assemble(workload, make_plan(complete), device=DEVICE)


def train(job: TrainingJob, steps: int = 4) -> tuple[list[float], int]:
    """Losses, and the peak of allocated memory of the steps after the first."""
    torch.manual_seed(1)
    losses = []
    for number, batch in enumerate(job):
        if number == 1:
            torch.cuda.synchronize(DEVICE)
            torch.cuda.reset_peak_memory_stats(DEVICE)
        losses.append(float(job.step(batch)))
        if len(losses) == steps:
            break
    return losses, torch.cuda.max_memory_allocated(DEVICE)


def compared(workload: Callable[[], steptune.Workload], **choices: Choice) -> tuple[Any, Any, TrainingJob]:
    plain = train(build(workload()))
    gc.collect()
    torch.cuda.empty_cache()
    job = build(workload(), **choices)
    return plain, train(job), job


PINNED: Choice = {"pin_memory": True}


class TestPrefetch:
    def test_trains_as_without(self) -> None:
        """Reductions of the device are not bit for bit the same in two runs."""
        (plain, _), (ahead, _), _ = compared(Vision, device_prefetch={"ahead": True}, data_loading=PINNED)
        assert ahead == pytest.approx(plain, rel=1e-5)

    def test_bytes_train_as_floats(self) -> None:
        choice: Choice = {"ahead": True, "as_bytes": True}
        (plain, _), (ahead, _), job = compared(Vision, device_prefetch=choice, data_loading=PINNED)
        assert ahead == pytest.approx(plain, rel=1e-3)
        assert strategy_named("device_prefetch").evidence(job) == choice

    def test_batches_stay_whole_while_the_device_is_busy(self) -> None:
        """Compute waits for the copy, and memory is not given away while it is in use."""
        job = build(Vision(), device_prefetch={"ahead": True}, data_loading=PINNED)
        expected = [batch[0].double().sum() for batch in torch.utils.data.DataLoader(job.loader.dataset, BATCH)]
        sums = []
        for images, _ in job:
            torch.cuda._sleep(20_000_000)
            sums.append(images.double().sum())
            del images
            torch.empty(3 * BATCH * 224 * 224, device=DEVICE).fill_(1e9)
        found = torch.stack(sums).cpu()
        assert torch.allclose(found, torch.stack(expected), rtol=1e-9)

    def test_the_copy_runs_on_another_stream_than_what_computes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Deterministic algorithms would fill what a copy is about to overwrite, where it is about to be copied to."""
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        job = build(Vision(), device_prefetch={"ahead": True}, data_loading=PINNED)
        iterator = iter(job)
        job.step(next(iterator))
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorder:
            for _ in range(2):
                job.step(next(iterator))
            torch.cuda.synchronize(DEVICE)
        events = [event for event in recorder.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        copies = {event.device_resource_id for event in events if "HtoD" in event.name and "Pinned" in event.name}
        computing = [event for event in events if not event.name.startswith("Mem") and not event.is_user_annotation]
        assert copies, [event.name for event in events][:50]
        assert computing
        beside = [event.name for event in computing if event.device_resource_id in copies]
        assert not beside, beside


class TestCheckpointing:
    @pytest.mark.parametrize(
        "choice",
        [{"every": 1}, {"every": 2}, {"every": 1, "save": "products"}, {"every": 1, "save": "attention"}],
        ids=str,
    )
    def test_needs_less_memory_for_the_same_training(self, choice: Choice) -> None:
        (plain, before), (recomputed, after), job = compared(Vision, activation_checkpointing=choice)
        assert recomputed == pytest.approx(plain, rel=1e-4)
        assert after < 0.95 * before
        strategy = strategy_named("activation_checkpointing")
        assert strategy.took_effect(strategy.evidence(job), {**strategy.defaults, **choice}).took

    def test_what_is_saved_lies_between_all_and_nothing(self) -> None:
        peaks = []
        for choice in ({}, {"every": 1, "save": "products"}, {"every": 1}):
            peaks.append(train(build(Vision(), activation_checkpointing=choice))[1])
            gc.collect()
        assert peaks[0] > peaks[1] > peaks[2]

    def test_attention_with_dropout_is_recomputed_with_the_same_mask(self) -> None:
        """Flash attention draws its mask on the device."""
        from steptune.tuner.strategies.activation_checkpointing.strategy import checkpointed

        class Dropping(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.qkv = nn.Linear(128, 384)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 64).permute(2, 0, 3, 1, 4)
                y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).transpose(1, 2).reshape(x.shape)
                return F.dropout(F.gelu(y), 0.5)

        gradients = []
        for save in (None, "attention", "products"):
            torch.manual_seed(0)
            block = nn.Sequential(Dropping(), nn.LayerNorm(128)).to(DEVICE, torch.bfloat16)
            if save is not None:
                checkpointed(block, save)
            x = torch.randn(4, 256, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
            torch.manual_seed(5)
            block(x).float().square().mean().backward()
            gradients.append(x.grad.float())
        assert torch.allclose(gradients[1], gradients[0], rtol=1e-2, atol=1e-7)
        assert torch.allclose(gradients[2], gradients[0], rtol=1e-2, atol=1e-7)


class TestCompression:
    @pytest.mark.parametrize(
        ("form", "share"), [("relu_mask", 0.95), ("relu_sparse", 0.95), ("bfloat16", 0.9), ("int8", 0.8)]
    )
    def test_needs_less_memory(self, form: str, share: float) -> None:
        (plain, before), (packed, after), job = compared(Rectified, activation_compression={"kept_as": form})
        assert after < share * before
        assert packed == pytest.approx(plain, rel=1e-5 if form.startswith("relu") else 2e-2)
        strategy = strategy_named("activation_compression")
        effect = strategy.took_effect(strategy.evidence(job), {"kept_as": form})
        assert effect.took, effect.detail

    @pytest.mark.parametrize("form", ["bfloat16", "int8"])
    def test_transformers_too(self, form: str) -> None:
        (plain, before), (packed, after), _ = compared(Vision, activation_compression={"kept_as": form})
        assert after < 0.95 * before
        assert packed == pytest.approx(plain, rel=2e-2)

    def test_lossless_gradients_are_torch_s(self) -> None:
        gradients = []
        for form in (None, "relu_mask", "relu_sparse"):
            job = build(Rectified(), activation_compression={"kept_as": form})
            job.on_gradients = lambda found: gradients.append([g.clone() for g in found])
            job.step(next(iter(job)))
        for other in gradients[1:]:
            for ours, theirs in zip(other, gradients[0], strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


class TestLayouts:
    def test_batch_second_trains_alike(self) -> None:
        (plain, _), (second, _), job = compared(Encoder, memory_format={"batch_second": True})
        assert second == pytest.approx(plain, rel=1e-3)
        assert strategy_named("memory_format").evidence(job)["batch_second"]


class TestAttention:
    @pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn", "math"])
    def test_the_back_end_that_is_asked_for_runs(self, backend: str) -> None:
        job = build(Vision(), attention_backend={"backend": backend}, precision={"level": "O1", "dtype": "bfloat16"})
        iterator = iter(job)
        job.step(next(iterator))
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorder:
            job.step(next(iterator))
        names = tuple(event.key for event in recorder.key_averages())
        effect = strategy_named("attention_backend").took_effect({"operators": names}, {"backend": backend})
        assert effect.took, effect.detail
        assert effect.detail.startswith("ran ")


ASKED = """
import json, torch
from steptune.tuner.strategies.allocator.strategy import settings_of
torch.empty(64 << 20, device="cuda")
print(json.dumps(settings_of(torch.cuda.memory._snapshot())))
"""


class TestAllocator:
    @pytest.mark.parametrize(
        "choice",
        [
            {"expandable_segments": True, "max_split_size_mb": None},
            {"expandable_segments": False, "max_split_size_mb": 128},
            {"expandable_segments": False, "max_split_size_mb": None},
        ],
        ids=str,
    )
    def test_the_settings_took_effect(self, choice: Choice) -> None:
        import json

        clean = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
        environment = {**clean, **Allocator().environment_variables(choice)}
        done = subprocess.run(
            [sys.executable, "-c", ASKED], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found == choice
        assert Allocator().took_effect(found, choice).took
