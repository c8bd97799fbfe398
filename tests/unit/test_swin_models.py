"""Published Swin models with the window kernel: the same loss, gradients and state, and one graph."""

import copy
import os

import pytest
import torch

ON_DEVICE = torch.cuda.is_available()
if not ON_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="kernels need triton")

from steptune.kernels.applying import refusals, use_kernel, used_kernels  # noqa: E402

DEVICE = torch.device("cuda" if ON_DEVICE else "cpu")
NAME = "window_attention"
SMALL = {"embed_dim": 16, "depths": (2,), "num_heads": (1,), "num_classes": 3, "drop_path_rate": 0.0}


def timm_model(name: str, side: int):
    timm = pytest.importorskip("timm")
    return timm.create_model(name, window_size=4, img_size=side, **SMALL)


def torchvision_model(version: int):
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    parts = {} if version == 1 else {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    sizes = ([4, 4], 16, [2], [1], [4, 4])
    return swin.SwinTransformer(*sizes, stochastic_depth_prob=0.0, num_classes=3, **parts)


def transformers_model(version: int):
    transformers = pytest.importorskip("transformers", minversion="5.20")
    model, config = {
        1: (transformers.SwinForImageClassification, transformers.SwinConfig),
        2: (transformers.Swinv2ForImageClassification, transformers.Swinv2Config),
    }[version]
    sizes = {"embed_dim": 16, "depths": [2], "num_heads": [1], "window_size": 4, "num_labels": 3}
    return Logits(model(config(image_size=20, patch_size=4, drop_path_rate=0.0, **sizes)))


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images).logits


MODELS = {  # made when they are used; the size of their images, which leaves windows padded where the library can pad
    "timm": (lambda: timm_model("swin_tiny_patch4_window7_224", 20), (20, 20)),
    "timm V2": (lambda: timm_model("swinv2_tiny_window8_256", 32), (32, 32)),
    "torchvision": (lambda: torchvision_model(1), (28, 20)),
    "torchvision V2": (lambda: torchvision_model(2), (28, 20)),
    "transformers": (lambda: transformers_model(1), (20, 20)),
    "transformers V2": (lambda: transformers_model(2), (20, 20)),
}


def loss_and_gradients(model, images):
    loss = torch.nn.functional.cross_entropy(model(images), torch.arange(len(images), device=DEVICE))
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_the_kernel_trains_as_published(name):
    torch.manual_seed(0)
    make, size = MODELS[name]
    model = make().to(DEVICE)
    assert refusals(model, DEVICE)[NAME] == ""
    changed = use_kernel(copy.deepcopy(model), NAME)
    assert used_kernels(changed) == {NAME}
    assert not used_kernels(model)
    assert list(changed.state_dict()) == list(model.state_dict())
    images = torch.randn(1, 3, *size, device=DEVICE)
    loss, gradients = loss_and_gradients(model, images)
    found_loss, found = loss_and_gradients(changed, images)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert found.keys() == gradients.keys()
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    for parameter, gradient in gradients.items():
        assert float((found[parameter] - gradient).norm()) <= 1e-4 * float(gradient.norm()) + 1e-6 * largest, parameter


@pytest.mark.parametrize("name", ["transformers", "transformers V2"])
def test_a_model_with_the_kernel_is_one_graph(name):
    make, size = MODELS[name]
    model = use_kernel(make().to(DEVICE), NAME)
    images = torch.randn(1, 3, *size, device=DEVICE)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(images), model(images))


def test_a_model_without_the_pattern_is_refused_in_words():
    refused = refusals(torch.nn.Linear(2, 2), DEVICE)[NAME]
    assert refused == (
        "the model contains no part that this kernel computes "
        "(Swin's shifted-window attention from timm, torchvision or transformers)"
    )
    with pytest.raises(ValueError, match="window_attention: the model contains no part"):
        use_kernel(torch.nn.Linear(2, 2), NAME)


def test_a_layer_that_the_kernel_cannot_compute_is_refused_in_words():
    make, _ = MODELS["transformers"]
    model = make()
    for module in model.modules():
        if type(module).__name__ == "SwinAttention":
            module.register_forward_hook(lambda *_: None)
    assert refusals(model, DEVICE)[NAME] == "hooks are attached to a module that the kernel bypasses"


@pytest.mark.skipif(ON_DEVICE, reason="the device runs it")
def test_a_cpu_is_refused_in_words(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    make, _ = MODELS["transformers"]
    assert refusals(make(), DEVICE)[NAME].startswith("requires a CUDA device")
