"""Activations in fewer bytes: the same gradients where nothing is lost, near ones else, and what is left alone."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_workloads import Everything
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from steptune.tuner.strategies.activation_checkpointing.strategy import checkpointed
from steptune.tuner.strategies.activation_compression.strategy import ActivationCompression
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.plan import Plan
from steptune.tuner.training.relu_masks import Window
from steptune.tuner.training.saved_activations import FORMS, LOSSLESS, SavedActivations

each_lossless = pytest.mark.parametrize("form", LOSSLESS)
each_lossy = pytest.mark.parametrize("form", [form for form in FORMS if form not in LOSSLESS])


def convolutional(*, inplace: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=inplace),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(inplace=inplace),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(inplace=inplace),
        nn.Flatten(),
        nn.Linear(8 * 8 * 8, 4),
    )


def images(channels_last: bool = False) -> torch.Tensor:
    batch = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return batch.contiguous(memory_format=torch.channels_last) if channels_last else batch


def run(model: nn.Module, batch: torch.Tensor, saved: SavedActivations | None = None) -> list[torch.Tensor]:
    """Output and gradients of two passes."""
    found = []
    for _ in range(2):
        model.zero_grad()
        if saved is None:
            output = model(batch)
            output.square().mean().backward()
        else:
            with saved.hooks():
                output = model(saved.note_batch(batch))
                loss = output.square().mean()
            with saved.hooks():
                loss.backward()
        found += [output.detach(), *(p.grad for p in model.parameters())]
    return found


def compressed(model: nn.Module, form: str) -> tuple[nn.Module, SavedActivations]:
    copied, saved = copy.deepcopy(model), SavedActivations(form)
    saved.attach(copied)
    return copied, saved


class TestLossless:
    @each_lossless
    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize("channels_last", [False, True])
    def test_gradients_are_the_same_bits(self, form: str, inplace: bool, channels_last: bool) -> None:
        model = convolutional(inplace=inplace)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
        other, saved = compressed(model, form)
        batch = images(channels_last)
        assert all(map(torch.equal, run(model, batch), run(other, batch, saved)))

    @each_lossless
    def test_less_is_kept(self, form: str) -> None:
        model, saved = compressed(convolutional(), form)
        run(model, images(), saved)
        assert 0 < saved.last.bytes_kept < 0.7 * saved.last.bytes_in

    def test_the_masks_take_a_bit_and_a_byte(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        saved = SavedActivations("relu_mask")
        saved.attach(model)
        run(model, images(), saved)
        elements, pooled = 4 * 8 * 16 * 16, 4 * 8 * 8 * 8
        assert saved.last.bytes_kept == elements // 8 + pooled
        assert saved.last.bytes_in == 4 * elements + 4 * elements + 8 * pooled

    def test_what_only_a_sign_was_needed_of_is_freed(self) -> None:
        """Purpose of the mask: between ReLU and pooling nothing keeps the large tensor."""
        for form, freed in ((None, False), ("relu_mask", True)):
            model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2))
            if form:
                SavedActivations(form).attach(model)
            rectified: list[Any] = []
            model[1].register_forward_hook(lambda *call, seen=rectified: seen.append(call[2].untyped_storage()))
            output = model(images())
            reference = StorageWeakRef(rectified.pop())
            gc.collect()
            assert reference.expired() is freed
            output.sum().backward()

    def test_not_a_number_passes_the_gradient_as_torch_does(self) -> None:
        x = torch.tensor([1.0, float("nan"), -1.0, 0.0, -0.0]).repeat(2)
        expected, found = (x.clone().requires_grad_() for _ in range(2))
        module = nn.Sequential(nn.ReLU())
        module(expected).backward(torch.ones(10))
        SavedActivations("relu_mask").attach(module)
        module(found).backward(torch.ones(10))
        assert torch.equal(expected.grad, found.grad)

    @each_lossless
    def test_state_keys_and_evaluation_stay_as_they_are(self, form: str) -> None:
        model = convolutional()
        other, _ = compressed(model, form)
        assert list(other.state_dict()) == list(model.state_dict())
        with torch.no_grad():
            assert torch.equal(model.eval()(images()), other.eval()(images()))

    def test_a_view_is_rectified_in_place_in_its_base_too(self) -> None:
        module = nn.ReLU(inplace=True)
        SavedActivations("relu_mask").attach(module)
        base = torch.tensor([-1.0, -2.0, 3.0], requires_grad=True) * 1
        module(base[:2])
        assert base.tolist() == [0.0, 0.0, 3.0]

    @pytest.mark.parametrize("kernel", [(2, 2), (3, 2)])
    @pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
    @pytest.mark.parametrize("padding", [0, 1])
    @pytest.mark.parametrize("dilation", [1, 2])
    @pytest.mark.parametrize("ceil_mode", [False, True])
    def test_a_place_in_a_window_leads_back_to_the_plane(
        self, kernel: Any, stride: Any, padding: int, dilation: int, ceil_mode: bool
    ) -> None:
        x = torch.randn(2, 3, 9, 11, generator=torch.Generator().manual_seed(0))
        _, indices = F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode, return_indices=True)
        window = Window(kernel, stride, padding, dilation, ceil_mode)
        places = window.places(indices, 11)
        assert places.dtype is torch.uint8
        assert int(places.max()) < window.size
        assert torch.equal(window.indices(places, 11), indices)


class TestLossy:
    @each_lossy
    def test_the_forward_pass_is_the_same_and_gradients_are_near(self, form: str) -> None:
        """int8 has 254 steps over the range of 256 values: a hundredth of a gradient's norm is generous."""
        model = convolutional()
        other, saved = compressed(model, form)
        plain, lossy = run(model, images()), run(other, images(), saved)
        assert torch.equal(plain[0], lossy[0])
        for expected, found in zip(plain[1:], lossy[1:], strict=True):
            scale = max(float(expected.norm()), 1e-3)
            assert float((found - expected).norm()) <= 0.02 * scale

    @pytest.mark.parametrize(("form", "share"), [("bfloat16", 1 / 2), ("int8", 1 / 4 + 1 / 256)])
    def test_what_is_kept_is_a_share_of_what_was(self, form: str, share: float) -> None:
        saved = SavedActivations(form)
        saved.attach(nn.Identity())
        x = torch.randn(64, 64, requires_grad=True) * 1
        with saved.hooks():
            x.tanh().tanh().sum()
        assert saved.last.bytes_in == 2 * 4 * 64 * 64
        assert saved.last.bytes_kept == share * saved.last.bytes_in


def packed_by(saved: SavedActivations, function: Any) -> list[bool]:
    """Flag for each tensor that autograd saves: True where it was encoded."""
    seen: list[bool] = []
    original = saved._pack

    def pack(tensor: torch.Tensor) -> Any:
        result = original(tensor)
        seen.append(not isinstance(result, torch.Tensor))
        return result

    saved._pack = pack  # type: ignore[method-assign]
    with saved.hooks():
        function()
    return seen


class TestLeftAlone:
    SIDE = 64

    def saved(self, model: nn.Module | None = None) -> SavedActivations:
        saved = SavedActivations("int8")
        saved.attach(model or nn.Identity())
        return saved

    def large(self) -> torch.Tensor:
        return torch.randn(self.SIDE, self.SIDE, requires_grad=True) * 1

    def test_activations_are_not(self) -> None:
        assert packed_by(self.saved(), lambda: self.large().exp()) == [True]

    def test_parameters_and_their_transposes(self) -> None:
        layer = nn.Linear(self.SIDE, self.SIDE, bias=False)
        x = self.large()
        seen = packed_by(self.saved(layer), lambda: layer(x))
        assert sorted(seen) == [False, True]

    def test_the_batch(self) -> None:
        saved, batch = self.saved(), torch.randn(self.SIDE, self.SIDE)
        saved.note_batch({"x": batch})
        weight = torch.randn(self.SIDE, self.SIDE, requires_grad=True)
        assert packed_by(saved, lambda: batch @ weight) == [False]

    def test_parts_of_a_larger_tensor(self) -> None:
        whole = torch.randn(3 * self.SIDE, self.SIDE, requires_grad=True) * 1
        assert packed_by(self.saved(), lambda: whole[: self.SIDE].square()) == [False]

    def test_integers_and_masks(self) -> None:
        table = torch.randn(10, self.SIDE, requires_grad=True)
        index = torch.zeros(self.SIDE**2, dtype=torch.long)
        assert packed_by(self.saved(), lambda: F.embedding(index, table)) == [False]

    def test_doubles(self) -> None:
        assert packed_by(self.saved(), lambda: self.large().double().exp()) == [False]

    def test_what_is_small(self) -> None:
        small = torch.randn(8, requires_grad=True) * 1
        assert packed_by(self.saved(), lambda: small.exp()) == [False]

    def test_16_bits_where_16_are_asked_for(self) -> None:
        saved = SavedActivations("bfloat16")
        saved.attach(nn.Identity())
        assert packed_by(saved, lambda: self.large().bfloat16().exp()) == [False]


class TestTwice:
    def test_a_tensor_that_two_operators_save_is_encoded_once(self) -> None:
        saved = SavedActivations("int8")
        saved.attach(nn.Identity())
        x = torch.randn(64, 64, requires_grad=True) * 1
        with saved.hooks():
            loss = (x.sin() + x.cos()).sum()
        assert saved.last.bytes_in == 4 * 64 * 64
        loss.backward()

    def test_memory_that_is_used_again_is_another_tensor(self) -> None:
        """Encoded tensors are freed, and the next one may lie where they were."""
        saved = SavedActivations("bfloat16")
        saved.attach(nn.Identity())
        x = torch.full((64, 64), 0.5, requires_grad=True)
        with saved.hooks():
            y = x
            for _ in range(8):
                y = (y * 1).exp().log() * 2
            loss = y.sum()
        loss.backward()
        assert torch.allclose(x.grad, torch.full_like(x, 256.0), rtol=0.05)

    def test_a_tensor_changed_in_place_between_is_another(self) -> None:
        saved = SavedActivations("bfloat16")
        saved.attach(nn.Identity())
        x = torch.full((64, 64), 2.0, requires_grad=True)
        with saved.hooks():
            y = x * 1
            first = y.square()
            y.mul_(2)
            loss = (first + y.square()).sum()
        loss.backward()
        assert torch.allclose(x.grad, torch.full_like(x, 2 * 2 + 2 * 4 * 2.0))


class TestInCompany:
    @pytest.mark.parametrize("form", FORMS)
    def test_recomputed_blocks_train(self, form: str) -> None:
        model = convolutional()
        recomputed, saved = compressed(model, form)
        checkpointed(recomputed[4:7])
        found = run(recomputed, images(), saved)
        plain = run(model, images())
        for ours, theirs in zip(found, plain, strict=True):
            assert torch.allclose(ours, theirs, rtol=0.05, atol=0.02 * float(theirs.abs().max()) + 1e-4)

    def test_micro_batches_and_autocast(self) -> None:
        plan = Plan()
        plan.step.num_micro_batches = 2
        plan.step.autocast_dtype = "bfloat16"
        ActivationCompression().contribute(plan, {"kept_as": "int8"})
        torch.manual_seed(0)
        job = assemble(Everything(), plan, device=torch.device("cpu"))
        losses = [float(job.step(batch)) for batch in job]
        assert all(loss < 3 for loss in losses)

    def test_the_evidence_has_the_bytes(self) -> None:
        plan = Plan()
        strategy = ActivationCompression()
        strategy.contribute(plan, {"kept_as": "int8"})
        job = assemble(Everything(), plan, device=torch.device("cpu"))
        idle = strategy.took_effect(strategy.evidence(job), {"kept_as": "int8"})
        assert not idle.took
        assert "no saved activation was worth encoding" in idle.detail
        job.step(next(iter(job)))
        evidence = strategy.evidence(job)
        assert 0 < evidence["bytes_kept"] < 0.3 * evidence["bytes_in"]
        assert strategy.took_effect(evidence, {"kept_as": "int8"}).took
        assert not strategy.took_effect(evidence, {"kept_as": "bfloat16"}).took
