"""Random samples: repeatable, cheap, and of the shapes and kinds of real ones."""

from __future__ import annotations

import math

import pytest
import torch

from steptune.tuner.workloads.adapters.random_data import (
    IGNORED,
    MaskedTokens,
    RandomImages,
    RandomTokens,
    random_bytes,
    with_normal_pixels,
)


class TestImages:
    def test_are_bytes_of_a_pool_that_repeats_itself(self) -> None:
        images = RandomImages(100, (3, 8, 8), 10, pool_size=16)
        assert len(images) == 100
        assert images[3]["pixel_values"].dtype == torch.uint8
        assert torch.equal(images[3]["pixel_values"], images[19]["pixel_values"])
        assert torch.equal(images[3]["labels"], images[19]["labels"])
        assert not torch.equal(images[3]["pixel_values"], images[4]["pixel_values"])

    def test_are_the_same_in_every_process(self) -> None:
        first, second = RandomImages(8, (3, 8, 8), 10), RandomImages(8, (3, 8, 8), 10)
        assert all(torch.equal(first[n]["pixel_values"], second[n]["pixel_values"]) for n in range(8))

    def test_a_sample_is_a_view_of_the_pool(self) -> None:
        """So that a batch costs one copy."""
        images = RandomImages(8, (3, 8, 8), 10)
        assert images[0]["pixel_values"].untyped_storage().data_ptr() == (
            images[1]["pixel_values"].untyped_storage().data_ptr()
        )

    def test_bytes_are_uniform(self) -> None:
        """Over 2^18 bytes the count of one value is 1024 +- 32; six deviations are allowed."""
        counts = random_bytes((2**18,), torch.Generator().manual_seed(0)).bincount(minlength=256)
        assert len(counts) == 256
        assert int((counts - 1024).abs().max()) < 6 * 32

    def test_an_odd_number_of_bytes(self) -> None:
        assert random_bytes((3, 5), torch.Generator().manual_seed(0)).shape == (3, 5)

    def test_pixels_are_normal_on_the_device(self) -> None:
        images = RandomImages(64, (3, 32, 32), 10)
        batch = {
            "pixel_values": torch.stack([images[n]["pixel_values"] for n in range(64)]),
            "labels": torch.zeros(64),
        }
        pixels = with_normal_pixels(batch)["pixel_values"]
        assert pixels.dtype == torch.float32
        assert float(pixels.mean()) == pytest.approx(0.0, abs=0.01)
        assert float(pixels.std()) == pytest.approx(1.0, abs=0.01)
        assert with_normal_pixels({**batch, "pixel_values": pixels})["pixel_values"] is pixels


class TestTokens:
    def test_follow_zipf_s_law(self) -> None:
        """Token k has the probability log((k + 2) / (k + 1)) / log(vocabulary)."""
        tokens = RandomTokens(8, 20_000, 1000)[0]["input_ids"]
        assert tokens.dtype == torch.int64
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < 1000
        for token in range(5):
            share = float((tokens == token).float().mean())
            assert share == pytest.approx(math.log((token + 2) / (token + 1)) / math.log(1000), abs=0.01)

    def test_masked_ones_have_labels_and_the_others_none(self) -> None:
        plain, masked = RandomTokens(8, 40, 50), MaskedTokens(8, 40, 50)
        for index in range(8):
            sample, original = masked[index], plain[index]["input_ids"]
            chosen = sample["labels"] != IGNORED
            assert int(chosen.sum()) == 6  # 15 % of 40
            assert torch.equal(sample["labels"][chosen], original[chosen])
            assert torch.equal(sample["input_ids"][~chosen], original[~chosen])
            assert bool((sample["input_ids"][chosen] == 49).all())
