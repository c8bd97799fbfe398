"""Deep gradient compression by its kernel: nothing is lost, and the threshold follows what is kept."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="kernels need triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from steptune.kernels.deep_gradient import Settings, compensate_and_select, reference
from steptune.kernels.deep_gradient.reference import SPACING
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


def test_what_is_kept_is_hardly_larger_than_what_is_sent_which_has_no_momentum_any_more() -> None:
    step = Step(momentum=0.9, nesterov=True, weight_decay=0.1)
    for _ in range(6):
        sent = step.taken(step.gradients())
    is_sent = sent != 0
    assert int(is_sent.sum()) == WANTED
    for own, kept, which in zip(
        sent.split([6000, 2100]), step.unsent.split([6000, 2100]), is_sent.split([6000, 2100]), strict=True
    ):
        assert own[which].abs().min() * SPACING * (1 + 1e-6) >= kept.abs().max()
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


def test_gradients_that_stay_the_same_do_not_outrun_the_threshold() -> None:
    """Elements grow towards it side by side, so that none lies beyond it or more than are sent."""
    gradient = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    momentum, unsent, thresholds = torch.zeros(2000), torch.zeros(2000), gradient.abs().amax()[None]
    for number in range(300):
        sent = reference([gradient], [momentum], [unsent], thresholds, [Settings(0.9, False, 20)])
        thresholds = sent.thresholds
        assert number < 10 or int((sent.values != 0).sum()) == 20


def test_elements_of_one_size_are_sent_although_they_are_too_many() -> None:
    step = Step()
    for _ in range(3):
        sent = step.taken([torch.ones(shape, device=DEVICE) for shape in SHAPES])
        assert int((sent != 0).sum()) == WANTED


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # of the interpreter, which computes by numpy
def test_a_number_that_is_none_is_sent_at_once() -> None:
    """Kept, nobody would see that the training is broken."""
    step = Step()
    step.taken(step.gradients())
    gradients = step.gradients()
    gradients[1][3, 5] = float("nan")
    assert step.taken(gradients).isnan().sum() == 1
    assert not step.unsent.isnan().any()


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # of the interpreter, which computes by numpy
@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
def test_an_overflow_everywhere_does_not_end_the_sending(broken: float) -> None:
    step = Step()
    step.taken(step.gradients())
    step.taken([torch.full(shape, broken, device=DEVICE) for shape in SHAPES])
    for kept in (step.compression.unsent, step.compression.momenta):
        for tensor in kept.values():
            tensor.zero_()
    for _ in range(12):
        sent = step.taken(step.gradients())
    assert sent.isfinite().all()
    assert int((sent != 0).sum()) == WANTED


def test_thresholds_of_a_stage_are_not_the_next_one_s_after_a_checkpoint() -> None:
    """Training without a checkpoint does the same: there, another share begins with exactly the largest."""
    step = Step()
    step.taken(step.gradients())
    names = {parameter: str(number) for number, parameter in enumerate(step.parameters)}
    kept = step.compression.kept(names)
    other = Step()
    other.parameters, other.compression._final_ratio = step.parameters, 0.1
    other.compression._options = step.compression._options
    other.compression.keep(kept, names)
    values, _ = other.compression._taken(list(zip(step.gradients(), step.parameters, strict=True)))
    assert values[:600].abs().min() >= other.compression.unsent[step.parameters[0]].abs().max()


@given(
    st.lists(st.sampled_from([1, 3, 17, 4095, 4096, 4097, 8193]), min_size=1, max_size=3),
    st.sampled_from([0.0, 1e-20, 0.3, 2.0, 1e9, float("inf"), float("nan")]),
    st.floats(0.0, 1.0),
    st.booleans(),
    st.integers(0, 2**31),
)
@settings(max_examples=10, deadline=None)
def test_any_sizes_and_thresholds_give_what_the_reference_gives(
    sizes: list[int], threshold: float, share: float, rounded: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    lists = [[torch.randn(size, generator=generator) for size in sizes] for _ in range(3)]
    if rounded:  # ties
        lists = [[tensor.round() for tensor in own] for own in lists]
    own = [Settings(0.5, False, max(1, int(share * size))) for size in sizes]
    thresholds = torch.full((len(sizes),), threshold)
    mine, theirs = ([[t.clone().to(DEVICE) for t in tensors] for tensors in lists] for _ in range(2))
    found, wanted = (
        compensate_and_select(*mine, thresholds.to(DEVICE), own),
        reference(*theirs, thresholds.to(DEVICE), own),
    )
    assert torch.equal(found.places, wanted.places)
    for a, b in zip((found.values, found.thresholds), (wanted.values, wanted.thresholds), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, equal_nan=True)
    for a, b in zip(mine[1] + mine[2], theirs[1] + theirs[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    whole = torch.cat([0.5 * u + g + v for g, u, v in zip(*lists, strict=True)])
    sent = torch.zeros(len(whole)).index_add_(0, found.places.cpu(), found.values.cpu())
    torch.testing.assert_close(sent + torch.cat([v.cpu() for v in mine[2]]), whole, rtol=1e-6, atol=1e-6)
