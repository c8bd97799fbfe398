"""Kernels in a loss: found in what a workload keeps, and the same training."""

import copy
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="kernels need triton")

from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

from steptune.kernels import fcos3d, simota
from steptune.kernels.applying import refusals, use_kernel, used_kernels
from steptune.tuner.workloads.zoo.detector import Detector
from steptune.tuner.workloads.zoo.monocular_3d import Monocular3D

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WORKLOADS = {
    "simota": lambda: Detector(batch=3, image_size=64, width=8, depth=0, num_classes=5, most_boxes=4),
    "fcos3d": lambda: Monocular3D(batch=2, height=128, image_width=256, width=8, depth=0, most_boxes=5),
}


WAITING = ("tensor", "as_tensor", "new_tensor", "item", "tolist", "nonzero", "__bool__", "__float__", "__int__", "cpu")
WAITING_GRADIENTS = ("prod",)
YAW_ERROR = 5e-7
"""Error of the polynomial, and of rounding numbers up to pi to FP32 twice."""


def losses_and_gradients(name: str, *, with_kernel: bool) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Losses of some batches, of which some images have no box, and their gradients."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]()
    model = workload.model().to(DEVICE)
    if with_kernel:
        use_kernel(model, name, workload)
    dataset, found = workload.dataset(), []
    for first in range(0, 12, workload.global_batch):
        samples = [dataset[first + number] for number in range(workload.global_batch)]
        batch = {key: tensor.to(DEVICE) for key, tensor in default_collate(samples).items()}
        loss = workload.loss(model, workload.batch_transform(batch))
        found.append((loss.detach(), torch.autograd.grad(loss, list(model.parameters()))))
    return found


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_loss_and_its_gradients_are_those_without_the_kernel(name: str) -> None:
    plain, fused = (losses_and_gradients(name, with_kernel=way) for way in (False, True))
    for (loss, gradients), (other, others) in zip(plain, fused, strict=True):
        assert other == pytest.approx(float(loss), rel=1e-5)
        for gradient, own in zip(gradients, others, strict=True):
            assert float((gradient - own).norm()) <= 1e-4 * float(gradient.norm()) + 1e-7


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_s_loss_has_a_use_for_its_kernel_and_then_calls_it(name: str) -> None:
    workload = WORKLOADS[name]()
    model = workload.model()
    found = refusals(model, DEVICE, workload=workload)
    assert {kernel for kernel, reason in found.items() if not reason} == {name}
    assert used_kernels(model, workload=workload) == frozenset()
    use_kernel(model, name, workload)
    assert used_kernels(model, workload=workload) == {name}
    assert used_kernels(model, workload=WORKLOADS[name]()) == frozenset()


class NothingFromTheHost(TorchFunctionMode):
    """Rejects calls that copy between host and device and so wait for it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        differentiates = torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in args)
        assert name not in (*WAITING, *(WAITING_GRADIENTS if differentiates else ())), (
            f"{function} waits for the device"
        )
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", WORKLOADS)
def test_with_the_kernel_the_loss_never_waits_for_the_device(name: str) -> None:
    """So that a CUDA graph can record it."""
    workload = WORKLOADS[name]()
    model = use_kernel(workload.model().to(DEVICE), name, workload)
    samples = [workload.dataset()[number] for number in range(workload.global_batch)]
    batch = {key: tensor.to(DEVICE) for key, tensor in default_collate(samples).items()}
    batch = workload.batch_transform(batch)
    workload.loss(model, batch)  # compiles the kernels
    with NothingFromTheHost():
        loss = workload.loss(model, batch)
    assert torch.isfinite(loss)
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            workload.loss(model, batch).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_second_job_of_the_workload_finds_the_loss_replaced() -> None:
    """A trial builds a twin of its job, and its job again where memory did not do."""
    workload = copy.copy(WORKLOADS["simota"]())
    use_kernel(workload.model(), "simota", workload)
    twin = copy.copy(workload)
    model = use_kernel(twin.model(), "simota", twin)
    assert used_kernels(model, workload=twin) == {"simota"}


def test_a_part_within_a_module_of_the_loss_is_found() -> None:
    class Criterion(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.Sequential(torch.nn.Linear(2, 2))
            self.assigner = simota.Assigner()

    class Workload:
        def __init__(self) -> None:
            self.criterion = Criterion()

    workload = Workload()
    model = torch.nn.Linear(2, 2)
    assert refusals(model, DEVICE, workload=workload)["simota"] == ""
    use_kernel(model, "simota", workload)
    assert type(workload.criterion.assigner) is simota.FusedAssigner
    assert used_kernels(model, workload=workload) == {"simota"}


def test_an_assigner_in_use_gives_the_boxes_of_the_plain_one() -> None:
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(2, 9, 2, generator=generator)
    boxes = torch.cat([corner, corner + 0.5], 2)
    given = boxes, torch.randn(2, 9, generator=generator), torch.randn(2, 9, 3, generator=generator)
    wanted, labels = boxes[:, :2] + 0.05, torch.tensor([[0, 2], [1, -1]])
    tensors = [tensor.to(DEVICE) for tensor in (*given, wanted, labels)]
    assert torch.equal(simota.FusedAssigner()(*tensors), simota.Assigner()(*tensors))


NONE = -1


@pytest.mark.parametrize(
    ("num_images", "num_points", "num_boxes"), [(2, 1, 1), (0, 5, 3), (2, 0, 3), (3, 70, 0), (1, 33, 256)]
)
@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_targets_of_few_points_many_boxes_and_boxes_outside(
    num_images: int, num_points: int, num_boxes: int, shift: float
) -> None:
    """On a grid, so that several boxes are equally near and extents lie on the bounds."""
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int, most: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=generator).float().to(DEVICE)

    def ones(value: float) -> torch.Tensor:
        return torch.full((num_points,), value, device=DEVICE)

    points = fcos3d.Points(whole(num_points, 2, most=64), ones(8), ones(NONE), ones(24))
    centre = whole(num_images, num_boxes, 2, most=64) + shift
    half = whole(num_images, num_boxes, 2, most=30)
    labels = (whole(num_images, num_boxes, most=4) - 1).long()
    box = whole(num_images, num_boxes, 9, most=9) - 4
    corners = torch.cat([centre - half, centre + half], -1)
    scenes = fcos3d.Scenes(corners, labels, labels.clamp(min=0) % 2, centre, box[..., 2], box)
    found = fcos3d.targets(points, scenes, 3, 2)
    if not num_images:
        assert found.box.shape == (0, num_points, 9)
        return
    wanted = fcos3d.reference(points, scenes, 3, 2)
    assert torch.equal(found.label, wanted.label)
    assert torch.equal(found.attribute, wanted.attribute)
    assert bool((found.label == 3).all()) or not shift
    for name in ("distances", "box", "centerness"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-5, atol=1e-5)


def test_the_local_yaw_is_that_of_atan2_in_every_direction() -> None:
    """The kernel has an arc tangent of its own: all octants, their borders, and a box at the camera."""
    around = torch.arange(64) * (2 * torch.pi / 64)
    x, z = (torch.cat([25 * turned, torch.zeros(1)]).round(decimals=5) + 0.0 for turned in (around.sin(), around.cos()))
    box = torch.zeros(1, len(x), 9)
    box[0, :, 0], box[0, :, 2] = x, z
    places = torch.stack([16.0 * torch.arange(len(x)), torch.zeros(len(x))], dim=1)
    points = fcos3d.Points(places, *(torch.full((len(x),), value) for value in (8.0, -1.0, 48.0)))
    corners = torch.cat([places - 4, places + 4], dim=1)[None]
    label = torch.zeros(1, len(x), dtype=torch.int64)
    scenes = fcos3d.Scenes(corners, label, label, places[None], box[..., 2], box)
    found = fcos3d.targets(points, scenes, 1, 1)
    assert not found.label.any()
    exact = -torch.atan2(x.double(), z.double())
    assert (found.box[0, :, 6] - exact).abs().max() < YAW_ERROR
    box[0, :, 0] = torch.nan
    assert fcos3d.targets(points, scenes, 1, 1).box[0, :, 6].isnan().all(), "no angle is made up where there is none"


def test_targets_of_more_boxes_than_the_kernel_looks_at_are_refused_with_the_way_out() -> None:
    many = torch.zeros(1, 257, dtype=torch.long)
    nowhere = fcos3d.Points(torch.zeros(1, 2), *torch.zeros(3, 1))
    scenes = fcos3d.Scenes(
        torch.zeros(1, 257, 4), many, many, torch.zeros(1, 257, 2), torch.zeros(1, 257), torch.zeros(1, 257, 9)
    )
    with pytest.raises(ValueError, match="at most 256 boxes per image, got 257: pass fewer boxes"):
        fcos3d.targets(nowhere, scenes, 3, 2)
