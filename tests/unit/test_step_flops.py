"""The FLOP of a step beside those that torch counts, on models of other people."""

from pathlib import Path
from typing import Any

import pytest

from steptune.tuner.profiling.call_work import group_calls
from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.modules import find_modules
from steptune.tuner.profiling.operator_calls import operator_calls
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.roofline import roofline
from steptune.tuner.trace_records import Roofline

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TOKENS = {"vocab_size": 100, "max_position_embeddings": 64}
IMAGES = {"image_size": 32, "patch_size": 8}
TEXT_MODELS = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64}),
    "LlamaForCausalLM": ("LlamaConfig", SMALL | TOKENS | {"num_key_value_heads": 2}),
    "BertForMaskedLM": ("BertConfig", SMALL | TOKENS),
    "MixtralForCausalLM": ("MixtralConfig", SMALL | TOKENS | {"num_key_value_heads": 2, "num_local_experts": 4}),
}
IMAGE_MODELS = {
    "ViTForImageClassification": ("ViTConfig", SMALL | IMAGES),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "bottleneck"},
    ),
    "SwinForImageClassification": (
        "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    ),
}


def made(name: str, config: str, options: dict) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**options))


def step_of(name: str):
    """A training step of a model, and the model."""
    if name in TEXT_MODELS:
        model = made(name, *TEXT_MODELS[name])
        tokens = torch.randint(0, 100, (2, 16))
        return model, lambda: model(input_ids=tokens, labels=tokens).loss.backward()
    model = made(name, *IMAGE_MODELS[name])
    images = torch.randn(2, 3, 32, 32)
    return model, lambda: model(pixel_values=images).logits.square().mean().backward()


def grouped_flop(a, b, *args, out_shape=None, **kwargs) -> int:
    """One matmul for each expert, whose rows (or columns) sum up to those of all tokens."""
    return 2 * a[-2] * a[-1] * b[-1]


def counted_by_torch(step) -> int:
    """With torch's own formulas for the attention of a CPU, which its counter leaves out."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    aten = torch.ops.aten
    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *a, **b: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda gradient, q, k, v, *a, **b: sdpa_backward_flop_count(gradient, q, k, v)
        ),
        aten._grouped_mm: grouped_flop,
    }
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        step()
    return counter.get_total_flops()


def counted_by_trace(step, folder: Path) -> Roofline:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace(str(folder / "step.json"))
    trace = read_trace(folder / "step.json")
    capture = link(trace)
    calls = operator_calls(trace, capture.launches, capture.steps.span)
    return roofline(capture, calls, group_calls(capture, calls), find_modules(trace, calls), 1e6)[0]


@pytest.mark.parametrize("name", [*TEXT_MODELS, *IMAGE_MODELS])
def test_the_flop_of_a_step_are_those_that_torch_counts(tmp_path, name):
    _, step = step_of(name)
    found = counted_by_trace(step, tmp_path)
    assert found.step_flops == pytest.approx(counted_by_torch(step), rel=0.01)
    # A CPU has no peak here, and so no utilisation.
    assert (found.mfu, found.peak_known, found.operators) == (None, False, ())


def test_what_is_computed_again_for_a_gradient_does_not_count(tmp_path):
    model, step = step_of("ViTForImageClassification")
    plain = counted_by_torch(step)
    model.activation_checkpointing_enable()
    model.train()
    assert counted_by_torch(step) > 1.2 * plain
    assert counted_by_trace(step, tmp_path).step_flops == pytest.approx(plain, rel=0.01)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_a_convolution_without_a_library_of_its_own_counts(tmp_path):
    """Its gradient is computed by an operator inside of the one that counts."""
    _, step = step_of("ResNetForImageClassification")
    with torch.backends.mkldnn.flags(enabled=False):
        found = counted_by_trace(step, tmp_path)
    assert found.step_flops == pytest.approx(counted_by_torch(step), rel=0.01)


def test_grouped_and_transposed_convolutions(tmp_path):
    """Forward only: torch's counter forgets the groups in the gradient of a weight."""
    network = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=4),
        torch.nn.ConvTranspose2d(8, 4, 3, stride=2),
        torch.nn.Conv2d(4, 4, (3, 5), padding="same", dilation=2),
    )
    images = torch.randn(2, 4, 17, 23)

    def forward() -> None:
        with torch.no_grad():
            network(images)

    assert counted_by_trace(forward, tmp_path).step_flops == counted_by_torch(forward)
