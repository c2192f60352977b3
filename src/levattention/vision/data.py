"""Labelled images from a folder, as a vision transformer takes them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def labelled_images(folder: str | Path, count: int | None = None) -> tuple[Tensor, Tensor]:
    """(pixels (N, 3, h, w), labels (N,)) of the first `count` images that `labels.csv` lists, in its order.

    Pixels are scaled to [0, 1] and normalised with ImageNet's mean and standard deviation.

    Args:
        folder: holds labels.csv with the columns `file` and `label`, and the images, all of one size.
        count: how many; None for all.

    Raises:
        ValueError: no labels.csv, or columns that are missing.
    """
    from PIL import Image

    listing = Path(folder) / "labels.csv"
    if not listing.is_file():
        raise ValueError(f"folder: expected {listing} with the columns file and label")
    with listing.open(newline="") as lines:
        rows = list(csv.DictReader(lines))[:count]
    if not rows or not {"file", "label"} <= set(rows[0]):
        raise ValueError(f"folder: expected rows with the columns file and label in {listing}")
    images = [np.asarray(Image.open(Path(folder) / row["file"]).convert("RGB"), dtype=np.float32) for row in rows]
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (IMAGENET_MEAN, IMAGENET_STD))
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255
    return (pixels - mean) / std, torch.tensor([int(row["label"]) for row in rows])
