"""A small batch of a deep network: the device is done with an operator before the host has launched the next one."""

import torch
import torch.nn.functional as F

import tuner


class LaunchBound(tuner.Workload):
    """ResNet-50 with few images at a time, which lie in memory as bytes, so that little waits for data."""

    def __init__(self, batch=6, images=256, image_size=224, hidden_sizes="256,512,1024,2048", depths="3,4,6,3"):
        self.global_batch = batch
        self.images, self.image_size = images, image_size
        self.hidden_sizes = [int(size) for size in hidden_sizes.split(",")]
        self.depths = [int(depth) for depth in depths.split(",")]

    def model(self):
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig(hidden_sizes=self.hidden_sizes, depths=self.depths, num_labels=1000)
        return ResNetForImageClassification(config)

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (self.images, 3, self.image_size, self.image_size), generator=generator)
        images = images.to(torch.uint8)
        return torch.utils.data.TensorDataset(images, torch.randint(1000, (self.images,), generator=generator))

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(pixel_values=images.float() / 127.5 - 1.0).logits, labels)
