"""Which back end of attention ran, by the names of its operators and kernels."""

from pathlib import Path

import pytest
import torch
from torch.profiler import profile

from steptune.tuner.hardware import find_compiler
from steptune.tuner.strategies.attention_backend.strategy import AttentionBackend, backend_of
from steptune.tuner.training.plan import Plan

NAMES = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_flash_attention_backward": "flash",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)": "efficient",
    "aten::_scaled_dot_product_cudnn_attention_backward": "cudnn",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::scaled_dot_product_attention": None,
    "aten::mm": None,
    "sm90_xmma_gemm_bf16bf16": None,
}


@pytest.mark.parametrize(("name", "backend"), NAMES.items())
def test_a_name_tells_the_back_end(name: str, backend: str | None) -> None:
    """cuDNN's kernels are named after flash attention too."""
    assert backend_of(name) == backend


@pytest.mark.parametrize("wanted", ["flash", "efficient", "cudnn", "math"])
def test_the_one_that_ran_took_effect_and_no_other(wanted: str) -> None:
    for name, backend in NAMES.items():
        if backend is not None:
            effect = AttentionBackend().took_effect({"operators": ("aten::mm", name)}, {"backend": wanted})
            assert effect.took is (backend == wanted)
            assert name in effect.detail


@pytest.mark.parametrize(("wanted", "took"), [("flash", False), ("efficient", False), ("cudnn", False), ("math", True)])
def test_steps_without_a_fused_operator_ran_the_math_back_end_or_no_attention(wanted: str, took: bool) -> None:
    """A compiler makes plain products of it."""
    effect = AttentionBackend().took_effect({"operators": ("aten::mm",)}, {"backend": wanted})
    assert effect.took is took
    assert effect.detail == "the profiled steps ran no fused attention operator"


def test_without_a_profile_nothing_shows_it_and_that_is_said() -> None:
    effect = AttentionBackend().took_effect({"operators": ()}, {"backend": "flash"})
    assert effect.detail == "the step was not profiled, so the back end that ran is unknown"


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).unflatten(-1, (4, 4)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.skipif(find_compiler() is None, reason="torch.compile needs a C++ compiler here")
def test_compiled_code_of_another_one_is_not_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    assert {backend: ran_flash(backend) for backend in ("math", "flash")} == {"math": False, "flash": True}


def ran_flash(backend: str) -> bool:
    """Compiled for itself, with settings of its own, as every trial is a process of its own."""
    plan = Plan()
    AttentionBackend().contribute(plan, {"backend": backend})
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.compiler.config.patch(cache_key_tag=""):  # type: ignore[attr-defined]
        for setting in plan.environment:
            setting()
        model = torch.compile(Attention())
        (restrict,) = plan.step.contexts
        with restrict():
            model(torch.randn(2, 8, 16)).sum().backward()
            with profile() as seen:  # of what was compiled, not of compiling it
                model(torch.randn(2, 8, 16)).sum().backward()
    torch._dynamo.reset()
    return any(backend_of(event.key) == "flash" for event in seen.key_averages())
