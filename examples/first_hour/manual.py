"""Text: the next character of Python's own manual, as its help() shows it; an LSTM."""

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LETTERS = "\n" + "".join(map(chr, range(32, 127)))
LENGTH = 64


class Reader(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), 32)
        self.reader = nn.LSTM(32, width, num_layers=2, batch_first=True)
        self.next = nn.Linear(width, len(LETTERS))

    def forward(self, text):
        return self.next(self.reader(self.letters(text))[0])


def model(width=128):
    return Reader(width)


def data(batch):
    text = "".join(topics[name] for name in sorted(topics))[:260_000]
    number = {letter: place for place, letter in enumerate(LETTERS)}
    numbers = torch.tensor([number[letter] for letter in text if letter in number])
    pieces = numbers[: len(numbers) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    x, y = pieces[:, :-1], pieces[:, 1:]
    train = TensorDataset(x[:3_000], y[:3_000])
    return {
        "train": DataLoader(train, batch_size=batch, shuffle=True),
        "validation": [(x[3_000:3_400], y[3_000:3_400])],
        "test": [(x[3_400:3_900], y[3_400:3_900])],
    }
