"""Pictures: a noisy disc, ring, square, frame, cross or triangle; a small vision transformer."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ViT(nn.Module):
    def __init__(self, width, depth=3, heads=4):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 6)

    def forward(self, image):
        tokens = self.patches(image).flatten(2).transpose(1, 2) + self.places
        return self.head(self.blocks(tokens).mean(1))


def model(width=64):
    return ViT(width)


def shapes(count, seed):
    draw = torch.Generator().manual_seed(seed)
    kind = torch.randint(6, (count,), generator=draw)
    size, left, top = torch.rand(3, count, 1, 1, generator=draw)
    size = 3 + 3 * size
    x = torch.arange(16.0).view(1, 1, 16) - (5 + 6 * left)
    y = torch.arange(16.0).view(1, 16, 1) - (5 + 6 * top)
    far, edge = (x**2 + y**2).sqrt(), torch.maximum(x.abs(), y.abs())
    cross = (edge < size) & (torch.minimum(x.abs(), y.abs()) < 1)
    triangle = (y.abs() < size) & (2 * x.abs() < size - y)
    disc, square = far < size, edge < size
    every = [disc, disc & (far > size - 2), square, square & (edge > size - 2), cross, triangle]
    image = torch.stack(every)[kind, torch.arange(count)].float()
    return (image + 0.3 * torch.randn(count, 16, 16, generator=draw)).unsqueeze(1), kind


def data(batch):
    train = TensorDataset(*shapes(4_000, seed=1))
    return {
        "train": DataLoader(train, batch_size=batch, shuffle=True),
        "validation": [shapes(1_000, seed=2)],
        "test": [shapes(3_000, seed=3)],
    }
