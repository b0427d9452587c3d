"""Regression: noise taken out of pieces of two photographs; a convolutional net."""

import torch
from sklearn.datasets import load_sample_images
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Denoiser(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, 1, 3, padding=1),
        )  # fmt: skip

    def forward(self, noisy):
        return noisy - self.layers(noisy)


def model(width=24):
    return Denoiser(width)


def loss(output, clean):
    return nn.functional.mse_loss(output, clean)


def data(batch):
    photos = torch.stack([torch.tensor(photo) for photo in load_sample_images().images])
    grey = photos.float().mean(-1, keepdim=True).permute(0, 3, 1, 2) / 255
    pieces = nn.functional.unfold(grey, 16, stride=16).transpose(1, 2).reshape(-1, 1, 16, 16)
    draw = torch.Generator().manual_seed(0)
    pieces = pieces[torch.randperm(len(pieces), generator=draw)]
    noisy = pieces + 0.1 * torch.randn(pieces.shape, generator=draw)
    train = TensorDataset(noisy[:1_200], pieces[:1_200])
    return {
        "train": DataLoader(train, batch_size=batch, shuffle=True),
        "validation": [(noisy[1_200:1_500], pieces[1_200:1_500])],
        "test": [(noisy[1_500:], pieces[1_500:])],
    }
