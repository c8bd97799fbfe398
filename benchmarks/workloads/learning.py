"""Small trainings that learn something within 2,000 steps, from samples that no step sees twice.

So the loss of the last steps says how well a training generalises, and needs no second dataset.
"""

import torch
import torch.nn.functional as F
from torch import nn

import steptune

NUM_STEPS = 2000
VOCABULARY, LENGTH = 64, 64
NUM_SHAPES, SIDE = 6, 24


class Learning(steptune.Workload):
    """Common parts of these trainings.

    Args:
        professional: Begins from bfloat16, a fused optimizer and compilation, as people train today.
        num_steps: Of an epoch.
    """

    global_batch = 64
    rate = 1e-3

    def __init__(self, professional: bool = False, num_steps: int = NUM_STEPS) -> None:
        self.num_steps = num_steps
        if professional:
            self.current = {
                "precision": {"level": "O1", "dtype": "bfloat16"},
                "optimizer_implementation": {"implementation": "fused"},
                "compile": {"mode": "default"},
            }

    def optimizer(self, named_parameters):
        return torch.optim.AdamW([p for _, p in named_parameters], lr=self.rate, weight_decay=0.01)

    @property
    def num_samples(self):
        return self.global_batch * self.num_steps


class Text(torch.utils.data.Dataset):
    """Sequences of a Markov chain of second order."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        logits = 3 * torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=generator)
        cumulated = logits.softmax(-1).cumsum(-1)
        self.tokens = torch.randint(VOCABULARY, (num_samples, LENGTH + 1), generator=generator)
        for place in range(2, LENGTH + 1):
            rows = cumulated[self.tokens[:, place - 2], self.tokens[:, place - 1]]
            draws = torch.rand(num_samples, 1, generator=generator)
            self.tokens[:, place] = torch.searchsorted(rows, draws).squeeze(1).clamp(max=VOCABULARY - 1)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]


class MarkovGPT(Learning):
    """A causal transformer."""

    def model(self):
        return CausalTransformer()

    def dataset(self):
        return Text(self.num_samples)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class CausalTransformer(nn.Module):
    def __init__(self, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.embed(tokens) + self.place(torch.arange(length, device=tokens.device))
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


class MarkovLSTM(MarkovGPT):
    """A recurrent network on the same text."""

    rate = 3e-3

    def model(self):
        return Recurrent()


class Recurrent(nn.Module):
    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCABULARY, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])


class Shapes(torch.utils.data.Dataset):
    """Images of one of six outlines, at a random place and size, under noise."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.rows, self.columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        label = index % NUM_SHAPES
        row, column, size = (8 + 8 * torch.rand(3, generator=generator)).tolist()
        x, y = (self.columns - column).abs() / (size / 2), (self.rows - row).abs() / (size / 2)
        distance = (
            torch.hypot(x, y),  # circle
            torch.maximum(x, y),  # square
            x + y,  # diamond
            torch.maximum(x, (self.rows - row) / (size / 2) + x),  # triangle
            torch.minimum(x, y) + 0.5 * torch.maximum(x, y),  # cross
            torch.maximum(2 * x, y),  # bar
        )[label]
        image = (distance - 1).abs().lt(0.25).float() + 0.5 * torch.randn(SIDE, SIDE, generator=generator)
        return image[None], label


class ShapesConvolutional(Learning):
    """A convolutional network with batch normalisation."""

    def model(self):
        return nn.Sequential(
            *(part for inputs, outputs in ((1, 32), (32, 64), (64, 128)) for part in self._stage(inputs, outputs)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, NUM_SHAPES),
        )

    def _stage(self, inputs, outputs):
        return nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)

    def dataset(self):
        return Shapes(self.num_samples)

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels)


class ShapesTransformer(ShapesConvolutional):
    """A vision transformer on the same images."""

    def model(self):
        return PatchTransformer()


class PatchTransformer(nn.Module):
    def __init__(self, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(1, (SIDE // 4) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, NUM_SHAPES)

    def forward(self, images):
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.place
        return self.head(self.layers(hidden).mean(1))


class Taught(torch.utils.data.Dataset):
    """Answers of a random network, under noise."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        generator = torch.Generator().manual_seed(2)
        self.first = torch.randn(32, 64, generator=generator) / 32**0.5
        self.second = torch.randn(64, 4, generator=generator) / 8

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(32, generator=generator)
        noise = 0.05 * torch.randn(4, generator=generator)
        return inputs, torch.tanh(2 * inputs @ self.first) @ self.second + noise


class Teacher(Learning):
    """A perceptron that learns from another one, by clipped SGD with momentum."""

    global_batch = 128
    max_grad_norm = 1.0

    def model(self):
        return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4))

    def dataset(self):
        return Taught(self.num_samples)

    def loss(self, model, batch):
        inputs, answers = batch
        return F.mse_loss(model(inputs).float(), answers)

    def optimizer(self, named_parameters):
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.05, momentum=0.9)


class NoisyShapes(Shapes):
    """Images of outlines with another noise level each, and the noise that was added."""

    def __getitem__(self, index):
        image, _ = super().__getitem__(index)
        generator = torch.Generator().manual_seed(-1 - index)
        level = torch.rand(1, generator=generator)
        noise = torch.randn(1, SIDE, SIDE, generator=generator)
        return (1 - level) * image + level * noise, level, noise


class ShapesDenoiser(Learning):
    """A convolutional network with skips and group normalisation predicts the noise of an image, as diffusion does."""

    def model(self):
        return Denoiser()

    def dataset(self):
        return NoisyShapes(self.num_samples)

    def loss(self, model, batch):
        noisy, level, noise = batch
        return F.mse_loss(model(noisy, level).float(), noise)


class Denoiser(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.level = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, 2 * width))
        self.enter, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = nn.Sequential(
            *(part for _ in range(2) for part in (nn.GroupNorm(8, 2 * width), nn.SiLU(), self._same(2 * width)))
        )
        self.up = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.leave = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 1, 3, padding=1))

    def _same(self, width):
        return nn.Conv2d(width, width, 3, padding=1)

    def forward(self, noisy, level):
        fine = self.enter(noisy)
        coarse = self.down(F.silu(fine)) + self.level(level)[..., None, None]
        return self.leave(fine + self.up(coarse + self.middle(coarse)))


class Visits(torch.utils.data.Dataset):
    """Items that a user of a random taste took, and the one that came next."""

    def __init__(self, num_samples: int, num_items: int = 2048, length: int = 12, taste: int = 6) -> None:
        self.num_samples, self.length = num_samples, length
        generator = torch.Generator().manual_seed(3)
        self.items = torch.randn(num_items, taste, generator=generator)

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        scores = self.items @ torch.randn(self.items.shape[1], generator=generator)
        taken = scores.softmax(0).multinomial(self.length + 1, generator=generator)
        return taken[:-1], taken[-1]


class Towers(Learning):
    """A recommender of two towers with large embeddings, trained against the other items of its batch."""

    global_batch = 256
    rate = 3e-3

    def model(self):
        return TwoTowers()

    def dataset(self):
        return Visits(self.num_samples)

    def loss(self, model, batch):
        scores = model(*batch)
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


class TwoTowers(nn.Module):
    def __init__(self, num_items: int = 2048, width: int = 64) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items, width)
        self.user = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, width))

    def forward(self, taken, following):
        return self.user(self.items(taken).mean(1)) @ self.items(following).T / 8
