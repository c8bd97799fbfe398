"""LAMB and LARS over all tensors at once: how tensors lie in memory, how many chunks they have, and what is refused."""

import os

import pytest
import torch

ON_DEVICE = torch.cuda.is_available()
if not ON_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="kernels need triton")

from steptune.kernels import lamb, lars, multi_tensor  # noqa: E402

DEVICE = "cuda" if ON_DEVICE else "cpu"
LAMB = lamb.Settings(rate=0.01, decay1=0.9, share1=0.1, decay2=0.99, share2=0.01, weight_decay=0.1)
LARS = lars.Settings(rate=0.1, kept=0.9, share=1.0, weight_decay=0.1)
TOLERANCE = 2e-6


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def check(lists: list[list[torch.Tensor]]) -> None:
    """Both optimizers over parameters, gradients and two states, against the references in FP64."""
    wide = [[tensor.double() for tensor in own] for own in lists]
    count = len(lists[0])
    copies = [[tensor.double() for tensor in own] for own in lists]
    lars_lists = [[laid_out(tensor) for tensor in own] for own in lists[:3]]
    lamb.lamb(*lists, [LAMB] * count, 1.0)
    lamb.reference(*wide, [LAMB] * count, 1.0)
    lars.lars(*lars_lists, [LARS] * count)
    lars.reference(*copies[:3], [LARS] * count)
    for found, wanted in zip([*lists, *lars_lists], [*wide, *copies[:3]], strict=True):
        assert worst(found, wanted) < TOLERANCE


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor).copy_(tensor)


def random_lists(shapes: list[tuple[int, ...]]) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    lists = [[torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes] for _ in range(4)]
    return [*lists[:3], [tensor.abs() for tensor in lists[3]]]


def test_a_tensor_of_more_chunks_than_are_added_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_tensor, "CHUNK", 16)
    check(random_lists([(16 * 1030 + 5,), (3,)]))


def test_tensors_whose_addresses_are_not_aligned() -> None:
    """Views one element into their memory."""
    lists = [[torch.cat([t.new_zeros(1), t.flatten()])[1:] for t in own] for own in random_lists([(5000,), (130,)])]
    assert all(tensor.data_ptr() % 16 for own in lists for tensor in own)
    check(lists)


def test_dimensions_in_another_order_in_memory() -> None:
    lists = [
        [tensor.to(memory_format=torch.channels_last) for tensor in own] for own in random_lists([(8, 4, 3, 3)] * 2)
    ]
    assert not any(tensor.is_contiguous() for own in lists for tensor in own)
    check(lists)


def test_a_tensor_of_zeros_is_moved_by_the_rate_alone() -> None:
    lists = random_lists([(40,)])
    lists[0][0].zero_()
    norms = lamb.lamb(*lists, [LAMB])
    assert norms[0, 0] == 0
    assert norms[0, 2] == 1


def test_gradients_stay() -> None:
    lists = random_lists([(40,), (7,)])
    before = [gradient.clone() for gradient in lists[1]]
    lamb.lamb(*lists, [LAMB] * 2, 0.1)
    lars.lars(*lists[:3], [LARS] * 2)
    assert all(torch.equal(a, b) for a, b in zip(before, lists[1], strict=True))


def test_two_steps_find_the_memory_of_new_gradients() -> None:
    """Addresses of gradients change from step to step."""
    lists = random_lists([(300,)])
    wide = [[tensor.double() for tensor in own] for own in lists]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        gradient = torch.randn(300, generator=generator)
        lists[1], wide[1] = [gradient.to(DEVICE)], [gradient.to(DEVICE).double()]
        lamb.lamb(*lists, [LAMB])
        lamb.reference(*wide, [LAMB])
    assert worst(lists[0], wide[0]) < TOLERANCE


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        (lambda: [torch.zeros(3, dtype=torch.float64)], "not torch.float64"),
        (lambda: [torch.zeros(6)[::2]], "without gaps in memory; one of shape (3,)"),
        (lambda: [torch.zeros(3), torch.zeros(3, device="meta")], "on one device; they are on cpu, meta"),
        (lambda: [torch.zeros(2, 3).t()], ""),
    ],
)
def test_parameters_that_cannot_be_updated_are_refused_with_the_reason(parameters, reason: str) -> None:
    found = multi_tensor.reason_against(parameters())
    assert reason in found
    assert bool(found) == bool(reason)
