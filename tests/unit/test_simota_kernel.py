"""SimOTA of a batch: ties, conflicts, sizes, and what it refuses; equality with the loop over images."""

import os
import random

import pytest
import torch

ON_DEVICE = torch.cuda.is_available()
if not ON_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="kernels need triton")

from steptune.kernels import simota  # noqa: E402

DEVICE = "cuda" if ON_DEVICE else "cpu"
SURE = 6.0
"""A logit that is nearly certain."""


def scene(seed: int, batch: int, candidates: int, boxes: int, classes: int) -> dict[str, torch.Tensor]:
    """Random predictions and boxes on an image of 64 x 64; a third of the boxes is filled up."""
    generator = torch.Generator().manual_seed(seed)

    def corners(count: int) -> torch.Tensor:
        centre = torch.rand(batch, count, 2, generator=generator) * 64
        half = 1 + 12 * torch.rand(batch, count, 2, generator=generator)
        return torch.cat([centre - half, centre + half], -1)

    labels = torch.randint(classes, (batch, boxes), generator=generator)
    labels[torch.rand(batch, boxes, generator=generator) < 0.3] = -1
    made = {
        "boxes_bm4": corners(candidates),
        "objectness_bm": torch.randn(batch, candidates, generator=generator),
        "classes_bmk": torch.randn(batch, candidates, classes, generator=generator),
        "wanted_bg4": corners(boxes),
        "labels_bg": labels,
    }
    return {name: tensor.to(DEVICE) for name, tensor in made.items()}


def fixed(predicted: list[tuple[float, ...]], wanted: list[tuple[float, ...]]) -> dict[str, torch.Tensor]:
    """One image of one class, in which all predictions are equally sure."""
    made = {
        "boxes_bm4": torch.tensor([predicted]),
        "objectness_bm": torch.full((1, len(predicted)), SURE),
        "classes_bmk": torch.full((1, len(predicted), 1), SURE),
        "wanted_bg4": torch.tensor([wanted]),
        "labels_bg": torch.zeros(1, len(wanted), dtype=torch.int64),
    }
    return {name: tensor.to(DEVICE) for name, tensor in made.items()}


@pytest.mark.parametrize("seed", range(12))
def test_the_boxes_are_those_of_the_loop_in_float64(seed: int) -> None:
    """In sizes drawn at random."""
    draw = random.Random(seed)
    made = scene(seed, draw.randint(1, 3), draw.randint(1, 60), draw.randint(1, 9), draw.randint(1, 20))
    wide = {name: t.double() if t.is_floating_point() else t for name, t in made.items()}
    assert torch.equal(simota.assign(**made), simota.reference(**wide))


class TestByHand:
    here, beside = (10.0, 10.0, 20.0, 20.0), (40.0, 40.0, 50.0, 50.0)

    def test_of_equal_candidates_the_first_is_taken(self) -> None:
        """Each overlaps by a half, so that their sum is 1.5, and one is taken."""
        half = (10.0, 10.0, 20.0, 15.0)
        found = simota.assign(**fixed([half, half, half], [self.here]))
        assert found.tolist() == [[0, -1, -1]]

    def test_a_box_takes_as_many_as_its_overlaps_add_up_to(self) -> None:
        found = simota.assign(**fixed([self.here] * 3 + [self.beside], [self.here]))
        assert found.tolist() == [[0, 0, 0, -1]]

    def test_at_most_top_are_taken(self) -> None:
        found = simota.assign(**fixed([self.here] * 5, [self.here]), top=2)
        assert found.tolist() == [[0, 0, -1, -1, -1]]

    def test_a_box_that_nothing_overlaps_takes_one(self) -> None:
        found = simota.assign(**fixed([self.beside, self.beside], [self.here]))
        assert found.tolist() == [[0, -1]]

    def test_what_two_boxes_took_goes_to_the_cheaper_one(self) -> None:
        wide = (10.0, 10.0, 20.0, 24.0)
        found = simota.assign(**fixed([self.here], [wide, self.here]))
        assert found.tolist() == [[1]]

    def test_what_does_not_count_is_not_taken(self) -> None:
        made = fixed([self.here, self.here], [self.here])
        valid = torch.tensor([[False, True]], device=DEVICE)
        assert simota.assign(**made, valid_bm=valid).tolist() == [[-1, 0]]

    def test_a_prior_far_from_all_boxes_does_not_count(self) -> None:
        made = fixed([self.here, self.here], [self.here])
        priors = torch.tensor([[60.0, 60.0, 8.0], [15.0, 15.0, 8.0]], device=DEVICE)
        assert simota.assign(**made, priors_m3=priors).tolist() == [[-1, 0]]

    def test_a_prior_inside_and_central_is_taken_before_one_that_is_only_near(self) -> None:
        """The first is nearer to the box by its prediction, yet lies outside of it."""
        made = fixed([self.here, (10.0, 10.0, 20.0, 14.0)], [self.here])
        priors = torch.tensor([[22.0, 15.0, 8.0], [15.0, 15.0, 8.0]], device=DEVICE)
        assert simota.assign(**made, priors_m3=priors).tolist() == [[-1, 0]]


def test_images_do_not_see_each_other() -> None:
    made = scene(3, 3, 40, 5, 4)
    together = simota.assign(**made)
    for image in range(3):
        alone = {name: tensor[image : image + 1] for name, tensor in made.items()}
        assert torch.equal(simota.assign(**alone)[0], together[image])


def test_where_boxes_are_filled_up_does_not_matter() -> None:
    made = scene(4, 2, 40, 6, 4)
    order = torch.tensor([5, 0, 3, 1, 4, 2], device=DEVICE)
    moved = {**made, "wanted_bg4": made["wanted_bg4"][:, order], "labels_bg": made["labels_bg"][:, order]}
    found = simota.assign(**moved)
    back = torch.where(found >= 0, order[found.clamp(min=0)], found)
    assert torch.equal(back, simota.assign(**made))


@pytest.mark.parametrize(("candidates", "boxes"), [(0, 3), (5, 0)])
def test_without_candidates_or_boxes_nothing_is_assigned(candidates: int, boxes: int) -> None:
    found = simota.assign(**scene(5, 2, candidates, boxes, 3))
    assert found.shape == (2, candidates)
    assert (found == -1).all()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"objectness_bm": torch.zeros(1, 20000)}, "at most 16384 candidates per image, got 20000"),
        ({"labels_bg": torch.zeros(1, 2000, dtype=torch.int64)}, "at most 1024 boxes per image, got 2000"),
        ({"top": 50}, "at most 32 top per image, got 50"),
    ],
)
def test_sizes_beyond_the_kernel_are_refused_with_the_limit(changed: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        simota.assign(**{**scene(6, 1, 4, 2, 3), **changed})


@pytest.mark.skipif(not ON_DEVICE, reason="only a device can be waited for")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # it warns when it is switched on
def test_the_host_does_not_wait_for_the_device() -> None:
    made = scene(7, 4, 200, 6, 8)
    simota.assign(**made)
    torch.cuda.set_sync_debug_mode("error")
    try:
        simota.assign(**made)
    finally:
        torch.cuda.set_sync_debug_mode("default")
