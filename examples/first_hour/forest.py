"""A table: 54 made measurements of a place, seven kinds of forest; an MLP."""

import torch
from sklearn.datasets import make_classification
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def model(width=128):
    return nn.Sequential(
        nn.Linear(54, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 7)
    )


def data(batch):
    x, y = make_classification(
        9_000, 54, n_informative=16, n_redundant=10, n_classes=7, n_clusters_per_class=3,
        class_sep=1.5, random_state=0,
    )  # fmt: skip
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    samples = TensorDataset(x, torch.tensor(y))
    return {
        "train": DataLoader(TensorDataset(*samples[:5_000]), batch_size=batch, shuffle=True),
        "validation": [samples[5_000:6_000]],
        "test": [samples[6_000:]],
    }
