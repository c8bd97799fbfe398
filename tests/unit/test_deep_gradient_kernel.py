"""Deep gradient compression by its kernel: nothing is lost, and the threshold follows what is kept."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="kernels need triton")

from steptune.tuner.training.compression.deep_gradient import DeepGradient

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = ((60, 100), (7, 300))
WANTED = 60 + 21
"""A hundredth of each."""


class Step:
    """One rank's compression of two matrices, whose gradients are given step by step."""

    def __init__(self, **options: float | bool) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(shape, device=DEVICE)) for shape in SHAPES]
        optimizer = torch.optim.SGD(self.parameters, lr=0.1, **options)
        self.compression = DeepGradient(None, optimizer, ratio=0.01)
        self.generator = torch.Generator().manual_seed(0)

    def gradients(self) -> list[torch.Tensor]:
        return [torch.randn(shape, generator=self.generator).to(DEVICE) for shape in SHAPES]

    def taken(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """All tensors one after the other, with what is sent at its places."""
        values, places = self.compression._taken(list(zip(gradients, self.parameters, strict=True)))
        assert len(values) == WANTED
        return torch.zeros(sum(p.numel() for p in self.parameters), device=DEVICE).index_add_(0, places, values)

    @property
    def unsent(self) -> torch.Tensor:
        return torch.cat([self.compression.unsent[p].flatten() for p in self.parameters])

    @property
    def momenta(self) -> torch.Tensor:
        return torch.cat([self.compression.momenta[p].flatten() for p in self.parameters])


def test_what_is_sent_and_what_is_kept_are_together_all_gradients() -> None:
    step = Step()
    sent, whole = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
    for _ in range(8):
        gradients = step.gradients()
        whole = whole + torch.cat([g.flatten() for g in gradients])
        sent = sent + step.taken(gradients)
    assert torch.allclose(sent + step.unsent, whole, atol=1e-5)


def test_what_is_sent_is_larger_than_what_is_kept_and_has_no_momentum_any_more() -> None:
    step = Step(momentum=0.9, nesterov=True, weight_decay=0.1)
    for _ in range(6):
        sent = step.taken(step.gradients())
    is_sent = sent != 0
    assert 0.5 * WANTED <= int(is_sent.sum()) <= WANTED
    for own, kept, which in zip(
        sent.split([6000, 2100]), step.unsent.split([6000, 2100]), is_sent.split([6000, 2100]), strict=True
    ):
        assert own[which].abs().min() >= kept.abs().max()
    assert not step.momenta[is_sent].any()


def test_a_tensor_without_gradient_at_first_sends_its_largest_soon_after_it_has_one() -> None:
    step = Step()
    step.taken([torch.zeros(shape, device=DEVICE) for shape in SHAPES])
    for _ in range(12):
        sent = step.taken(step.gradients())
    assert step.unsent.abs().max() <= 1.5 * sent[sent != 0].abs().min()


def test_another_share_begins_with_exactly_the_largest() -> None:
    step = Step()
    step.taken(step.gradients())
    step.compression._final_ratio = 0.1
    values, _ = step.compression._taken(list(zip(step.gradients(), step.parameters, strict=True)))
    assert len(values) == 600 + 210
    assert values.abs().min() > 0
    first = torch.cat([step.compression.unsent[step.parameters[0]].flatten()])
    assert values[:600].abs().min() >= first.abs().max()
