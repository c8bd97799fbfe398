"""Published LAMB and LARS by the kernels: the same training, the same state, and refusals of what is not known."""

import copy
import os

import pytest
import torch

ON_DEVICE = torch.cuda.is_available()
if not ON_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="kernels need triton")

from steptune.kernels.applying import refusals, use_kernel_in_optimizer, used_kernels  # noqa: E402
from steptune.tuner.training.optimizers.lamb import Lamb  # noqa: E402
from steptune.tuner.training.optimizers.lars import Lars  # noqa: E402

DEVICE = torch.device("cuda" if ON_DEVICE else "cpu")
TOLERANCE = 1e-5
"""Largest deviation in FP32 after some steps."""


def timm(name):
    return getattr(pytest.importorskip("timm.optim"), name)


def torch_optimizer(name):
    return getattr(pytest.importorskip("torch_optimizer"), name)


CASES = {  # kernel, class, options; libraries are looked for when a case runs
    "Lamb": ("lamb", lambda: Lamb, {}),
    "Lamb, vectors too": ("lamb", lambda: Lamb, {"exclude_vectors": False, "betas": (0.8, 0.95)}),
    "timm Lamb": ("lamb", lambda: timm("Lamb"), {}),
    "timm Lamb, not clipped": ("lamb", lambda: timm("Lamb"), {"max_grad_norm": None, "bias_correction": False}),
    "timm Lamb, bounded": ("lamb", lambda: timm("Lamb"), {"trust_clip": True, "grad_averaging": False, "lr": 0.1}),
    "timm Lamb, adapting": ("lamb", lambda: timm("Lamb"), {"weight_decay": 0.0, "always_adapt": True}),
    "timm Lamb, decoupled": ("lamb", lambda: timm("Lamb"), {"decoupled_decay": True, "lr": 0.05}),
    "timm Lamb, corrected": (
        "lamb",
        lambda: timm("Lamb"),
        {"decoupled_decay": True, "corrected_weight_decay": True, "weight_decay": 0.3},
    ),
    "torch_optimizer Lamb": ("lamb", lambda: torch_optimizer("Lamb"), {"weight_decay": 0.1, "clamp_value": 0.5}),
    "torch_optimizer Lamb, corrected": ("lamb", lambda: torch_optimizer("Lamb"), {"debias": True}),
    "torch_optimizer Lamb as Adam": ("lamb", lambda: torch_optimizer("Lamb"), {"adam": True}),
    "Lars": ("lars", lambda: Lars, {}),
    "Lars, vectors too": ("lars", lambda: Lars, {"exclude_vectors": False, "momentum": 0.5}),
    "timm Lars": ("lars", lambda: timm("Lars"), {"momentum": 0.9, "weight_decay": 0.01, "dampening": 0.2}),
    "timm Lars, Nesterov": ("lars", lambda: timm("Lars"), {"momentum": 0.9, "nesterov": True, "always_adapt": True}),
    "timm Lars, no momentum": ("lars", lambda: timm("Lars"), {"weight_decay": 0.1}),
    "timm LARC": ("lars", lambda: timm("Lars"), {"momentum": 0.9, "weight_decay": 0.1, "trust_clip": True}),
}


def model(dtype=torch.float32):
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4))
    made[2].bias.data.zero_()
    return made.to(DEVICE, dtype).to(memory_format=torch.channels_last)


def optimizer_of(case, trained):
    _, cls, options = CASES[case]
    matrices = [p for p in trained.parameters() if p.dim() > 1]
    vectors = [p for p in trained.parameters() if p.dim() < 2]
    kept = {"lr": 0.01, **options}
    return cls()([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], **kept)


def train(trained, optimizer, steps, first=0):
    for number in range(first, first + steps):
        optimizer.zero_grad(set_to_none=True)
        generator = torch.Generator().manual_seed(number)
        images = torch.randn(5, 3, 8, 8, generator=generator).to(trained[0].weight)
        trained(images).square().mean().backward()
        optimizer.step()


def worst(first, second):
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max(float(((a - b).norm() / b.norm()).detach()) for a, b in pairs)


def fused(case, trained):
    optimizer = optimizer_of(case, trained)
    use_kernel_in_optimizer(optimizer, CASES[case][0])
    return optimizer


@pytest.mark.parametrize("case", CASES)
def test_the_training_is_that_of_the_library(case):
    plain, changed = model(), model()
    train(plain, optimizer_of(case, plain), 4)
    optimizer = fused(case, changed)
    train(changed, optimizer, 4)
    assert worst(changed, plain) < TOLERANCE
    assert used_kernels(changed, optimizer) == {CASES[case][0]}


@pytest.mark.parametrize("to_fused", [True, False], ids=["into the kernel's", "into the library's"])
@pytest.mark.parametrize("case", CASES)
def test_a_state_of_either_goes_on_in_the_other(case, to_fused):
    """After a state went through the other, training is where it would be without."""
    whole = model()
    train(whole, optimizer_of(case, whole), 5)
    makers = (optimizer_of, fused) if to_fused else (fused, optimizer_of)
    trained = model()
    first = makers[0](case, trained)
    train(trained, first, 3)
    second = makers[1](case, trained)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(trained, second, 2, first=3)
    assert worst(trained, whole) < TOLERANCE
    keys = [{key for state in o.state.values() for key in state} for o in (first, second)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("case", ["Lamb", "timm Lamb", "timm Lars"])
def test_hooks_schedulers_and_closures_work_as_before(case):
    trained = model()
    optimizer = fused(case, trained)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))

    def closure():
        optimizer.zero_grad()
        loss = trained(torch.ones(1, 3, 8, 8, device=DEVICE)).square().mean()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) > 0
    scheduler.step()
    assert calls == [1]
    assert optimizer.param_groups[0]["lr"] == 0.005


@pytest.mark.parametrize("case", ["Lamb", "timm Lamb"])
def test_a_rate_in_a_tensor_is_read_at_every_step(case):
    plain, changed = model(), model()
    for trained, make in ((plain, optimizer_of), (changed, fused)):
        optimizer = make(case, trained)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.01, device=DEVICE)
        train(trained, optimizer, 1)
        for group in optimizer.param_groups:
            group["lr"].fill_(0.1)
        train(trained, optimizer, 1, first=1)
    assert worst(changed, plain) < TOLERANCE


def test_parameters_without_a_gradient_stay():
    trained = model()
    before = trained[0].weight.detach().clone()
    trained[0].weight.requires_grad_(False)
    optimizer = fused("Lamb", trained)
    train(trained, optimizer, 2)
    assert torch.equal(trained[0].weight, before)
    assert trained[0].weight not in optimizer.state or not optimizer.state[trained[0].weight]


class TestRefusals:
    def refusal(self, optimizer, kernel="lamb"):
        return refusals(model(), DEVICE, optimizer)[kernel]

    def test_another_optimizer_is_nothing_for_it(self):
        found = self.refusal(torch.optim.SGD(model().parameters(), lr=0.1))
        assert "the training contains no part that this kernel computes (the optimizer LAMB from timm" in found

    def test_one_of_another_library_is_named(self):
        class FusedLAMB(torch.optim.SGD):
            pass

        found = self.refusal(FusedLAMB(model().parameters(), lr=0.1))
        assert "FusedLAMB (supported: " in found

    def test_an_option_that_is_not_known_is_named(self):
        optimizer = Lamb(model().parameters())
        optimizer.param_groups[0]["sharpness"] = 2
        assert self.refusal(optimizer).endswith("has options that the kernel does not support: sharpness")

    def test_a_class_that_computes_something_else_is_found_by_its_steps(self, monkeypatch):
        """A later version of a library might do so."""
        before = Lamb.update

        def update(self, parameters, gradients, group):
            before(self, parameters, [2.0 * g for g in gradients[:1]] + gradients[1:], group)
            parameters[0].add_(1e-6)

        monkeypatch.setattr(Lamb, "update", update)
        found = self.refusal(Lamb(model().parameters()))
        assert "and the kernel compute different updates: step 1 of a trial run differs by" in found

    def test_hooks_of_the_user_do_not_see_the_trial(self):
        optimizer, calls = Lamb(model().parameters()), []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        assert self.refusal(optimizer) == ""
        assert calls == []
        assert not optimizer.state

    def test_caution_is_not_offered(self):
        optimizer = timm("Lamb")(model().parameters(), caution=True)
        assert "caution=True masks the update" in self.refusal(optimizer)

    def test_float64_is_not_offered(self):
        assert "not torch.float64" in self.refusal(Lamb(model(torch.float64).parameters()))

    def test_what_is_refused_cannot_be_used(self):
        with pytest.raises(ValueError, match="lamb: the training contains no part that this kernel computes"):
            use_kernel_in_optimizer(torch.optim.SGD(model().parameters(), lr=0.1), "lamb")
