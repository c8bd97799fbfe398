"""A model of which almost all is a table of vectors: little to compute, and many gradients to exchange."""

import torch
import torch.nn.functional as F
from torch import nn

import steptune


class LargeTable(steptune.Workload):
    """Texts classified by the mean of their words' vectors. Each word counts for the classes by random scores."""

    def __init__(self, words=4096, width=256, batch=64, texts=1024):
        self.global_batch = batch
        self.words, self.width, self.texts = words, width, texts

    def model(self):
        return _Means(self.words, self.width)

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        texts = torch.randint(self.words, (self.texts, 16), generator=generator)
        scores = torch.randn(self.words, 4, generator=generator)
        return torch.utils.data.TensorDataset(texts, scores[texts].mean(1).argmax(1))

    def optimizer(self, named_parameters):
        return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)

    def loss(self, model, batch):
        texts, labels = batch
        return F.cross_entropy(model(texts), labels)


class _Means(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.head = nn.Linear(width, 4)

    def forward(self, texts):
        return self.head(self.table(texts).mean(1))
