"""A classifier on the mean of the tokens, in models that classify a class token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_workloads import AttentionBlock, Everything, image_data
from torch import nn

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.strategies import strategy_named
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.plan import Plan
from steptune.tuner.training.pooled_classifier import is_pooled, pool_tokens
from steptune.tuner.workloads.class_token import known_class_token


class ClassToken(nn.Module):
    """A vision transformer of the first kind: a class token, learned positions, its first output classified."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(3, width, kernel_size=2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(AttentionBlock(width, 2) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Classifies(Everything):
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return ClassToken()

    def class_token(self, model: Any) -> tuple[nn.Module, nn.Module]:
        return model.blocks[0], model.norm


def pooled_by_hand(model: ClassToken, images: torch.Tensor) -> torch.Tensor:
    x = model.patchify(images).flatten(2).transpose(1, 2) + model.positions[:, 1:]
    for block in model.blocks:
        x = block(x)
    return model.head(model.norm(x).mean(dim=1))


class TestPooling:
    def test_is_the_model_written_without_a_class_token(self) -> None:
        model = Classifies().model()
        images = image_data(4).tensors[0]
        expected = pooled_by_hand(model, images)
        assert not torch.allclose(model(images), expected)
        pool_tokens(model, Classifies())
        torch.testing.assert_close(model(images), expected)

    def test_the_class_token_stays_and_gets_no_gradient(self) -> None:
        """So that checkpoints keep their shape, and no parameter is unused."""
        model = pool_tokens(Classifies().model(), Classifies())
        model(image_data(4).tensors[0]).square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        assert not model.token.grad.any()
        assert not model.positions.grad[:, 0].any()
        assert model.positions.grad[:, 1:].any()

    def test_a_job_trains_and_shows_it(self) -> None:
        strategy = strategy_named("model_recipe")
        plan = Plan()
        choice = {"pad_multiple": 8, "pooled_classifier": True}
        strategy.contribute(plan, choice)
        job = assemble(Classifies(), plan, device=torch.device("cpu"))
        losses = [float(job.step(batch)) for _ in range(10) for batch in job]
        assert losses[-1] < losses[0]
        assert strategy.took_effect(strategy.evidence(job), choice).took
        plain = assemble(Classifies(), Plan(), device=torch.device("cpu"))
        assert not strategy.took_effect(strategy.evidence(plain), choice).took

    def test_a_model_whose_class_token_is_not_known_is_refused(self) -> None:
        with pytest.raises(UnsupportedError, match=r"the class token of TinyViT is unknown.*Workload.class_token"):
            pool_tokens(Everything().model(), Everything())


class TestKnown:
    def test_the_classifier_of_transformers(self) -> None:
        transformers = pytest.importorskip("transformers")
        config = transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=8,
            patch_size=2,
            num_labels=3,
        )
        torch.manual_seed(0)
        model = transformers.ViTForImageClassification(config).eval()
        images = image_data(4).tensors[0]
        plain = copy.deepcopy(model)
        pool_tokens(model, Everything())
        x = plain.vit.embeddings(images)[:, 1:]
        for layer in plain.vit.layers:
            x = layer(x)
        expected = plain.classifier(plain.vit.layernorm(x).mean(dim=1))
        torch.testing.assert_close(model(pixel_values=images).logits, expected)
        assert not torch.allclose(plain(pixel_values=images).logits, expected)
        assert is_pooled(model, Everything())

    @pytest.mark.parametrize(("library", "model_name"), [("torchvision", "vit_b_16"), ("timm", "vit_tiny_patch16_224")])
    def test_those_of_other_libraries(self, library: str, model_name: str) -> None:
        module = pytest.importorskip(f"{library}.models" if library == "torchvision" else library)
        make = getattr(module, model_name) if library == "torchvision" else lambda: module.create_model(model_name)
        model = make().eval()
        images = torch.randn(1, 3, 224, 224)
        blocks, _ = known_class_token(model)  # type: ignore[misc]
        lengths: list[int] = []
        blocks.register_forward_hook(lambda m, a, out: lengths.append(out.shape[1]))
        pool_tokens(model, Everything())
        assert model(images).shape == (1, 1000)
        assert lengths == [196]

    def test_any_other_model_has_none(self) -> None:
        assert known_class_token(nn.Linear(2, 2)) is None
        assert known_class_token(ClassToken()) is None
