"""Random JPEG files in memory, decoded and augmented as image scripts do it."""

import io
import random

import numpy as np
import torch
from PIL import Image


class RandomJpegs(torch.utils.data.Dataset):
    """`length` samples over `num_files` files: crop, resize, flip, normalise."""

    def __init__(self, length, num_files, file_size, size, num_classes=1000):
        self.length, self.size, self.num_classes = length, size, num_classes
        numbers = np.random.default_rng(0)
        self.files = []
        for _ in range(num_files):
            rough = numbers.integers(0, 256, (file_size[1] // 12, file_size[0] // 12, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(rough).resize(file_size, Image.Resampling.BICUBIC).save(file, "jpeg", quality=90)
            self.files.append(file.getvalue())

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        image = Image.open(io.BytesIO(self.files[index % len(self.files)])).convert("RGB")
        side = int(min(image.size) * random.uniform(0.6, 1.0))
        left, top = random.randint(0, image.width - side), random.randint(0, image.height - side)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(127.5).sub_(1.0)
        return pixels, index % self.num_classes
