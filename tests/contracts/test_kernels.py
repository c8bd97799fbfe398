"""Duties of every kernel: the values and gradients of its reference, the same bits twice, no trace in compiled graphs.

Assignments are equal to the last box.

On a machine without a GPU Triton interprets the kernels on the CPU, which has no 16-bit brain floats.
"""

import importlib
import os
from collections.abc import Iterator

import pytest
import torch

ON_DEVICE = torch.cuda.is_available()
if not ON_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="kernels need triton")

from steptune.kernels import KERNELS, Case, Kernel  # noqa: E402
from steptune.tuner.installation import PACKAGE  # noqa: E402

DEVICE = torch.device("cuda" if ON_DEVICE else "cpu")
CASES = [pytest.param(kernel, case, id=f"{kernel.name}-{case.label}") for kernel in KERNELS for case in kernel.cases]
FIRST_CASES = [pytest.param(kernel, kernel.cases[0], id=kernel.name) for kernel in KERNELS]
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_DEVICE else [])]


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def inputs(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return case.make(torch.Generator(DEVICE).manual_seed(0), dtype)


def run(function, case: Case, tensors: dict[str, torch.Tensor], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Values and gradients, by name, of a weighted sum of the values."""
    values = function(**tensors, **case.options)
    if not names:
        return {"values": values.detach()}
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).to(values)
    gradients = torch.autograd.grad(values, [tensors[name] for name in names], weights)
    return {"values": values.detach(), **dict(zip(names, gradients, strict=True))}


def in_float64(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().double().requires_grad_() for name, tensor in tensors.items()}


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    wanted = wanted.double()
    return float((found.cpu().double() - wanted).norm() / wanted.norm().clamp_min(1e-300))


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element that a kernel does not write is no number, instead of what the memory held before."""
    empty = torch.empty

    def poisoned(*sizes, **options):
        memory = empty(*sizes, **options)
        return memory.fill_(float("nan")) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_values_and_every_gradient_are_those_of_the_reference(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    tensors, names = inputs(case, dtype), kernel.gradients_of(case)
    found = run(kernel.function, case, tensors, names)
    wanted = run(kernel.reference, case, in_float64(tensors), names)
    errors = {name: relative_error(found[name], wanted[name]) for name in found}
    assert {name: error for name, error in errors.items() if not error <= kernel.tolerances[dtype]} == {}
    assert found["values"].dtype == (dtype if wanted["values"].is_floating_point() else wanted["values"].dtype)


@pytest.mark.parametrize(("kernel", "case"), FIRST_CASES)
def test_two_runs_give_the_same_bits(kernel: Kernel, case: Case) -> None:
    names = kernel.gradients_of(case)
    first, second = (run(kernel.function, case, inputs(case, torch.float32), names) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("kernel", "case"), FIRST_CASES)
def test_inputs_need_not_lie_densely(kernel: Kernel, case: Case) -> None:
    names = kernel.gradients_of(case)
    dense = inputs(case, torch.float32)
    strided = {name: torch.stack([t.detach(), t.detach()], -1)[..., 0].requires_grad_() for name, t in dense.items()}
    assert not any(tensor.is_contiguous() for tensor in strided.values() if tensor.numel() > 1)
    wanted, found = run(kernel.function, case, dense, names), run(kernel.function, case, strided, names)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("kernel", "case"), [case for case in FIRST_CASES if case.values[0].in_graphs])
def test_a_compiled_graph_has_no_break(kernel: Kernel, case: Case) -> None:
    tensors, names = inputs(case, torch.float32), kernel.gradients_of(case)
    compiled = torch.compile(kernel.function, fullgraph=True, backend="aot_eager")
    found, wanted = (run(function, case, tensors, names) for function in (compiled, kernel.function))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_has_a_page_that_says_its_name(kernel: Kernel) -> None:
    page = PACKAGE / "kernels" / kernel.name / "README.md"
    assert page.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.pattern is not None], ids=lambda kernel: kernel.name)
def test_a_profile_without_operators_shows_the_kernel_by_a_device_function(kernel: Kernel) -> None:
    """A replayed graph records device functions alone."""
    functions = vars(importlib.import_module(f"steptune.kernels.{kernel.name}.kernel"))
    assert any(part in name for part in kernel.pattern.operators for name in functions)
