"""Signals: six kinds of noisy waves, made when they are asked for; a 1-D convolutional net."""

import math

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        layers, before = [], 1
        for channels, kernel in ((width, 9), (2 * width, 9), (2 * width, 5)):
            convolution = nn.Conv1d(before, channels, kernel, stride=2, padding=kernel // 2)
            layers += [convolution, nn.BatchNorm1d(channels), nn.ReLU()]
            before = channels
        self.features, self.head = nn.Sequential(*layers), nn.Linear(before, 6)

    def forward(self, signal):
        return self.head(self.features(signal).mean(-1))


def model(width=32):
    return Net(width)


def waves(count, seed):
    draw = torch.Generator().manual_seed(seed)
    kind = torch.randint(6, (count,), generator=draw)
    pace, start = torch.rand(2, count, 1, generator=draw)
    time = torch.linspace(0, 1, 128)
    turns = (4 + 6 * pace) * time * torch.where(kind == 4, 1 + time[:, None], 1).T + start
    sine = torch.sin(2 * math.pi * turns)
    saw = 2 * (turns % 1) - 1
    every = torch.stack([sine, sine.sign(), saw, 2 * saw.abs() - 1, sine, sine * sine.abs()])
    signal = every[kind, torch.arange(count)]
    return (signal + 0.7 * torch.randn(count, 128, generator=draw)).unsqueeze(1), kind


def data(batch):
    x, y = waves(4_000, seed=1)
    train = torch.utils.data.TensorDataset(x, y)
    return {
        "train": torch.utils.data.DataLoader(train, batch_size=batch, shuffle=True),
        "validation": [waves(1_000, seed=2)],
        "test": [waves(3_000, seed=3)],
    }
