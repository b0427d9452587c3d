"""Digits dataset: 1,797 handwritten digits at the size of MNIST, shipped with the library.

They are the test set of *Optical Recognition of Handwritten Digits* by E. Alpaydin and C. Kaynak,
UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, CC BY 4.0; kept as safetensors.
"""

from __future__ import annotations

import hashlib
from importlib import resources

import numpy as np
import torch
from safetensors.numpy import load as read_tensors
from torch.nn import functional as F

from maestro_lod.cli.data.batches import Data, Request
from maestro_lod.cli.data.images import ImageFormat, Images, image_data

_FORMAT = ImageFormat(channels=1, side=28, crop=28, mean=(0.3058,), std=(0.3251,))


def load(request: Request) -> Data:
    """Load the digits; every fifth one is a test sample."""
    # the images of scikit-learn's load_digits, whose import takes as long as torch's
    file = resources.files("maestro_lod.cli.data") / "digits.safetensors"
    stored = read_tensors(file.read_bytes())
    labels = stored["labels"].astype(np.int64)
    pixels = torch.from_numpy(stored["images"].astype(np.float64)).unsqueeze(1) * (255 / 16)
    pixels = F.interpolate(pixels, size=(28, 28), mode="bilinear")
    images = pixels.round().to(torch.uint8).numpy()
    checksum = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    tested = np.arange(len(labels)) % 5 == 4
    return image_data(
        request,
        _FORMAT,
        train=Images(images[~tested], labels[~tested]),
        test=Images(images[tested], labels[tested]),
        classes=10,
        about=f"8×8 resized; sha256 {checksum[:12]}",
    )
